"""`captionrl evaluate`: tables of several files of captions, side by side, from text alone or with images."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_captionrl.cli.features import FeatureParts, FeaturesOptions, fill_cache, rows_per_part
from hf_captionrl.cli.options import EvaluateOptions
from hf_captionrl.data.columns import CAPTIONS, frames_of, id_column, replace_column
from hf_captionrl.data.features import source_keys
from hf_captionrl.data.options import DatasetOptions, LoadedSplit, ids_digest, load_split
from hf_captionrl.evaluation.caption_files import (
    CaptionFile,
    measured_images,
    read_files,
    read_references,
    training_of,
)
from hf_captionrl.evaluation.evaluator import (
    BEST,
    CAPTIONS_TABLE,
    PREFERENCES_TABLE,
    TABLES,
    Evaluator,
    ScoredCaptions,
    Table,
    compare_with_first,
    human_captions,
    learned_table,
    pool_images,
    read_bags,
)
from hf_captionrl.evaluation.options import clip_prefix, held_out_scorer_name, load_evaluators
from hf_captionrl.evaluation.plots import write_length_histogram, write_trade_off
from hf_captionrl.evaluation.scored_captions import (
    BLOCK,
    REFERENCES,
    CaptionScoring,
    ScoreParts,
    columns_of_table,
    score_sources,
    write_inputs,
)
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.columns import variants
from hf_captionrl.metrics.table import (
    Section,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    print_comparison,
    without_repeats,
)
from hf_captionrl.metrics.words import characteristic_words, spacy_tagger
from hf_captionrl.retrieval import FeatureCache, model_fingerprint
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.retrieval.ranking import duplicate_images
from hf_captionrl.text.tokenize import lacks_blanks, split_characters
from hf_captionrl.utils.io import (
    atomic_write_text,
    escape_markdown,
    installed_versions,
    json_digest,
    plain_config,
    to_plain,
    write_json,
)
from hf_captionrl.utils.parts import MakePart, read_tables, run_parts, split_rows

# --- Features of images and scores of captions, whose cost grows with the rows; with --processes or --engine in parts ----

_BLOCKS = 16
_KEYS_AT_ONCE = 4096


def _run(
    arguments: EvaluateOptions, kind: str, settings: Mapping[str, Any], rows: int, make: Callable[[Path], MakePart]
) -> Path:
    """Write parts into a folder whose name depends on the settings, so other captions or models have other folders."""
    size = rows_per_part(arguments, _BLOCKS, BLOCK)
    name = f"{kind}-{json_digest(to_plain({**settings, 'rows_per_shard': size}))}"
    folder = arguments.output_dir / "shards" / name
    run_parts(folder, split_rows(rows, size), make(folder), arguments, settings=settings)
    return folder


def cache_image_features(arguments: EvaluateOptions, split: LoadedSplit, scorer: Any) -> None:
    """Put the image features that the cache lacks into it, in the batches that one process would compute."""
    if frames_of(split.dataset):
        return
    cache = FeatureCache.for_scorer(scorer, arguments.cache_dir)
    keys = source_keys(split.dataset)
    rows = rows_to_encode(cache, keys)
    if not len(rows):
        return
    missing = split.dataset.select(rows)
    options = FeaturesOptions(
        **{field.name: getattr(arguments, field.name) for field in fields(DatasetOptions)},
        scorer=held_out_scorer_name(arguments.dataset, arguments.scorer),
        features="image",
    )
    new = [keys[row] for row in rows.tolist()]
    settings = {"scorer": scorer.signature, "images": json_digest(new)}
    # Bad rows are not among the images here, but they are when another process loads them.
    make_part = FeatureParts(options, ids_digest(missing), only=split.all_ids.rows(id_column(missing)))
    fill_cache(cache, new, _run(arguments, "images", settings, len(rows), lambda folder: make_part))


def rows_to_encode(cache: FeatureCache, keys: Sequence[str]) -> np.ndarray:
    """Rows whose features are not in the cache, ascending; of rows with one key only the first."""
    starts = range(0, len(keys), _KEYS_AT_ONCE)
    parts = [start + np.array(cache.missing(keys[start : start + _KEYS_AT_ONCE]), np.int64) for start in starts]
    missing = np.concatenate(parts)
    return missing[RowLookup(keys).first_rows()[missing] == missing]


def _scored_parts(
    arguments: EvaluateOptions, sources: Sequence[ScoredCaptions], scoring: CaptionScoring
) -> Iterator[Mapping[str, np.ndarray]]:
    """Columns of the captions of all sources, computed in parts."""
    captions, columns = [single.first for source in sources for single in source.singles], scoring.columns()
    size = rows_per_part(arguments, _BLOCKS, BLOCK)
    rows_per_source = -(-len(captions[0]) // size) * size
    scorer, language_model = scoring.scorer, scoring.language_model

    def digest(features: Any) -> str:
        return hashlib.blake2b(np.ascontiguousarray(features), digest_size=8).hexdigest()

    settings = {
        "captions": json_digest(to_plain(captions)),
        "pools": {name: digest(features) for name, features in scoring.pools.items()},
        "scorer": None if scorer is None else scorer.signature,
        "language_model": None if language_model is None else model_fingerprint(language_model[0]),
        "clip_prefix": scoring.clip_prefix,
        "columns": columns,
    }
    models = (arguments.dataset, arguments.scorer, arguments.language_model)

    def make(folder: Path) -> MakePart:
        write_inputs(folder, captions, scoring.pools)
        return ScoreParts(folder, rows_per_source, models, scoring.clip_prefix, columns)

    folder = _run(arguments, "captions", settings, len(captions) * rows_per_source, make)
    return map(columns_of_table, read_tables(folder))


# --- The command -----------------------------------------------------------------------------------------------------

_WORDS_TITLE = "Words that distinguish the sources (local mutual information)"


def _texts(source: ScoredCaptions) -> list[str]:
    """All captions of a source that are scored."""
    return spoken([caption for group in source.captions for caption in (group[:1] if source.is_human else group)])


def _words(scored: Sequence[ScoredCaptions], references: Sequence[list[str]]) -> dict[str, Any]:
    """Typical nouns and adjectives of each source, or the reason why there are none."""
    sources = {source.name: _texts(source) for source in scored if not source.is_human}
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


def _count_copies(evaluator: Evaluator, num_images: int) -> int:
    """Number of images that are copies of earlier ones: false negatives of their captions. Prints a warning if there are any."""
    first = () if evaluator.image_features is None else duplicate_images(evaluator.image_features).tolist()
    copies = sum(other != row for row, other in enumerate(first))
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
    """The chosen tables by name, and the signatures of their numbers."""
    sections, signatures = {}, {}
    several = any(len(source.singles) > 1 for source in scored)
    for name, table in tables.items():
        rows = [table.row(source, evaluator, with_best=several) for source in scored]
        compare_with_first(rows, seed=evaluator.seed)
        signatures[name] = rows[0]["signatures"]
        for row in rows:
            for key in ("signatures", "per_sample", "groups", "ranks"):
                row.pop(key, None)
            for key, reason in list(row.items()):
                if key.endswith("_reason") and reason in reasons:
                    row[key] = reasons[reason]
        sections[name] = Section(table.title, table.columns, rows)
        if several and not table.takes_all:
            best = variants("best", ", best caption of an image", *(c for c in table.columns if c.key in BEST))
            sections[name] = Section(f"{table.title}, mean over an image's captions", table.columns + best, rows)
    return sections, signatures


def _without_images(arguments: EvaluateOptions) -> bool:
    """Set the defaults that depend on each other; whether text alone is measured."""
    arguments.dataset = arguments.dataset or ("scenes" if arguments.references is None else "none")
    is_text = arguments.dataset == "none"
    arguments.suite = arguments.suite or ("text" if is_text else "smile")
    if not is_text:
        return False
    of_images = ("scorer", "pool", "bags", "entropy_of", "pac_s")
    for name in (
        *of_images,
        "split",
        "data_dir",
        "image_root",
        "dataset_config",
        "dataset_revision",
    ):
        value = getattr(arguments, name)
        if value not in (None, "none"):
            raise ValueError(
                f"--{name} is {str(value)!r}, but without --dataset there are no images. Use --dataset, or leave --{name} out."
            )
    arguments.scorer = "none"
    return True


def _captioned_images(
    arguments: EvaluateOptions, files: Sequence[CaptionFile], references: CaptionFile | None
) -> LoadedSplit:
    """The images that the captions name, without pixels, and their references."""
    ids = measured_images(files, references)
    if references is not None and len(references.captions) > len(ids):
        print(
            f"captionrl evaluate: {len(ids)} images have captions; the other {len(references.captions) - len(ids):,} of the "
            f"{len(references.captions):,} images of {references.path} are left out.",
            file=sys.stderr,
        )
    return LoadedSplit(_text_rows(ids[: arguments.max_images], references), RowLookup(ids), "all", {"all": len(ids)})


def _text_rows(ids: Sequence[str], references: CaptionFile | None) -> datasets.Dataset:
    captions = [[] if references is None else references.captions[i] for i in ids]
    kinds = datasets.Features({"image_id": datasets.Value("string"), "captions": CAPTIONS})
    return datasets.Dataset.from_dict({"image_id": list(ids), "captions": captions}, features=kinds)


def _with_references(split: LoadedSplit, name: str, references: CaptionFile) -> LoadedSplit:
    """The images of a data set with the references of a file."""
    ids = list(id_column(split.dataset))
    measured_images([CaptionFile(name, Path(name), {i: [] for i in ids})], references)  # raises if one has none
    rows = replace_column(split.dataset, "captions", [references.captions[i] for i in ids], CAPTIONS)
    return split._replace(dataset=rows)


_REASONS = {"no language model": "no language model (use --language_model, for example openai-community/gpt2)"}
_TEXT_ALONE = {
    "no scorer": "no images (use --dataset and --scorer)",
    "no scorer, or one that does not count tokens": "no images (use --dataset and --scorer)",
    "no references": "no references (use --references)",
}


def _check_options(arguments: EvaluateOptions) -> None:
    """Refuse options that do not fit the engine, and bags and pools that are missing, or that no table would use."""
    arguments.check_engine()
    rows_per_part(arguments, _BLOCKS, BLOCK)
    if arguments.suite not in ("text", "smile", "all"):
        if arguments.language_model not in (None, "none"):
            raise ValueError(f"--suite {arguments.suite} has no perplexity. Leave --language_model out.")
        arguments.language_model = "none"
    for name, path, suite in (("bags", arguments.bags, "ndlb"), ("pool", arguments.pool, "smile")):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"There is no file {str(path)!r} for --{name}. Use an existing one.")
        if path is not None and (arguments.suite not in (suite, "all") or arguments.scorer == "none"):
            raise ValueError(
                f"--{name} is {str(path)!r}, but only the table of --suite {suite} ranks captions in it, with a scorer; --suite is "
                f"{arguments.suite!r} and --scorer {arguments.scorer or 'the default'!r}. Use --suite {suite} or all with a scorer, "
                f"or leave --{name} out."
            )


def _scoring(
    arguments: EvaluateOptions, evaluator: Evaluator, language_model: tuple[Any, Any] | None, suites: Sequence[str]
) -> CaptionScoring:
    """What computes the numbers that several tables share: only those that the suites need."""
    scorer, prefix = evaluator.held_out_scorer, ""
    pools: dict[str, Any] = {}
    if scorer is not None and {"smile", "ndlb"} & set(suites):
        pools = {"image_rank": evaluator.image_features}
    if scorer is not None and "smile" in suites:
        prefix = clip_prefix(arguments.clip_prefix, arguments.dataset, arguments.scorer)
        pools |= {} if evaluator.pool_features is None else {"pool_rank": evaluator.pool_features}
    return CaptionScoring(scorer, language_model, clip_prefix=prefix, pools=pools)


def evaluate_captions(arguments: EvaluateOptions) -> None:
    """Compare the files."""
    _without_images(arguments)
    files = read_files(arguments.captions, arguments.names)  # before anything slow
    references = None if arguments.references is None else read_references(arguments.references)
    _check_options(arguments)
    learned = learned_table(arguments.entropy_of, arguments.pac_s)  # before anything slow
    _write_tables(arguments, files, references, learned)


def _write_tables(
    arguments: EvaluateOptions, files: list[CaptionFile], references: CaptionFile | None, learned: Table | None
) -> None:
    is_text, folder = arguments.dataset == "none", arguments.output_dir
    scorer, language_model, reasons = load_evaluators(arguments.dataset, arguments.scorer, arguments.language_model)
    asked = arguments.split
    if is_text:
        split = _captioned_images(arguments, files, references)
    else:
        needs_captions = None if references is None and not arguments.no_references else False
        split = load_split(arguments, quarantine_path=folder / "quarantine.jsonl", require_captions=needs_captions)
        split = split if references is None else _with_references(split, arguments.dataset, references)
    rows = split.dataset
    for file in files:
        model, trained = training_of(file.path)
        rows = arguments.without(rows, trained & set(id_column(rows)), model)
    split, known = split._replace(dataset=rows), split.all_ids
    if not is_text and asked not in (None, "all") and any(set(file.captions).difference(known) for file in files):
        # A file may also hold captions of other splits.
        whole = replace(arguments, split="all", max_images=None)
        known = load_split(whole, quarantine_path=None, require_captions=False).all_ids
    ids = id_column(split.dataset)
    described = [{"name": file.name, "path": str(file.path), "captions": len(file.captions)} for file in files]
    aligned = [files.pop(0).aligned(ids, known) for _ in described]  # only in Arrow from here on
    given_bags = None if arguments.bags is None else read_bags(arguments.bags, ids)
    reasons = _REASONS | (_TEXT_ALONE if is_text else {"no references": _TEXT_ALONE["no references"]}) | reasons
    if arguments.uses_shards and scorer is not None:
        cache_image_features(arguments, split, scorer)
    # The evaluator's perplexity is a bare number; here every number has an interval.
    evaluator = Evaluator(split.dataset, scorer, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    if arguments.pool is not None and scorer is not None:
        every = load_split(
            replace(arguments, split="all", max_images=None), quarantine_path=None, require_captions=False
        )
        evaluator.pool_features = evaluator.features_of(pool_images(arguments.pool, split.dataset, every.dataset))
    evaluator.bags, evaluator.tokenize = evaluator.bags if given_bags is None else given_bags, arguments.tokenize
    scored = [
        ScoredCaptions(str(file["name"]), captions, evaluator.references)
        for file, captions in zip(described, aligned, strict=True)
    ]
    if arguments.tokenize == "ptb" and any(lacks_blanks(_texts(source)) for source in scored):
        said = "most captions of a file have no blanks, and count as one word each. Use --tokenize char."
        print(f"captionrl evaluate: {said}", file=sys.stderr)
    human = None if arguments.no_references else human_captions(evaluator)
    if human is not None:
        scored.append(human)
    names = [*TABLES] if arguments.suite == "all" else [str(arguments.suite)]
    if "sle" not in names and any(len(source.singles) > 1 for source in scored):
        names.append("sle")
    scoring = _scoring(arguments, evaluator, language_model, names)
    on_shards = arguments.uses_shards and bool(scoring.columns())
    score_sources(scored, scoring, _scored_parts(arguments, scored, scoring) if on_shards else None, folder=folder)

    copies = _count_copies(evaluator, len(ids))
    tables = {name: TABLES[name] for name in names} | ({} if learned is None else {"learned": learned})
    tables |= {"preferences": PREFERENCES_TABLE} if evaluator.parts else {}
    sections, signatures = _sections({**tables, "captions": CAPTIONS_TABLE}, scored, evaluator, reasons)
    shown = without_repeats(list(sections.values()))
    words = _words(scored, evaluator.references) if "discritune" in names else None

    result: dict[str, Any] = {
        "suite": arguments.suite,
        "num_images": len(ids),
        "num_images_left_out": len(references.captions) - len(ids) if references is not None else 0,
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
    source = arguments.dataset if references is None or not is_text else references.path
    title = f"{len(ids)} images" + ("" if source == "none" else f" of {Path(source).name}")
    text = comparison_markdown(shown, title=title)
    if words is not None:
        text += f"\n## {_WORDS_TITLE}\n\n" + "".join(f"- {escape_markdown(line)}\n" for line in _words_lines(words))
    atomic_write_text(folder / "comparison.md", text)
    atomic_write_text(folder / "comparison.csv", comparison_csv(shown))
    atomic_write_text(folder / "comparison.tex", comparison_latex(shown))
    words_of = split_characters if arguments.tokenize == "char" else list
    lengths = {source.name: [len(text.split()) for text in words_of(_texts(source))] for source in scored}
    write_length_histogram(folder / "lengths.png", lengths)
    written = [f"comparison.{suffix}" for suffix in ("json", "md", "csv", "tex")] + ["lengths.png"]
    if _draw_trade_off(folder / "trade_off.png", list(sections.values())):
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
