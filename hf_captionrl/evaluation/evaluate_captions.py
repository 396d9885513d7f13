"""`captionrl evaluate`: the papers' tables for several files of captions, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.caption_sources import read_files
from hf_captionrl.evaluation.dataset_options import load_split
from hf_captionrl.evaluation.evaluation_models import load_evaluators
from hf_captionrl.evaluation.scored_captions import (
    REFERENCES,
    count_copies,
    human_captions,
    score_sources,
)

if TYPE_CHECKING:
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions, Table
    from hf_captionrl.reports.comparison import Section

from hf_captionrl.evaluation.evaluate_options import EvaluateOptions

__all__ = ["evaluate_captions"]

_WORDS_TITLE = "Words that distinguish the sources (local mutual information)"


def _words(scored: Sequence[ScoredCaptions], references: Sequence[list[str]]) -> dict[str, Any]:
    """Typical nouns and adjectives of each source, or the reason why there are none."""
    from hf_captionrl.metrics.suites.suite_row import spoken
    from hf_captionrl.metrics.word_statistics import characteristic_words, spacy_tagger

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
    from hf_captionrl.reports.comparison import comparison_markdown
    from hf_captionrl.reports.table import escape_markdown

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
    from hf_captionrl.evaluation.paper_tables import CAPTIONS_TABLE, compare_with_first
    from hf_captionrl.reports.comparison import Section

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
    from hf_captionrl.evaluation.arguments import clip_prefix

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
    from hf_captionrl.evaluation.evaluate_on_shards import score_on_shards

    score_on_shards(arguments, scored, scorer, language_model, clip_prefix=prefix, pools=pools)


def evaluate_captions(arguments: EvaluateOptions) -> None:
    """Compare the files."""
    files = read_files(arguments.captions, arguments.names)  # before anything slow
    _check_files(arguments)
    from hf_captionrl.data.arrow_columns import id_column
    from hf_captionrl.evaluation.evaluate_on_shards import cache_image_features, check_shards
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.evaluation.image_pools import pool_images, read_bags
    from hf_captionrl.evaluation.learned_metrics import learned_table
    from hf_captionrl.evaluation.paper_tables import PREFERENCES_TABLE, TABLES, ScoredCaptions
    from hf_captionrl.io import atomic_write_text, to_plain, write_json
    from hf_captionrl.reports.comparison import print_comparison
    from hf_captionrl.reports.length_plots import write_length_histogram
    from hf_captionrl.reports.versions import installed_versions, plain_config

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
    from hf_captionrl.reports.length_plots import write_trade_off

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
