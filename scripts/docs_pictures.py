"""The pictures of README.md and of the pages that are drawn from the committed results.

python scripts/docs_pictures.py            # into docs/images
python scripts/docs_pictures.py --check    # do they show the results? part of `make check`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hf_captionrl.evaluation.plots import (
    COLOURS,
    CURVES,
    new_panels,
    plain_label,
    save_figure,
    tidy,
    write_curves,
    write_diversity_tradeoff,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from reproduction import RESULTS  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def _record(result: str) -> Any:
    return json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))


def _cell(found: dict[str, Any], column: str) -> tuple[float, float, float]:
    """A number of a results table and the ends of its error bar: one standard error, or its interval."""
    cell = found[column]
    if not isinstance(cell, dict):
        return cell, *found[f"{column}_ci"]
    if "interval" in cell:
        return cell["value"], *cell["interval"]
    error = cell["standard_error"] or 0.0  # None with one seed
    return cell["mean"], cell["mean"] - error, cell["mean"] + error


def _dots(result: str, rows: Sequence[str], columns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    found = {row["name"]: row for row in _record(result)["rows"]}
    cells = [[_cell(found[row], key) for key, _ in columns] for row in rows]
    return {"rows": rows, "columns": [key for key, _ in columns], "cells": cells}


def draw_dots(
    path: Path, numbers: dict[str, Any], text: dict[str, str], *, columns: Sequence[tuple[str, str]]
) -> Path:
    """A panel per column, with a dot and an error bar per row."""
    rows, cells = numbers["rows"], numbers["cells"]
    figure, axes = new_panels(len(columns), 0.7 + 0.24 * len(rows))
    for column, (axis, (_, title)) in enumerate(zip(axes, columns, strict=True)):
        for row, values in enumerate(cells):
            value, low, high = values[column]
            axis.plot([low, high], [row, row], color=COLOURS[2], linewidth=2.5, alpha=0.5, solid_capstyle="butt")
            axis.plot(value, row, "o", color=COLOURS[2], markersize=5)
        axis.set_title(title, fontsize=10, color="#1d2129")
        axis.set_ylim(len(cells) - 0.5, -0.5)
        axis.set_yticks(range(len(cells)), [plain_label(name) for name in rows] if column % 2 == 0 else [])
        axis.margins(x=0.08)
        axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
        tidy(axis)
    figure.patch.set_facecolor("white")
    return save_figure(path, figure, text=text)


def _curves(result: str, curves: str, x: str, keys: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Points of curves: means, with intervals of one standard error to each side."""

    def drawn(point: dict[str, Any]) -> dict[str, Any]:
        found = {x: point[x]}
        for key in keys:
            mean, *ends = _cell(point, key)
            found |= {key: mean, f"{key}_ci": ends}
        return found

    return {name: [drawn(point) for point in points] for name, points in _record(result)[curves].items()}


Picture = tuple[Callable[[], Any], Callable[[Path, Any, dict[str, str]], Path]]


def _curve_plot(result: str, panels: Sequence[tuple[str, str]] = tuple(CURVES), rows: Sequence[str] = ()) -> Picture:
    def numbers() -> dict[str, list[dict[str, Any]]]:
        found = _curves(result, "learning_curves", "step", [key for key, _ in panels])
        return {name: found[name] for name in rows or found}

    return numbers, lambda path, found, text: write_curves(path, found, x="step", panels=panels, text=text)


def _dot_plot(result: str, rows: Sequence[str], *columns: tuple[str, str]) -> Picture:
    return partial(_dots, result, rows, columns), partial(draw_dots, columns=columns)


_HELD_OUT = ("rd100_recall_at_1", "R@1 among 100,\nheld-out scorer ↑")
_TRUTH = ("bag_7_truth_recall_at_1", "R@1 in bags of 7,\ntruth ↑")
_LISTENERS = (_HELD_OUT, ("reward_rd100_recall_at_1", "R@1 among 100,\nreward scorer ↑"), _TRUTH)
_HALLUCINATION = ("hallucination", "Wrong claims ↓")
_CIDER = ("cider_d", "CIDEr-D ↑")
_TRADEOFF = ("cider_d", "div_2", "mbleu_4_per_image")

_DOSE = {
    "dose_scenes": (
        (*_LISTENERS[:2], _HALLUCINATION),
        (
            "clipcap, lambda 0, greedy",
            "clipcap, lambda 0, 3 beams",
            "clipcap, lambda 0.5, 3 beams",
            "blip, lambda 0, greedy",
        ),
    ),
    "dose_photographs": (
        (*_LISTENERS[:2], ("unmentioned_objects", "Objects that no\nreference names ↓")),
        ("mle-400, lambda 0, greedy", "mle-400, lambda 1, greedy"),
    ),
}
"""SMILE by dose on scenes and on photographs: panels and rows."""


def _dose() -> dict[str, dict[str, list[dict[str, Any]]]]:
    curves = {file: _curves(file, "learning_curves", "step", [key for key, _ in _DOSE[file][0]]) for file in _DOSE}
    return {file: {row: curves[file][row] for row in _DOSE[file][1]} for file in _DOSE}


def draw_dose(path: Path, found: dict[str, dict[str, list[dict[str, Any]]]], text: dict[str, str]) -> Path:
    """Scenes in the left column, photographs in the right one; steps on a scale of square roots."""
    figure, axes = new_panels(6, 2.4)
    for column, (file, (panels, _)) in enumerate(_DOSE.items()):
        for axis, (key, title) in zip(axes[column::2], panels, strict=True):
            for colour, (name, points) in zip(COLOURS[4 * column :], found[file].items(), strict=False):
                steps = [point["step"] for point in points]
                label = plain_label(name.replace("lambda", "λ").replace("mle-400, ", "photographs, "))
                axis.plot(
                    steps,
                    [point[key] for point in points],
                    "o-",
                    color=colour,
                    markersize=4,
                    label=label,
                    clip_on=False,
                )
                low, high = zip(*(point[f"{key}_ci"] for point in points), strict=True)
                axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.set_title(f"{('Scenes', 'Photographs')[column]}: {title}", loc="left", fontsize=10, color="#1d1f23")
            axis.set_xscale("function", functions=(np.sqrt, np.square))
            axis.set_xticks((0, 10, 40, 80, 158) if column == 0 else (0, 4, 16, 25, 50))
            axis.set_ylim(bottom=0)
            tidy(axis, grid="y")
        axis.set_xlabel("Training step")
    handles = [handle for axis in axes[:2] for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return save_figure(path, figure, text=text)


PICTURES: dict[str, Picture] = {
    "dose": (_dose, draw_dose),
    "self_retrieval_curves": _curve_plot("self_retrieval_bags_seeds"),
    "observatory_curves": _curve_plot(
        "observatory",
        (("fact_recall", "Fact recall ↑"), _HALLUCINATION, _HELD_OUT),
        (
            "CIDEr",
            "SR, bags of 5",
            "log-probability",
            "recall of claims",
            "F1 of claims",
            "questions, exact reader",
            "random",
        ),
    ),
    "reward_hacking_curves": _curve_plot("reward_hacking_seeds"),
    "large_bags_curves": _curve_plot("large_bags_seeds"),
    "ndlb_curves": _curve_plot("ndlb_matched_seeds"),
    "sle_tradeoff": (
        partial(_curves, "sle_frontier_seeds", "over_temperatures", "temperature", _TRADEOFF),
        lambda path, found, text: write_diversity_tradeoff(path, found, text=text),
    ),
    "video": _dot_plot(
        *("smile_video_dose_seeds", ("MLE", "MLE first", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references")),
        *(_HELD_OUT, _TRUTH, _HALLUCINATION, _CIDER),
    ),
    "boosting": _dot_plot(
        *("boosting_seeds", ("references", "BlendCap", "VisualCap", "HolisticCap")),
        *(*_LISTENERS, _HALLUCINATION, ("fact_recall", "Fact recall ↑")),
    ),
    "truematch": _dot_plot(
        *("truematch_scenes", ("every fact", "references", "scenes:blip-mle", "scenes:clipcap-mle")),
        *(("bag_3_recall_at_1", "R@1, bags of 3 ↑"), ("bag_7_recall_at_1", "R@1, bags of 7 ↑"), _HELD_OUT),
    ),
}
"""The numbers of each picture, and how they are drawn. A picture carries its numbers along as text."""


def is_current(path: Path, wanted: str) -> bool:
    """Whether a picture was drawn from the committed results."""
    if not path.is_file():
        return False
    with Image.open(path) as picture:
        return picture.info.get("Numbers") == wanted


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures that are not current, or name them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pictures are current; 1 if not")
    check = parser.parse_args(arguments).check
    old = 0
    for name, (numbers, draw) in PICTURES.items():
        found, path = numbers(), IMAGES / f"{name}.png"
        text = json.dumps(found)
        if is_current(path, text):
            continue
        old += 1
        if check:
            print(f"{path.name} does not show the committed results. Run python scripts/docs_pictures.py.")
        else:
            print(draw(path, found, {"Numbers": text}).name)
    return int(bool(old) and check)


if __name__ == "__main__":
    sys.exit(main())
