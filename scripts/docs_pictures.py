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

_DOSE = (*_LISTENERS[:2], _HALLUCINATION)
_DOSE_ROWS = (
    *("clipcap, lambda 0, greedy", "clipcap, lambda 0, 3 beams", "clipcap, lambda 0.5, 3 beams"),
    *("blip, lambda 0, greedy", "epochs-8, lambda 0, greedy"),
)


def _dose() -> dict[str, list[dict[str, Any]]]:
    """Curves of SMILE until step 80."""
    rest = "learning_curves", "step", [key for key, _ in _DOSE]
    curves = _curves("dose_scenes", *rest) | _curves("dose_weak", *rest)
    return {r.replace("lambda", "λ"): [point for point in curves[r] if point["step"] <= 80] for r in _DOSE_ROWS}


PICTURES: dict[str, Picture] = {
    "dose": (_dose, lambda path, found, text: write_curves(path, found, x="step", panels=_DOSE, text=text)),
    "dose_photographs": _curve_plot(
        *("dose_photographs", (*_LISTENERS[:2], ("unmentioned_objects", "Objects that no\nreference names ↓"))),
        [f"mle-400, lambda {weight}, {decoding}" for weight in ("0", "0.5") for decoding in ("greedy", "3 beams")],
    ),
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
        *("smile_video_seeds", ("MLE", "MLE first", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references")),
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
