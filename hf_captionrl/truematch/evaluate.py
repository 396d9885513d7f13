"""`captionrl truematch evaluate`: evaluate captioners on a benchmark of similar images."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import DatasetOptions, load_split
from hf_captionrl.truematch.benchmark_files import bags_fingerprint, load_truematch
from hf_captionrl.truematch.build import print_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import datasets

    from hf_captionrl.evaluation.caption_files import CaptionFile
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.reports.table import Column
    from hf_captionrl.truematch.options import EvaluateOptions

__all__ = ["COLUMNS", "RESULTS_FORMAT", "evaluate", "table_columns"]

COLUMNS = ("rd100_recall_at_1", "cider_d", "clip_score", "hallucination", "fact_recall")
"""Metrics beside the recall in bags: recall among random distractors, and faithfulness of the captions."""

RESULTS_FORMAT = "truematch-results-1"
"""Value of `format` in results.json."""


def _caption(model: str, images: DatasetOptions, folder: Path) -> Path:
    """Caption the images with a model, or resume; the same as `captionrl caption`."""
    from hf_captionrl.evaluation.caption_options import CaptionOptions
    from hf_captionrl.evaluation.write_captions import write_captions

    file_name = "".join(c if c.isalnum() or c in "-." else "_" for c in model).strip("._") or "model"
    output = folder / "captions" / f"{file_name}.jsonl"
    which = {field.name: getattr(images, field.name) for field in fields(DatasetOptions)}
    options = CaptionOptions(**{**which, "json": False, "model": model, "output": output})
    with contextlib.redirect_stdout(sys.stderr):  # stdout may be JSON
        write_captions(options)
    return output


def _files(arguments: EvaluateOptions, images: DatasetOptions, output_dir: Path) -> list[CaptionFile]:
    """The captions to evaluate: those of files, then those of models."""
    from hf_captionrl.evaluation.caption_files import read_caption_file
    from hf_captionrl.evaluation.caption_sources import source_names

    names = source_names([*arguments.captions, *arguments.models], arguments.names)
    if not names and not arguments.references:
        raise ValueError("There is nothing to evaluate. Use --captions, --models or --references.")
    paths = list(arguments.captions)
    given = [
        read_caption_file(path, name=name) for path, name in zip(paths, names, strict=False)
    ]  # before anything slow
    for model, name in zip(arguments.models, names[len(paths) :], strict=True):
        given.append(read_caption_file(_caption(model, images, output_dir), name=name))
    return given


def table_columns(sizes: Iterable[int]) -> list[Column]:
    """Columns of the table for these bag sizes."""
    from hf_captionrl.evaluate_modules.declarations.self_retrieval import bag_column
    from hf_captionrl.evaluation.paper_tables import TABLES

    known = {column.key: column for column in TABLES["ndlb"].columns}
    return [*map(bag_column, sorted(sizes)), *(known[key] for key in COLUMNS)]


def _hits(row: Mapping[str, Any], bag_names: Mapping[int, Sequence[str]], ids: Sequence[str]) -> dict[str, Any]:
    """Hit or miss per caption, with the id of its bag or image, so that a leaderboard can pair results."""
    found = {}
    for key, names in (
        *((f"bag_{size}_recall_at_1", names) for size, names in bag_names.items()),
        ("rd100_recall_at_1", ids),
    ):
        if row.get(key) is not None:
            groups = [names[number] for number in row["groups"][key]]
            found[key] = {"values": row["per_sample"][key], "groups": groups}
    return found


def _evaluator(arguments: EvaluateOptions, dataset: datasets.Dataset, source: str, bags: dict[int, Any]) -> Evaluator:
    """The held-out scorer on the images and bags."""
    from hf_captionrl.evaluation.evaluation_models import load_evaluators
    from hf_captionrl.evaluation.evaluator import Evaluator

    scorer, _, reasons = load_evaluators(source, arguments.scorer, "none")
    if scorer is None:
        why = reasons.get("no scorer", "--scorer is 'none'")
        raise ValueError(f"Retrieval needs a scorer, but {why}. Use another --scorer.")
    evaluator = Evaluator(dataset, scorer, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    evaluator.bags = bags
    return evaluator


def evaluate(arguments: EvaluateOptions) -> None:
    """Evaluate captioners on the benchmark; writes results.json and results.md."""
    found = load_truematch(arguments.folder)
    bags = found.bags if arguments.all_bags else found.kept
    output_dir = arguments.output_dir or Path("outputs") / found.folder.resolve().name

    from hf_captionrl.evaluation.paper_tables import TABLES, ScoredCaptions, compare_with_first
    from hf_captionrl.evaluation.scored_captions import human_captions, score_sources
    from hf_captionrl.io import atomic_write_text, to_plain, write_json
    from hf_captionrl.reports.comparison import Section, comparison_markdown, print_comparison
    from hf_captionrl.reports.versions import installed_versions
    from hf_captionrl.truematch.decisions import bag_id

    for path in arguments.captions:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r} for --captions.")
    images = arguments if arguments.dataset else replace(arguments, dataset=found.images, split="test")
    split = load_split(images, quarantine_path=output_dir / "quarantine.jsonl")
    dataset = split.dataset
    if arguments.bag_images_only:
        wanted = {image_id for bag in bags.bags for image_id in bag}
        dataset = dataset.select([row for row, i in enumerate(dataset["image_id"][:]) if str(i) in wanted])
    ids = [str(i) for i in dataset["image_id"][:]]
    rows_of = bags.rows(ids)  # fails on missing images before any model is loaded
    files = _files(arguments, images, output_dir)
    aligned = [file.aligned(ids, split.all_ids) for file in files]

    evaluator = _evaluator(arguments, dataset, found.manifest["source"], rows_of)
    pairs = zip(files, aligned, strict=True)
    scored = [ScoredCaptions(file.name, c, evaluator.references) for file, c in pairs]
    if arguments.references:
        human = human_captions(evaluator)
        if human is None:
            raise ValueError("--references needs at least two references per image. Leave it out.")
        scored.append(human)
    held_out: Any = evaluator.held_out_scorer
    score_sources(scored, held_out)
    scorer: str = held_out.signature
    columns = table_columns(rows_of)
    rows = [{"name": source.name, **TABLES["ndlb"].compute(source, evaluator)} for source in scored]
    signatures = rows[0]["signatures"]
    compare_with_first(rows, seed=arguments.seed)
    names_of = {size: [bag_id([ids[row] for row in bag]) for bag in group] for size, group in rows_of.items()}
    hits = {row["name"]: _hits(row, names_of, ids) for row in rows}
    keys = tuple(column.key for column in columns)
    shown = [{"name": row["name"], **{k: v for k, v in row.items() if k.startswith(keys)}} for row in rows]
    result: dict[str, Any] = {
        "format": RESULTS_FORMAT,
        "benchmark": found.manifest["card"]["dataset_id"],
        "fingerprint": bags_fingerprint(bags),
        "bags": {str(size): len(group) for size, group in rows_of.items()},
        "review": found.status(),
        "num_images": len(ids),
        "scorer": scorer,
        "scorer_made_the_bags": scorer == bags.signature,
        "rows": shown,
        "hits": hits,
        "signatures": {column.key: signatures[column.key] for column in columns if column.key in signatures},
        "seed": arguments.seed,
        "versions": installed_versions(),
    }
    section = Section(f"{result['benchmark']}, judged by {scorer.partition('|')[0]}", columns, shown)
    title = f"{', '.join(f'{n} bags of {size}' for size, n in result['bags'].items())}; {len(ids)} images"
    atomic_write_text(output_dir / "results.md", comparison_markdown([section], title=title))
    write_json(output_dir / "results.json", result)
    if result["scorer_made_the_bags"]:
        print(
            "captionrl truematch: the bags were built with the scorer that evaluates, so they are harder for it than for "
            "others. Use another --scorer.",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print_status(found)
    print_comparison([section])
    print(f"Written to {output_dir}: results.json, results.md")
