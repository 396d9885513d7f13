"""`captionrl truematch leaderboard`: captioners sorted by one metric, with those within noise of the best marked."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hf_captionrl.apps.truematch.build import bag_id, bags_fingerprint, load_truematch, print_status
from hf_captionrl.apps.truematch.options import EvaluateOptions, LeaderboardOptions
from hf_captionrl.apps.truematch.review import TEMPLATES
from hf_captionrl.cli.caption import CaptionOptions, write_captions
from hf_captionrl.data.benchmarks import load_imagecode
from hf_captionrl.data.columns import parse_json
from hf_captionrl.data.images import open_image
from hf_captionrl.data.options import DatasetOptions, load_split
from hf_captionrl.evaluation.caption_files import read_caption_file, read_files, source_names
from hf_captionrl.evaluation.evaluator import Evaluator, Source, compare_with_first, human_captions, source_row
from hf_captionrl.evaluation.options import load_evaluators
from hf_captionrl.evaluation.pages import render_html
from hf_captionrl.metrics import columns as metric_columns
from hf_captionrl.metrics import paired_test, self_retrieval
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.columns import SUITES, Column, bag_column
from hf_captionrl.metrics.suites import bag_keys
from hf_captionrl.metrics.table import (
    Section,
    check_rows,
    comparison_markdown,
    format_cell,
    installed_versions,
    print_comparison,
)
from hf_captionrl.utils.io import atomic_write_text, escape_markdown, to_plain, write_json

# --- `captionrl truematch evaluate`: evaluate captioners on a benchmark of similar images ----------------------------

# Metrics beside the recall in bags: recall among random distractors, and faithfulness of the captions.
COLUMNS = ("rd100_recall_at_1", "cider_d", "ndlb_clip_score", "hallucination", "fact_recall")
RESULTS_FORMAT = "truematch-results-1"  # `format` in results.json


def _caption(model: str, images: DatasetOptions, folder: Path) -> Path:
    """Caption the images with a model, or resume; the same as `captionrl caption`."""
    file_name = "".join(c if c.isalnum() or c in "-." else "_" for c in model).strip("._") or "model"
    output = folder / "captions" / f"{file_name}.jsonl"
    which = {field.name: getattr(images, field.name) for field in fields(DatasetOptions)}
    options = CaptionOptions(**{**which, "json": False, "model": model, "output": output})
    with contextlib.redirect_stdout(sys.stderr):  # stdout may be JSON
        write_captions(options)
    return output


def table_columns(sizes: Iterable[int]) -> list[Column]:
    """Columns of the table for these bag sizes."""
    return [*map(bag_column, sorted(sizes)), *metric_columns.table_columns(*COLUMNS)]


def _evaluate_imagecode(arguments: EvaluateOptions) -> None:
    """R@1 of captions among ImageCoDe's ten images: all sets, photographs, frames of videos."""
    import torch

    if not arguments.captions:
        raise ValueError(
            "ImageCoDe ranks captions. Use --captions with files of `captionrl caption --dataset imagecode`."
        )
    names = source_names(arguments.captions, arguments.names)
    sets = load_imagecode(arguments.folder / "valid_data.json", arguments.folder / "image-sets")
    ids = [sets.image_ids[row] for row in sets.targets]
    files = read_files(arguments.captions, names)
    texts = [[group[0] for group in file.aligned(ids, set(ids))] for file in files]
    scorer, _, reasons = load_evaluators("", arguments.scorer, "none")
    if scorer is None:
        raise ValueError(f"Retrieval needs a scorer, but {reasons.get('no scorer', 'there is none')}. Use --scorer.")
    images = torch.cat([scorer.image_features([open_image(path)]) for path in sets.paths])
    rows = []
    for name, captions in zip(names, texts, strict=True):
        features = scorer.text_features(spoken(captions))
        row: dict[str, Any] = {"name": name}
        for kind, is_video in (("all", None), ("static", False), ("video", True)):
            at = [n for n, video in enumerate(sets.is_video) if is_video in (None, video)]
            if at:
                targets, candidates = [sets.targets[n] for n in at], [sets.sets[n] for n in at]
                recall = self_retrieval(features[at], images, targets=targets, sets=candidates, ks=(1,))
                row[f"recall_at_1_{kind}"] = recall["recall_at_1"]
        rows.append(row)
    result = {"benchmark": "imagecode", "descriptions": len(ids), "scorer": scorer.signature, "rows": rows}
    path = write_json((arguments.output_dir or Path("outputs") / "imagecode") / "results.json", to_plain(result))
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    for row in rows:
        print(", ".join(f"{key}: {value if key == 'name' else format(value, '.3f')}" for key, value in row.items()))
    print(f"Written to {path}")


def evaluate(arguments: EvaluateOptions) -> None:
    """Evaluate captioners on the benchmark; writes results.json and results.md."""
    if (arguments.folder / "valid_data.json").is_file():
        _evaluate_imagecode(arguments)
        return
    found = load_truematch(arguments.folder)
    bags = found.bags if arguments.all_bags else found.kept
    output_dir = arguments.output_dir or Path("outputs") / found.folder.resolve().name

    names = source_names([*arguments.captions, *arguments.models], arguments.names)
    if not names and not arguments.references:
        raise ValueError("There is nothing to evaluate. Use --captions, --models or --references.")
    files = [read_caption_file(path, name=name) for path, name in zip(arguments.captions, names, strict=False)]
    images = arguments if arguments.dataset else replace(arguments, dataset=found.images, split="test")
    split = load_split(images, quarantine_path=output_dir / "quarantine.jsonl")
    dataset = split.dataset
    if arguments.bag_images_only:
        wanted = {image_id for bag in bags.bags for image_id in bag}
        dataset = dataset.select([row for row, i in enumerate(dataset["image_id"][:]) if str(i) in wanted])
    ids = [str(i) for i in dataset["image_id"][:]]
    rows_of = bags.rows(ids)  # fails on missing images before any model is loaded
    for model, name in zip(arguments.models, names[len(files) :], strict=True):
        files.append(read_caption_file(_caption(model, images, output_dir), name=name))
    aligned = [file.aligned(ids, split.all_ids) for file in files]

    held_out, _, reasons = load_evaluators(found.manifest["source"], arguments.scorer, "none")
    if held_out is None:
        why = reasons.get("no scorer", "--scorer is 'none'")
        raise ValueError(f"Retrieval needs a scorer, but {why}. Use another --scorer.")
    evaluator = Evaluator(dataset, held_out, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    evaluator.bags = rows_of
    sources = [Source(f.name, c, evaluator.references) for f, c in zip(files, aligned, strict=True)]
    if arguments.references:
        human = human_captions(evaluator)
        if human is None:
            raise ValueError("--references needs at least two references per image. Leave it out.")
        sources.append(human)
    columns = table_columns(rows_of)
    computed = [*dict.fromkeys((*SUITES["ndlb"], *bag_keys(rows_of)))]
    rows = [source_row(source, evaluator, computed) for source in sources]
    signatures = rows[0]["signatures"]
    compare_with_first(rows, seed=arguments.seed)
    # Hit or miss per caption, with the id of its bag or image, so that a leaderboard can pair results.
    groups_of = {
        f"bag_{size}_recall_at_1": [bag_id([ids[row] for row in bag]) for bag in group]
        for size, group in rows_of.items()
    }
    groups_of["rd100_recall_at_1"] = ids

    def hits(row: Mapping[str, Any], key: str) -> dict[str, Any]:
        return {"values": row["per_sample"][key], "groups": [groups_of[key][number] for number in row["groups"][key]]}

    keys = tuple(column.key for column in columns)
    shown = [{"name": row["name"], **{k: v for k, v in row.items() if k.startswith(keys)}} for row in rows]
    result: dict[str, Any] = {
        "format": RESULTS_FORMAT,
        "benchmark": found.manifest["card"]["dataset_id"],
        "fingerprint": bags_fingerprint(bags),
        "bags": {str(size): len(group) for size, group in rows_of.items()},
        "review": found.status(),
        "num_images": len(ids),
        "scorer": held_out.signature,
        "scorer_made_the_bags": held_out.signature == bags.signature,
        "rows": shown,
        "hits": {row["name"]: {key: hits(row, key) for key in groups_of if row.get(key) is not None} for row in rows},
        "signatures": {column.key: signatures[column.key] for column in columns if column.key in signatures},
        "seed": arguments.seed,
        "versions": installed_versions(),
    }
    section = Section(f"{result['benchmark']}, judged by {held_out.signature.partition('|')[0]}", columns, shown)
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


# --- `captionrl truematch leaderboard`: captioners sorted by one metric, with those within noise of the best marked ---

WITHIN_NOISE = " ≈"  # marks names whose difference from the first row could be chance

_LEGEND = (
    "± or [low, high]: 95 % interval over bags, or images where a number is not about bags. "
    "≈: not significantly different from the first row: the 95 % interval of the difference (signs flipped by bag) "
    "contains 0. Read retrieval together with the faithfulness metrics: a caption with invented details can retrieve "
    "better than a true one."
)


def rank_rows(
    rows: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, key: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Sort by one metric and compare each row with the best, sample by sample."""
    ordered = sorted((dict(row) for row in rows), key=lambda row: (-float(row[key]), str(row["name"])))
    best = values[ordered[0]["name"]]
    for place, row in enumerate(ordered, start=1):
        own = values[row["name"]]
        if own["groups"] != best["groups"]:
            raise ValueError(
                f"{row['name']!r} and {ordered[0]['name']!r} were measured on different bags, so they cannot be paired. Evaluate "
                "both on the same benchmark."
            )
        row |= {"place": place, "within_noise": None, "difference": None, "difference_ci": None, "remark": ""}
        if place > 1:
            test = paired_test(own["values"], best["values"], groups=own["groups"], num_resamples=2000, seed=seed)
            noise = test["p_value"] >= 0.05
            row |= {"difference": test["difference"], "within_noise": noise} | test["interval"].entries("difference")
            row["remark"] = WITHIN_NOISE if noise else ""
    return ordered


def write_leaderboard(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    *,
    columns: Sequence[Column],
    key: str,
    title: str,
    note: str = "",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Write `leaderboard.md` and `leaderboard.html`, atomically."""
    check_rows(rows, columns)
    ranked = rank_rows(rows, values, key=key, seed=seed)
    heads = [f" {escape_markdown(column.title)}{' ▼' if column.key == key else ''} |" for column in columns]
    lines = [f"# {escape_markdown(title)}\n\n{escape_markdown(note)}\n\n| | |{''.join(heads)}"]
    lines.append("|--:|:--|" + "--:|" * len(columns))
    for row in ranked:
        cells = "".join(f" {escape_markdown(format_cell(row, column))} |" for column in columns)
        lines.append(f"| {row['place']} | {escape_markdown(row['name'])}{row['remark']} |{cells}")
    atomic_write_text(folder / "leaderboard.md", "\n".join([*lines, f"\n{_LEGEND}\n"]))
    html = render_html(
        TEMPLATES,
        "leaderboard",
        title=title,
        note=note,
        legend=_LEGEND,
        columns=[{"title": column.title, "sorted": column.key == key} for column in columns],
        rows=[{**row, "cells": [format_cell(row, column, separator="\n") for column in columns]} for row in ranked],
    )
    atomic_write_text(folder / "leaderboard.html", html)
    return ranked


def leaderboard(arguments: LeaderboardOptions) -> None:
    """Combine results into one table, best first; writes leaderboard.md and leaderboard.html."""
    found = load_truematch(arguments.folder)
    first: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    hits: dict[str, Any] = {}
    for path in arguments.results:
        result = parse_json(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(result, dict) or result.get("format") != RESULTS_FORMAT:
            raise ValueError(f"{path} does not hold results of `captionrl truematch evaluate`. Use its results.json.")
        first = first or result
        for what in ("fingerprint", "scorer", "num_images"):
            if result[what] != first[what]:
                raise ValueError(
                    f"{path} has {what} {result[what]!r}, but {arguments.results[0]} has {first[what]!r}. Results are comparable "
                    "only with the same bags, images and scorer. Evaluate again on this benchmark."
                )
        for row in result["rows"]:
            if row["name"] in hits and hits[row["name"]] != result["hits"][row["name"]]:
                raise ValueError(
                    f"{path}: there are already other results of {row['name']!r}. Use --names when you evaluate."
                )
            if row["name"] not in hits:
                rows.append({k: v for k, v in row.items() if not k.endswith(("_mark", "_p_value", "_difference"))})
                hits[row["name"]] = result["hits"][row["name"]]
    now = bags_fingerprint(found.kept)
    if first["fingerprint"] not in (now, bags_fingerprint(found.bags)):
        raise ValueError(
            f"The results are of other bags ({first['fingerprint']}) than those of {arguments.folder} ({now}): the review continued, "
            "or the results are of another benchmark. Evaluate again."
        )
    columns = table_columns(map(int, first["bags"]))
    key = "rd100_recall_at_1" if arguments.sort_by == "rd100" else f"bag_{arguments.sort_by}_recall_at_1"
    if key not in {column.key for column in columns} or any(row.get(key) is None for row in rows):
        sizes = ", ".join(first["bags"])
        raise ValueError(
            f"--sort_by {arguments.sort_by!r} was not measured for every row. Use one of {sizes} or rd100."
        )
    folder = arguments.output_dir or arguments.folder
    note = (
        f"{', '.join(f'{n} bags of {size}' for size, n in first['bags'].items())}; {first['num_images']} images; evaluated by "
        f"{first['scorer'].partition('|')[0]}; bags {first['fingerprint']}."
    )
    ranked = write_leaderboard(
        folder,
        rows,
        {name: values.get(key) for name, values in hits.items()},
        columns=columns,
        key=key,
        title=f"Leaderboard of {first['benchmark']}",
        note=note,
        seed=arguments.seed,
    )
    if arguments.json:
        print(json.dumps({"sorted_by": key, "rows": ranked}, ensure_ascii=False))
        return
    for row in ranked:
        low, high = row[f"{key}_ci"]
        print(f"{row['place']:>3}  {row[key]:.3f} [{low:.3f}, {high:.3f}]  {row['name']}{row['remark']}")
    print(f"Written to {folder}: leaderboard.md, leaderboard.html")
