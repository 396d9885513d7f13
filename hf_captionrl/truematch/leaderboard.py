"""Captioners in the order of one number, with what is within noise of the best said beside it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hf_captionrl.io import atomic_write_text
from hf_captionrl.metrics import paired_test
from hf_captionrl.reports.table import Column, check_rows, escape_markdown, format_cell
from hf_captionrl.reports.templating import TEMPLATES, content_hash, html_templates

__all__ = ["rank_rows", "write_leaderboard"]

WITHIN_NOISE = " ≈"
"""Stands behind a name whose difference from the best could be chance."""

_LEGEND = (
    "± or [low, high]: 95 % interval over bags, or images where a number is not about bags. "
    "≈: not told apart from the first row, for the 95 % interval of their difference (paired bootstrap over bags) holds 0. "
    "Read retrieval together with the numbers for faithfulness: a caption that invents details can retrieve better than a "
    "true one."
)


def rank_rows(
    rows: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, key: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Sort by one number and compare each with the best, sample by sample."""
    ordered = sorted((dict(row) for row in rows), key=lambda row: (-float(row[key]), str(row["name"])))
    best = values[ordered[0]["name"]]
    for place, row in enumerate(ordered, start=1):
        own = values[row["name"]]
        if own["groups"] != best["groups"]:
            raise ValueError(
                f"{row['name']!r} and {ordered[0]['name']!r} were measured on other bags, so they cannot be paired. Evaluate both "
                "on the same benchmark."
            )
        row |= {"place": place, "within_noise": None, "difference": None, "difference_ci": None, "remark": ""}
        if place > 1:
            # The p-value is not used, so few tosses will do; the interval has draws of its own number.
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

    environment = html_templates()
    style = (TEMPLATES / "leaderboard.css").read_text(encoding="utf-8")
    html = environment.get_template("leaderboard.html.j2").render(
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
        style=Markup(style),  # ours, and the only text that is not escaped
        style_hash=content_hash(style),
    )
    atomic_write_text(folder / "leaderboard.html", html)
    return ranked
