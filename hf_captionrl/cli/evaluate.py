"""`captionrl evaluate`: the papers' tables for several files of captions, side by side."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hf_captionrl.cli.features import FeaturesOptions, FeatureStage, fill_cache, rows_per_shard
from hf_captionrl.data import frames_of
from hf_captionrl.data.columns import id_column, select_rows
from hf_captionrl.data.features import source_keys
from hf_captionrl.data.options import DatasetOptions, HeldOutScorerOptions, LoadedSplit, ids_digest, load_split
from hf_captionrl.evaluation.caption_files import read_files
from hf_captionrl.evaluation.options import held_out_scorer_name, load_evaluators
from hf_captionrl.evaluation.scored_captions import (
    BLOCK,
    REFERENCES,
    ScoreStage,
    add_scores,
    count_copies,
    empty_column,
    human_captions,
    score_sources,
    write_inputs,
)
from hf_captionrl.retrieval import FeatureCache, TokenScorer, model_fingerprint
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.utils.io import json_digest, to_plain
from hf_captionrl.utils.options import EngineOptions, option
from hf_captionrl.utils.parts import ShardFolder, Stage, launched, read_shards, run_stage

if TYPE_CHECKING:
    from hf_captionrl.evaluation.evaluator import Evaluator, ScoredCaptions, Table
    from hf_captionrl.metrics.table import Section


# --- Options of `captionrl evaluate` ---------------------------------------------------------------------------------


@dataclass
class EvaluateOptions(EngineOptions, HeldOutScorerOptions, DatasetOptions):
    """Compare captioners on one data set.

    Prints the table of a paper, one column per file, with 95 % intervals and marks where a file differs from the first
    (paired randomisation test). Writes comparison.json, comparison.md, lengths.png and trade_off.png. A cell that cannot be
    computed (no Java, no network, no truth) states the reason.

    With --processes or --engine, workers compute features of images and captions, ranks and perplexity on Parquet shards in
    OUTPUT_DIR/shards. The numbers are equal, and the same command skips finished shards.
    """

    examples: ClassVar[str] = """
        suites:
          smile        length, lexical diversity, self-retrieval in the pool and among 100, CLIPScore, perplexity, CIDEr-D
          discritune   P@1 among 100, BLEU-4, METEOR, CIDEr-D, SPICE; typical nouns and adjectives (needs spaCy)
          sle          Div-1, Div-2, mBLEU-4 and CIDEr-D of several captions per image
          ndlb         R@1 in bags of 3, 5 and 7 and among 100, BLEU-4, CIDEr-D, ClipSc, vocabulary
          all          all of these
        Where the facts of an image are known, the tables also show hallucination and fact recall. --bleurt, --nli and --entropy_of
        add a table of metrics that need further models.

        examples:
          captionrl evaluate --captions mle.jsonl smile.jsonl --dataset scenes --suite smile
          captionrl evaluate --captions a.jsonl b.jsonl --names MLE SMILE --dataset dataset_coco.json --image_root coco \\
              --scorer openai/clip-vit-base-patch32 --suite all --output_dir outputs/coco
          captionrl evaluate --captions a.jsonl --scorer none --suite discritune --json
          captionrl evaluate --captions captions --dataset OWNER/NAME --split train --suite ndlb --processes 8

        captions: one JSON object per line, {"image_id": ..., "caption": ...} or {"image_id": ..., "captions": [...]}, one
        line per image of the split, in any order. `captionrl caption` writes such files.
    """

    captions: list[Path] = option(metavar="FILE", help="files of captions; the others are compared with the first")
    names: list[str] | None = option(
        None, metavar="NAME", help="names of the files in the tables (default: file names)"
    )
    suite: Literal["smile", "discritune", "sle", "ndlb", "all"] = option("smile", help="tables to compute")
    output_dir: Path = option(Path("outputs/evaluate"), metavar="DIR", help="folder to write")
    clip_prefix: str | None = option(
        None,
        group="evaluation",
        metavar="TEXT",
        help="text before each caption for the CLIPScore of the smile suite (default: 'A photo depicts ', as in the paper; "
        "none for scorers of the embedded world, which were trained without it)",
    )
    language_model: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="causal language model for perplexity, or 'none' (default: scenes:gpt2-perplexity on the embedded world, else "
        "openai-community/gpt2)",
    )
    pool: Path | None = option(
        None,
        group="evaluation",
        metavar="FILE",
        help="COCO names of the images that captions are ranked among (.json, .txt, .npy), such as CapEnrich's hard pool of "
        "SMILE; their images are taken from all splits (default: the images of the split)",
    )
    bags: Path | None = option(
        None,
        group="evaluation",
        metavar="FILE",
        help="bags of similar images: a file of `captionrl bags`, the folder of TrueMatch's release, or JSON, "
        '{"3": [["id", "id", "id"], ...], "5": ...} (default: the data set\'s column bag_id)',
    )
    bleurt: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="also compute BLEURT with this model for sequence classification, e.g. Elron/bleurt-large-512",
    )
    nli: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="also compute the probability that a reference follows from the caption, with this model for natural language "
        "inference, e.g. FacebookAI/roberta-large-mnli",
    )
    entropy_of: str | None = option(
        None,
        group="evaluation",
        metavar="CAPTIONER",
        help="also compute the mean entropy of this captioner's distributions along the captions, in nats",
    )
    no_references: bool = option(False, group="evaluation", help="leave out the column of the human captions")
    seed: int = option(
        0, group="evaluation", metavar="N", help="seed of the bootstrap, the tests and the choice of human captions"
    )


# --- The parts of `captionrl evaluate` whose cost grows with the rows, as stages on shards ---------------------------

_BLOCKS = 16
_KEYS_AT_ONCE = 4096
_DTYPES = {"text": np.float32, "clip_text": np.float32, "nats": np.float64}


def check_shards(arguments: EvaluateOptions) -> None:
    """Refuse options that do not fit, before anything slow."""
    arguments.check_engine()
    if arguments.uses_shards and launched()[1] > 1:
        raise ValueError(
            f"{launched()[1]} processes were launched, but one process writes the tables. Use --processes instead of `accelerate launch`."
        )
    _per_shard(arguments)


def _per_shard(arguments: EvaluateOptions) -> int:
    return rows_per_shard(arguments, _BLOCKS, BLOCK)


def _digest(value: Any) -> str:
    """Digest of an array, or of a value that JSON can represent."""
    if isinstance(value, np.ndarray):
        return hashlib.blake2b(np.ascontiguousarray(value), digest_size=8).hexdigest()
    return json_digest(to_plain(value))


def _shards(
    arguments: EvaluateOptions, kind: str, settings: Mapping[str, Any], rows: int, per_shard: int
) -> ShardFolder:
    """The folder of a stage. Its name depends on the settings, so other captions or models have other folders."""
    name = f"{kind}-{_digest({**settings, 'rows_per_shard': per_shard})}"
    return ShardFolder(arguments.output_dir / "shards" / name, settings, num_rows=rows, rows_per_shard=per_shard)


def _work(stage: Stage, shards: ShardFolder, arguments: EvaluateOptions) -> None:
    from tqdm import tqdm

    with tqdm(total=len(shards.unfinished()), unit=" shards", disable=None) as progress:
        run_stage(stage, shards, arguments, progress=lambda rows: progress.update(1))


def cache_image_features(arguments: EvaluateOptions, split: LoadedSplit, scorer: Any) -> None:
    """Put the image features that the cache lacks into it, in the batches that one process would compute."""
    if frames_of(split.dataset):
        return
    cache = FeatureCache.for_scorer(scorer, arguments.cache_dir)
    keys = source_keys(split.dataset, cache.root)
    rows = rows_to_encode(cache, keys)
    if not len(rows):
        return
    missing = select_rows(split.dataset, rows)
    options = FeaturesOptions(
        **{field.name: getattr(arguments, field.name) for field in fields(DatasetOptions)},
        scorer=held_out_scorer_name(arguments.dataset, arguments.scorer),
        features="image",
    )
    images = hashlib.blake2b(digest_size=8)
    for row in rows:
        images.update(keys[row].encode())
    settings = {"scorer": scorer.signature, "images": images.hexdigest()}
    shards = _shards(arguments, "images", settings, len(rows), _per_shard(arguments))
    # Bad rows are not among the images here, but they are when another process loads them.
    stage = FeatureStage(options, ids_digest(missing), only=split.all_ids.rows(id_column(missing)))
    _work(stage, shards, arguments)
    fill_cache(cache, shards.folder, "image")


def rows_to_encode(cache: FeatureCache, keys: Sequence[str]) -> np.ndarray:
    """Rows whose features are not in the cache, ascending; of rows with one key only the first."""
    starts = range(0, len(keys), _KEYS_AT_ONCE)
    parts = [start + np.array(cache.missing(keys[start : start + _KEYS_AT_ONCE]), np.int64) for start in starts]
    missing = np.concatenate(parts)
    return missing[RowLookup(keys).first_rows()[missing] == missing]


def score_on_shards(
    arguments: EvaluateOptions,
    sources: Sequence[ScoredCaptions],
    scorer: Any,
    language_model: tuple[Any, Any] | None,
    *,
    clip_prefix: str,
    pools: Mapping[str, Any],
) -> None:
    """The same as `score_sources`, on shards of captions."""
    captions = [source.first for source in sources]
    columns = [*pools]
    if scorer is not None:
        columns += [
            "text",
            *(["clip_text"] if clip_prefix else []),
            *(["tokens"] if isinstance(scorer, TokenScorer) else []),
        ]
    if language_model is not None:
        columns += ["nats", "scored_tokens"]
    if not columns:
        return
    per_shard = _per_shard(arguments)
    rows_per_source = -(-len(captions[0]) // per_shard) * per_shard
    settings = {
        "captions": _digest(captions),
        "pools": {name: _digest(np.asarray(features)) for name, features in pools.items()},
        "scorer": None if scorer is None else scorer.signature,
        "language_model": None if language_model is None else model_fingerprint(language_model[0]),
        "clip_prefix": clip_prefix,
        "columns": columns,
    }
    shards = _shards(arguments, "captions", settings, len(sources) * rows_per_source, per_shard)
    if shards.unfinished():
        write_inputs(shards.folder, captions, pools)
    models = (arguments.dataset, arguments.scorer, arguments.language_model)
    _work(ScoreStage(shards.folder, rows_per_source, models, clip_prefix, columns), shards, arguments)
    rows = read_shards(shards.folder)
    for source in sources:
        add_scores(
            source, _columns(rows, len(source.captions), arguments.output_dir), scorer, language_model, clip_prefix
        )


def _columns(rows: Iterator[dict[str, Any]], number: int, folder: Path) -> dict[str, np.ndarray]:
    """Columns of the next rows."""
    found: dict[str, np.ndarray] = {}
    for at, row in enumerate(itertools.islice(rows, number)):
        for name, value in row.items():
            if at == 0:
                found[name] = empty_column((number, *np.shape(value)), _DTYPES.get(name, np.int64), folder)
            found[name][at] = value
    return found


# --- `captionrl evaluate`: the papers' tables for several files of captions, side by side ----------------------------

_WORDS_TITLE = "Words that distinguish the sources (local mutual information)"


def _words(scored: Sequence[ScoredCaptions], references: Sequence[list[str]]) -> dict[str, Any]:
    """Typical nouns and adjectives of each source, or the reason why there are none."""
    from hf_captionrl.metrics.suites import spoken
    from hf_captionrl.metrics.words import characteristic_words, spacy_tagger

    sources = {source.name: spoken(source.first) for source in scored if not source.is_human}
    human = [caption for group in references for caption in group]
    sources |= {REFERENCES: human} if human else {}
    if len(sources) < 2:
        return {"reason": "no references, and one file of captions"}
    try:
        tagger = spacy_tagger()
    except ImportError as error:
        return {"reason": str(error)}
    found = characteristic_words(sources, tagger=tagger)
    listed = {name: {source: [w for w, _ in words] for source, words in found[part].items()}
              for name, part in (("adjectives", "ADJ"), ("nouns", "NOUN"))}  # fmt: skip
    return {**listed, "signature": found["signature"]}


def _words_lines(words: Mapping[str, Any]) -> list[str]:
    """The words as text, one line per source and kind."""
    if "reason" in words:
        return [f"not run: {words['reason']}"]
    return [
        f"{kind}, {source}: {', '.join(found) or '–'}"
        for kind in ("adjectives", "nouns")
        for source, found in words[kind].items()
    ]


def _markdown(title: str, sections: Sequence[Section], words: Mapping[str, Any] | None) -> str:
    from hf_captionrl.metrics.table import comparison_markdown, escape_markdown

    text = comparison_markdown(sections, title=title)
    if words is None:
        return text
    lines = "".join(f"- {escape_markdown(line)}\n" for line in _words_lines(words))
    return f"{text}\n## {_WORDS_TITLE}\n\n{lines}"


def _plain_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as results.json has them, without the scores of single images."""
    return [{key: value for key, value in row.items() if key not in ("per_sample", "groups", "ranks")} for row in rows]


def _count_copies(evaluator: Evaluator, num_images: int) -> int:
    """Number of images that are copies of others. Prints a warning if there are any."""
    copies = 0 if evaluator.image_features is None else count_copies(evaluator.image_features)
    if copies:
        print(
            f"captionrl evaluate: {copies} of {num_images} images are copies of others, which lowers the retrieval of both. "
            "Leave them out, or merge them with metrics.self_retrieval.",
            file=sys.stderr,
        )
    return copies


def _sections(
    tables: Mapping[str, Table], scored: Sequence[ScoredCaptions], evaluator: Evaluator, reasons: Mapping[str, str]
) -> tuple[dict[str, Section], dict[str, Any]]:
    """The chosen tables and the table of all captions, by name; and the signatures of their numbers."""
    from hf_captionrl.evaluation.evaluator import CAPTIONS_TABLE, compare_with_first
    from hf_captionrl.metrics.table import Section

    sections, signatures = {}, {}
    for name, table in [*tables.items(), ("captions", CAPTIONS_TABLE)]:
        rows = [{"name": source.name, **table.compute(source, evaluator)} for source in scored]
        compare_with_first(rows, seed=evaluator.seed)
        signatures[name] = rows[0]["signatures"]
        for row in rows:
            row.pop("signatures", None)
            for key, reason in list(row.items()):
                if key.endswith("_reason") and reason in reasons:
                    row[key] = reasons[reason]
        sections[name] = Section(table.title, table.columns, _plain_rows(rows))
    return sections, signatures


def _check_files(arguments: EvaluateOptions) -> None:
    """Refuse bags and pools that are missing, or that no table would use."""
    for name, path, suite in (("bags", arguments.bags, "ndlb"), ("pool", arguments.pool, "smile")):
        if path is None:
            continue
        if not path.exists():
            raise FileNotFoundError(f"There is no file {str(path)!r} for --{name}. Use an existing one.")
        if arguments.suite not in (suite, "all") or arguments.scorer == "none":
            raise ValueError(
                f"--{name} is {str(path)!r}, but only the table of --suite {suite} ranks captions in it, with a scorer; --suite is "
                f"{arguments.suite!r} and --scorer {arguments.scorer or 'the default'!r}. Use --suite {suite} or all with a scorer, "
                f"or leave --{name} out."
            )


def _score(
    arguments: EvaluateOptions,
    scored: Sequence[ScoredCaptions],
    evaluator: Evaluator,
    language_model: tuple[Any, Any] | None,
    suites: Sequence[str],
) -> None:
    """Compute the numbers that several tables share, once, and only those that the suites need."""
    from hf_captionrl.evaluation.options import clip_prefix

    scorer, prefix = evaluator.held_out_scorer, ""
    pools: dict[str, Any] = {}
    if scorer is not None and {"smile", "ndlb"} & set(suites):
        pools = {"image_rank": evaluator.image_features}
    if "smile" not in suites:
        language_model = None
    elif scorer is not None:
        prefix = clip_prefix(arguments.clip_prefix, arguments.dataset, arguments.scorer)
        pools |= {} if evaluator.pool_features is None else {"pool_rank": evaluator.pool_features}
    if not arguments.uses_shards:
        score_sources(scored, scorer, language_model, clip_prefix=prefix, pools=pools, folder=arguments.output_dir)
        return

    score_on_shards(arguments, scored, scorer, language_model, clip_prefix=prefix, pools=pools)


def evaluate_captions(arguments: EvaluateOptions) -> None:
    """Compare the files."""
    files = read_files(arguments.captions, arguments.names)  # before anything slow
    _check_files(arguments)
    from hf_captionrl.data.columns import id_column
    from hf_captionrl.evaluation.evaluator import (
        PREFERENCES_TABLE,
        TABLES,
        Evaluator,
        ScoredCaptions,
        learned_table,
        pool_images,
        read_bags,
    )
    from hf_captionrl.evaluation.plots import write_length_histogram
    from hf_captionrl.metrics.table import installed_versions, plain_config, print_comparison
    from hf_captionrl.utils.io import atomic_write_text, to_plain, write_json

    check_shards(arguments)
    learned = learned_table(arguments.bleurt, arguments.nli, arguments.entropy_of)  # before anything slow
    folder = arguments.output_dir
    split = load_split(
        arguments, quarantine_path=folder / "quarantine.jsonl", require_captions=not arguments.no_references
    )
    ids = id_column(split.dataset)
    described = [{"name": file.name, "path": str(file.path), "captions": len(file.captions)} for file in files]
    aligned = [files.pop(0).aligned(ids, split.all_ids) for _ in described]  # only in Arrow from here on
    given_bags = None if arguments.bags is None else read_bags(arguments.bags, ids)
    scorer, language_model, reasons = load_evaluators(arguments.dataset, arguments.scorer, arguments.language_model)
    if arguments.uses_shards and scorer is not None:
        cache_image_features(arguments, split, scorer)
    # The evaluator's perplexity is a bare number; here every number has an interval.
    evaluator = Evaluator(split.dataset, scorer, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    if arguments.pool is not None and scorer is not None:
        every = load_split(
            replace(arguments, split="all", max_images=None), quarantine_path=None, require_captions=False
        )
        evaluator.pool_features = evaluator.features_of(pool_images(arguments.pool, split.dataset, every.dataset))
    evaluator.bags = evaluator.bags if given_bags is None else given_bags
    scored = [
        ScoredCaptions(str(file["name"]), captions, evaluator.references)
        for file, captions in zip(described, aligned, strict=True)
    ]
    human = None if arguments.no_references else human_captions(evaluator)
    if human is not None:
        scored.append(human)
    names = [*TABLES] if arguments.suite == "all" else [arguments.suite]
    _score(arguments, scored, evaluator, language_model, names)

    copies = _count_copies(evaluator, len(ids))
    tables = {name: TABLES[name] for name in names} | ({} if learned is None else {"learned": learned})
    if evaluator.parts:
        tables["preferences"] = PREFERENCES_TABLE
    sections, signatures = _sections(tables, scored, evaluator, reasons)
    shown = list(sections.values())
    words = _words(scored, evaluator.references) if "discritune" in names else None

    result: dict[str, Any] = {
        "suite": arguments.suite,
        "num_images": len(ids),
        "num_duplicate_images": copies,
        "files": described,
        "scorer": None if scorer is None else scorer.signature,
        "tables": {name: {"title": section.title, "rows": section.rows} for name, section in sections.items()},
        "signatures": signatures,
        "words": words,
        "seed": arguments.seed,
        "config": plain_config({k: v for k, v in vars(arguments).items() if k not in ("traceback", "json")}),
        "versions": installed_versions(),
    }
    write_json(folder / "comparison.json", result)
    title = f"{len(ids)} images of {Path(arguments.dataset).name}"
    atomic_write_text(folder / "comparison.md", _markdown(title, shown, words))
    write_length_histogram(folder / "lengths.png", {source.name: source.lengths for source in scored})
    written = ["comparison.json", "comparison.md", "lengths.png"]
    if _draw_trade_off(folder / "trade_off.png", shown):
        written.append("trade_off.png")
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print_comparison(shown)
    if words is not None:
        print("\n  ".join([_WORDS_TITLE, *_words_lines(words)]))
    print(f"Written to {folder}: {', '.join(written)}")


def _draw_trade_off(path: Path, sections: Sequence[Section]) -> bool:
    """Plot retrieval against faithfulness, or against CIDEr-D without known facts, from the first table that has both."""
    from hf_captionrl.evaluation.plots import write_trade_off

    retrieval = {
        "pool_recall_at_1": "R@1 in the pool",
        "blocks_recall_at_1": "P@1 among 100",
        "rd100_recall_at_1": "R@1, RD100",
    }
    faithful = {"hallucination": "Hallucination (share of wrong claims)", "cider_d": "CIDEr-D"}
    for y, y_label in faithful.items():
        for section in sections:
            for x, x_label in retrieval.items():
                if write_trade_off(path, section.rows, x=(x, f"Self-retrieval: {x_label}"), y=(y, y_label)):
                    return True
    path.unlink(missing_ok=True)
    return False
