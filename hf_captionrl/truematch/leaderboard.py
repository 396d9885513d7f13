"""`captionrl truematch leaderboard`: captioners sorted by one metric, with those within noise of the best marked."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.io import atomic_write_text
from hf_captionrl.metrics import paired_test
from hf_captionrl.reports.table import Column, check_rows, escape_markdown, format_cell
from hf_captionrl.reports.templating import render_html
from hf_captionrl.truematch.benchmark_files import bags_fingerprint, load_truematch
from hf_captionrl.truematch.evaluate import RESULTS_FORMAT, table_columns
from hf_captionrl.truematch.review_page import TEMPLATES

if TYPE_CHECKING:
    from hf_captionrl.truematch.options import LeaderboardOptions

__all__ = ["leaderboard", "rank_rows", "write_leaderboard"]

WITHIN_NOISE = " ≈"
"""Marks names whose difference from the first row could be chance."""

_LEGEND = (
    "± or [low, high]: 95 % interval over bags, or images where a number is not about bags. "
    "≈: not significantly different from the first row: the 95 % interval of the difference (paired bootstrap over bags) "
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
            # The p-value is not used, so few resamples are enough; those of the interval have their own number.
            test = paired_test(own["values"], best["values"], groups=own["groups"], num_resamples=2000, seed=seed)
            low, high = test["interval"]
            noise = low <= 0.0 <= high
            row |= {"difference": test["difference"], "difference_ci": [low, high], "within_noise": noise}
            row["remark"] = WITHIN_NOISE if noise else ""
    return ordered


def write_leaderboard(
    folder: str | os.PathLike[str],
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
    folder = Path(folder)
    out = io.StringIO()
    out.write(f"# {escape_markdown(title)}\n\n{escape_markdown(note)}\n\n| | |")
    out.write("".join(f" {escape_markdown(column.title)}{' ▼' if column.key == key else ''} |" for column in columns))
    out.write("\n|--:|:--|" + "--:|" * len(columns) + "\n")
    for row in ranked:
        cells = "".join(f" {escape_markdown(format_cell(row, column))} |" for column in columns)
        out.write(f"| {row['place']} | {escape_markdown(row['name'])}{row['remark']} |{cells}\n")
    out.write(f"\n{_LEGEND}\n")
    atomic_write_text(folder / "leaderboard.md", out.getvalue())

    html = render_html(
        TEMPLATES,
        "leaderboard",
        title=title,
        note=note,
        legend=_LEGEND,
        columns=[{"title": column.title, "sorted": column.key == key} for column in columns],
        rows=[
            {
                "place": r["place"],
                "name": r["name"],
                "remark": r["remark"],
                "cells": [format_cell(r, c, separator="\n") for c in columns],
            }
            for r in ranked
        ],
    )
    atomic_write_text(folder / "leaderboard.html", html)
    return ranked


def _read_results(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Write one with `captionrl truematch evaluate`.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}). Write it again with `captionrl truematch evaluate`."
        ) from None
    if not isinstance(value, dict) or value.get("format") != RESULTS_FORMAT:
        raise ValueError(f"{path} does not hold results of `captionrl truematch evaluate`. Use its results.json.")
    return value


def leaderboard(arguments: LeaderboardOptions) -> None:
    """Combine results into one table, best first; writes leaderboard.md and leaderboard.html."""
    found = load_truematch(arguments.folder)
    files = [(path, _read_results(path)) for path in arguments.results]
    first_path, first = files[0]
    rows: list[dict[str, Any]] = []
    hits: dict[str, Any] = {}
    for path, result in files:
        for what in ("fingerprint", "scorer", "num_images"):
            if result[what] != first[what]:
                raise ValueError(
                    f"{path} has {what} {result[what]!r}, but {first_path} has {first[what]!r}. Results are comparable only with the "
                    "same bags, images and scorer. Evaluate again on this benchmark."
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
