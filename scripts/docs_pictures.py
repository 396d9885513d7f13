"""The pictures of README.md and of the pages, drawn from the committed results into docs/images.

    python scripts/docs_pictures.py            # draw them
    python scripts/docs_pictures.py --check    # do they show the committed results? part of `make check`

Each picture carries the numbers that it shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from hf_captionrl.evaluation.plots import (
    COLOURS,
    CURVES,
    new_figure,
    plain_label,
    save_figure,
    tidy,
    write_curves,
    write_diversity_tradeoff,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"
_TEXT, _TITLE = "#1d2129", "#5d6370"


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


class Picture:
    """A picture of numbers."""

    file: str

    def values(self) -> Any:
        """The numbers, for JSON."""
        raise NotImplementedError

    def numbers(self) -> str:
        """The numbers as the text that the picture carries along."""
        return json.dumps(self.values())

    def draw(self, path: Path) -> Path:
        """Draw and write the picture."""
        raise NotImplementedError


@dataclass(frozen=True)
class BeforeAfter(Picture):
    """The table of the front page, a bar behind each number."""

    file: str = "before_after.png"
    rows: tuple[tuple[str, str, str], ...] = (
        ("MLE (start)", "smile_blip_seeds.json", "MLE"),
        ("further MLE", "smile_blip_seeds.json", "MLE+MLE"),
        ("SMILE", "smile_blip_seeds.json", "SMILE"),
        ("self-retrieval, random distractors", "self_retrieval_bags_seeds.json", "SR (random)"),
        ("self-retrieval, bag curriculum", "self_retrieval_bags_seeds.json", "SR (bag curriculum)"),
    )  # label, file, and name of the row in it
    columns: tuple[tuple[str, str], ...] = (
        ("length", "words"),
        ("rd100_recall_at_1", "R@1 among\n100 images"),
        ("bag_7_recall_at_1", "R@1 in bags of\n7 look-alikes"),
        ("fact_recall", "fact recall"),
        ("hallucination", "hallucination"),
        ("cider_d", "CIDEr-D"),
    )

    def values(self) -> dict[str, Any]:
        """Columns; and label, means and standard errors of each row."""
        table = []
        for label, file, key in self.rows:
            row = {row["name"]: row for row in _result(file)["rows"]}[key]
            table.append((label, [(row[c]["mean"], row[c]["standard_error"]) for c, _ in self.columns]))
        return {"columns": [key for key, _ in self.columns], "rows": table}

    def draw(self, path: Path) -> Path:
        table = self.values()["rows"]
        figure, axis = new_figure(9.6, 2.9)
        figure.patch.set_facecolor("white")
        axis.set_xlim(0, 2.1 + len(self.columns))
        axis.set_ylim(len(table) - 0.45, -1.15)
        axis.axis("off")
        for column, (_, title) in enumerate(self.columns):
            left = 2.1 + column
            axis.text(left, -0.6, title, fontsize=8.5, color=_TITLE, va="bottom")
            top = max(values[column][0] for _, values in table)
            digits = {0: 1, len(self.columns) - 1: 2}.get(column, 3)
            for row, (_, values) in enumerate(table):
                mean, error = values[column]
                colour = COLOURS[0] if row < 2 else COLOURS[row - 1]
                bar = {"height": 0.62, "color": colour, "alpha": 0.28, "linewidth": 0}
                axis.barh(row, 0.86 * mean / top, left=left, **bar)
                text = f"{mean:.{digits}f} ±{error:.{digits}f}"
                axis.text(left + 0.03, row, text, fontsize=8.5, color=_TEXT, va="center")
        for row, (name, _) in enumerate(table):
            axis.text(0, row, name, fontsize=9, color=_TEXT, va="center", weight="bold" if row > 1 else "normal")
        axis.axhline(-0.5, color="#b9b6ae", linewidth=0.8)
        return save_figure(path, figure, text={"Numbers": self.numbers()})


def _cell(record: dict[str, Any], row: str, column: str) -> tuple[float, float, float]:
    """A number and the ends of its error bar: mean and standard error, or a value and its interval."""
    if "claims" in record:  # boosting_quality.json
        found = record["recall_at_1" if column in record["recall_at_1"][row] else "claims"][row][column]
        return found["value"], *found["interval"]
    entry = {entry["name"]: entry for entry in record["rows"]}[row]
    found = entry[column]
    if isinstance(found, dict):
        return found["mean"], found["mean"] - found["standard_error"], found["mean"] + found["standard_error"]
    return found, *entry[f"{column}_ci"]


@dataclass(frozen=True)
class Plot(Picture):
    """A row of panels, one per column of a table, with a dot and an error bar per row."""

    file: str
    result: str
    rows: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]  # key and title

    def values(self) -> dict[str, Any]:
        """Rows, columns, and the cells by row and column."""
        record = _result(self.result)
        cells = [[_cell(record, row, column) for column, _ in self.columns] for row in self.rows]
        return {"rows": self.rows, "columns": [key for key, _ in self.columns], "cells": cells}

    def draw(self, path: Path) -> Path:
        figure, axes = new_figure(9.6, 0.9 + 0.3 * len(self.rows), columns=len(self.columns))
        cells = self.values()["cells"]
        for column, (axis, (_, title)) in enumerate(zip(axes, self.columns, strict=True)):
            for row, values in enumerate(cells):
                value, low, high = values[column]
                axis.plot([low, high], [row, row], color=COLOURS[2], linewidth=2.5, alpha=0.5, solid_capstyle="butt")
                axis.plot(value, row, "o", color=COLOURS[2], markersize=5)
            axis.set_title(title, fontsize=9, color=_TEXT)
            axis.set_ylim(len(cells) - 0.5, -0.5)
            axis.set_yticks(range(len(cells)), [plain_label(name) for name in self.rows] if column == 0 else [])
            axis.margins(x=0.08)
            axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
            tidy(axis)
            axis.tick_params(labelsize=8.5)
        figure.patch.set_facecolor("white")
        return save_figure(path, figure, text={"Numbers": self.numbers()})


def _with_errors(
    curves: dict[str, list[dict[str, Any]]], x: str, keys: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Curves of means, with intervals of one standard error to each side."""
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in curves}
    for name, points in curves.items():
        for point in points:
            drawn[name].append({x: point[x]})
            for key in keys:
                mean, error = point[key]["mean"], point[key]["standard_error"]
                drawn[name][-1] |= {key: mean, f"{key}_ci": [mean - error, mean + error]}
    return drawn


@dataclass(frozen=True)
class TradeoffPlot(Picture):
    """CIDEr-D against diversity over temperatures."""

    file: str
    result: str

    def values(self) -> dict[str, Any]:
        keys = ("cider_d", "div_2", "mbleu_4_per_image")
        return _with_errors(_result(self.result)["over_temperatures"], "temperature", keys)

    def draw(self, path: Path) -> Path:
        return write_diversity_tradeoff(path, self.values(), text={"Numbers": self.numbers()})


@dataclass(frozen=True)
class CurvePlot(Picture):
    """Learning curves."""

    file: str
    result: str
    panels: tuple[tuple[str, str], ...] = tuple(CURVES)

    def values(self) -> dict[str, Any]:
        return _with_errors(_result(self.result)["learning_curves"], "step", [key for key, _ in self.panels])

    def draw(self, path: Path) -> Path:
        return write_curves(path, self.values(), x="step", panels=self.panels, text={"Numbers": self.numbers()})


_RETRIEVAL = ("rd100_recall_at_1", "R@1 among 100 ↑")
_COLUMNS = (_RETRIEVAL, ("hallucination", "Hallucination ↓"), ("cider_d", "CIDEr-D ↑"))

PICTURES: tuple[Picture, ...] = (
    BeforeAfter(),
    Plot(
        "smile.png",
        "smile_blip_seeds.json",
        ("MLE", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"),
        _COLUMNS,
    ),
    CurvePlot("smile_curves.png", "smile_blip_seeds.json"),
    CurvePlot("smile_subsets.png", "smile_subset_seeds.json", (("length", "Mean length (words)"), _RETRIEVAL)),
    CurvePlot("self_retrieval_curves.png", "self_retrieval_bags_seeds.json"),
    CurvePlot("reward_hacking_curves.png", "reward_hacking_seeds.json"),
    CurvePlot("reward_hacking_kinds_curves.png", "reward_hacking_kinds_seeds.json"),
    CurvePlot("reward_hacking_diversity_curves.png", "reward_hacking_diversity_seeds.json"),
    CurvePlot("large_bags_curves.png", "large_bags_seeds.json"),
    CurvePlot("ndlb_curves.png", "ndlb_matched_seeds.json"),
    TradeoffPlot("sle_tradeoff.png", "sle_frontier_seeds.json"),
    CurvePlot("sle_curves.png", "sle_curves_seeds.json"),
    CurvePlot("video_curves.png", "smile_video_curves_seeds.json"),
    Plot(
        "video.png",
        "smile_video_seeds.json",
        ("MLE", "MLE first", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"),
        _COLUMNS,
    ),
    Plot(
        "boosting.png",
        "boosting_quality.json",
        ("references", "BlendCap", "VisualCap", "HolisticCap"),
        (("rd100", "R@1 among 100 ↑"), ("hallucination", "Hallucination ↓"), ("fact_recall", "Fact recall ↑")),
    ),
    Plot(
        "truematch.png",
        "truematch_scenes.json",
        ("every fact", "references", "scenes:blip-mle", "scenes:clipcap-mle"),
        (("bag_3_recall_at_1", "R@1, bags of 3 ↑"), ("bag_7_recall_at_1", "R@1, bags of 7 ↑"), _RETRIEVAL),
    ),
)


def is_current(path: Path, wanted: str) -> bool:
    """Whether a picture shows these numbers."""
    if not path.is_file():
        return False
    with Image.open(path) as picture:
        return picture.info.get("Numbers") == wanted


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures, or check them; 1 if one does not show the committed results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; 1 if a picture is out of date")
    if not parser.parse_args(arguments).check:
        for picture in PICTURES:
            picture.draw(IMAGES / picture.file)
        return 0
    old = [picture.file for picture in PICTURES if not is_current(IMAGES / picture.file, picture.numbers())]
    for name in old:
        print(f"{name} does not show the committed results. Run python scripts/docs_pictures.py.")
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
