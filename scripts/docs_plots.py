"""The plots beside the tables of the guides, drawn from the committed results by `scripts/docs_pictures.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.evaluation.plots import (
    COLOURS,
    CURVES,
    LINES,
    MARKERS,
    new_figure,
    plain_label,
    save_figure,
    tidy,
    write_curves,
    write_diversity_tradeoff,
)

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
Cell = tuple[float, float, float]  # a number and the ends of its error bar


def _of_rows(record: dict[str, Any], row: str, column: str) -> Cell:
    """A number of a results table: mean and standard error, or a value and its interval."""
    found = {entry["name"]: entry for entry in record["rows"]}[row]
    cell = found[column]
    if isinstance(cell, dict):
        return cell["mean"], cell["mean"] - cell["standard_error"], cell["mean"] + cell["standard_error"]
    low, high = found[f"{column}_ci"]
    return cell, low, high


def _of_sources(record: dict[str, Any], row: str, column: str) -> Cell:
    """A number of docs/results/boosting_quality.json, with its interval."""
    part = "recall_at_1" if column in record["recall_at_1"][row] else "claims"
    cell = record[part][row][column]
    return cell["value"], *cell["interval"]


@dataclass(frozen=True)
class Plot:
    """A row of panels, one per column of a table, with a dot and an error bar per row."""

    file: str  # the picture
    result: str  # in docs/results
    rows: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]  # key and title
    cell: Callable[[dict[str, Any], str, str], Cell] = _of_rows

    def table(self) -> list[list[Cell]]:
        """The numbers, by row and column."""
        record = json.loads((RESULTS / self.result).read_text(encoding="utf-8"))
        return [[self.cell(record, row, column) for column, _ in self.columns] for row in self.rows]

    def numbers(self) -> str:
        """The numbers as text, which the picture carries along."""
        return json.dumps({"rows": self.rows, "columns": [key for key, _ in self.columns], "cells": self.table()})

    def draw(self, path: Path) -> Path:
        """Draw and write the picture."""
        figure, axes = new_figure(9.6, 0.9 + 0.3 * len(self.rows), columns=len(self.columns))
        cells = self.table()
        for column, (axis, (_, title)) in enumerate(zip(axes, self.columns, strict=True)):
            for row, values in enumerate(cells):
                value, low, high = values[column]
                axis.plot([low, high], [row, row], color=COLOURS[2], linewidth=2.5, alpha=0.5, solid_capstyle="butt")
                axis.plot(value, row, "o", color=COLOURS[2], markersize=5)
            axis.set_title(title, fontsize=9, color="#1d2129")
            axis.set_ylim(len(cells) - 0.5, -0.5)
            axis.set_yticks(range(len(cells)), [plain_label(name) for name in self.rows] if column == 0 else [])
            axis.margins(x=0.08)
            axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
            tidy(axis)
            axis.tick_params(labelsize=8.5)
        figure.patch.set_facecolor("white")
        return save_figure(path, figure, text={"Numbers": self.numbers()})


def _with_error(point: dict[str, Any], x: str, keys: Sequence[str]) -> dict[str, Any]:
    """A point of means, with intervals of one standard error to each side."""
    drawn: dict[str, Any] = {x: point[x]}
    for key in keys:
        mean, error = point[key]["mean"], point[key]["standard_error"]
        drawn |= {key: mean, f"{key}_ci": [mean - error, mean + error]}
    return drawn


@dataclass(frozen=True)
class TradeoffPlot:
    """CIDEr-D against diversity over temperatures: means over seeds, with one standard error to each side."""

    file: str
    result: str

    def curves(self) -> dict[str, list[dict[str, Any]]]:
        """The points of each row."""
        found = json.loads((RESULTS / self.result).read_text(encoding="utf-8"))["over_temperatures"]
        keys = ("cider_d", "div_2", "mbleu_4_per_image")
        return {name: [_with_error(point, "temperature", keys) for point in points] for name, points in found.items()}

    def numbers(self) -> str:
        """The numbers as text, which the picture carries along."""
        return json.dumps(self.curves())

    def draw(self, path: Path) -> Path:
        """Draw and write the picture."""
        return write_diversity_tradeoff(path, self.curves(), text={"Numbers": self.numbers()})


@dataclass(frozen=True)
class CurvePlot:
    """Learning curves: mean over seeds, with a band of one standard error."""

    file: str
    result: str
    panels: tuple[tuple[str, str], ...] = tuple(CURVES)

    def curves(self) -> dict[str, list[dict[str, Any]]]:
        """The points of each row."""
        found = json.loads((RESULTS / self.result).read_text(encoding="utf-8"))["learning_curves"]
        keys = [key for key, _ in self.panels]
        return {name: [_with_error(point, "step", keys) for point in points] for name, points in found.items()}

    def numbers(self) -> str:
        """The numbers as text, which the picture carries along."""
        return json.dumps(self.curves())

    def draw(self, path: Path) -> Path:
        """Draw and write the picture."""
        return write_curves(path, self.curves(), x="step", panels=self.panels, text={"Numbers": self.numbers()})


@dataclass(frozen=True)
class ComputePlot:
    """Compute per image against a column, a panel each: settings that differ in a number are one line."""

    file: str
    result: str
    panels: tuple[tuple[str, str], ...]
    left_out: frozenset[str] = frozenset()  # settings that equal others

    def lines(self) -> dict[str, list[dict[str, Any]]]:
        """The settings of each line, by compute."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in json.loads((RESULTS / self.result).read_text(encoding="utf-8"))["rows"]:
            if row["name"].partition(", ")[2] in self.left_out:
                continue
            point = {"cpu_s": row["cpu_s"]["mean"], "name": row["name"]}
            point |= {key: [row[key]["mean"], *row[key]["interval"]] for key, _ in self.panels}
            found.setdefault(re.sub(r"[\d.]+", "N", row["name"]), []).append(point)
        return {name: sorted(points, key=lambda point: point["cpu_s"]) for name, points in found.items()}

    def numbers(self) -> str:
        """The numbers as text, which the picture carries along."""
        return json.dumps(self.lines())

    def draw(self, path: Path) -> Path:
        """Draw and write the picture."""
        figure, axes = new_figure(5.0 * len(self.panels), 5.2, columns=len(self.panels))
        lines = self.lines()
        kinds = list(dict.fromkeys(name.partition(", ")[2] for name in lines))
        models = list(dict.fromkeys(name.partition(", ")[0] for name in lines))
        for axis, (key, title) in zip(axes, self.panels, strict=True):
            for name, points in lines.items():
                model, _, kind = name.partition(", ")
                low_high = [
                    [p[key][0] - (p[key][1] or p[key][0]), (p[key][2] or p[key][0]) - p[key][0]] for p in points
                ]
                axis.errorbar(
                    [p["cpu_s"] for p in points],
                    [p[key][0] for p in points],
                    yerr=list(zip(*low_high, strict=True)),
                    color=COLOURS[1 + kinds.index(kind) % (len(COLOURS) - 1)],
                    marker=MARKERS[models.index(model)],
                    linestyle=LINES[models.index(model)],
                    elinewidth=0.8,
                    label=plain_label(name),
                )
            axis.set_xscale("log")
            axis.set_xlabel("CPU seconds per image")
            axis.set_title(title, fontsize=10, color="#1d2129")
            tidy(axis)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
        )
        return save_figure(path, figure, text={"Numbers": self.numbers()})


_RETRIEVAL = ("rd100_recall_at_1", "R@1 among 100 ↑")
_HALLUCINATION = ("hallucination", "Hallucination ↓")
_CIDER = ("cider_d", "CIDEr-D ↑")

PLOTS: tuple[Plot | CurvePlot | TradeoffPlot | ComputePlot, ...] = (
    Plot(
        "smile.png",
        "smile_blip_seeds.json",
        ("MLE", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"),
        (_RETRIEVAL, _HALLUCINATION, _CIDER),
    ),
    CurvePlot("smile_curves.png", "smile_blip_seeds.json"),
    CurvePlot("smile_subsets.png", "smile_subset_seeds.json", (("length", "Mean length (words)"), _RETRIEVAL)),
    CurvePlot("self_retrieval_curves.png", "self_retrieval_bags_seeds.json"),
    CurvePlot("reward_hacking_curves.png", "reward_hacking_seeds.json"),
    CurvePlot("reward_hacking_kinds_curves.png", "reward_hacking_kinds_seeds.json"),
    CurvePlot("reward_hacking_diversity_curves.png", "reward_hacking_diversity_seeds.json"),
    CurvePlot("large_bags_curves.png", "large_bags_seeds.json"),
    ComputePlot(
        "best_of_n.png",
        "album_campaign.json",
        (("held_out", "R@1 in the album, held-out scorer ↑"), ("hallucination", "Hallucination ↓")),
        frozenset(f"assignment of {number}" for number in (4, 16, 64)),
    ),
    CurvePlot("ndlb_curves.png", "ndlb_matched_seeds.json"),
    TradeoffPlot("sle_tradeoff.png", "sle_frontier_seeds.json"),
    CurvePlot("sle_curves.png", "sle_curves_seeds.json"),
    CurvePlot("video_curves.png", "smile_video_curves_seeds.json"),
    Plot(
        "video.png",
        "smile_video_seeds.json",
        ("MLE", "MLE first", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"),
        (_RETRIEVAL, _HALLUCINATION, _CIDER),
    ),
    Plot(
        "boosting.png",
        "boosting_quality.json",
        ("references", "BlendCap", "VisualCap", "HolisticCap"),
        (("rd100", "R@1 among 100 ↑"), ("hallucination", "Hallucination ↓"), ("fact_recall", "Fact recall ↑")),
        _of_sources,
    ),
    Plot(
        "truematch.png",
        "truematch_scenes.json",
        ("every fact", "references", "scenes:blip-mle", "scenes:clipcap-mle"),
        (
            ("bag_3_recall_at_1", "R@1, bags of 3 ↑"),
            ("bag_7_recall_at_1", "R@1, bags of 7 ↑"),
            ("rd100_recall_at_1", "R@1 among 100 ↑"),
        ),
    ),
)
