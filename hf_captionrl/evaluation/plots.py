"""Plots: numbers over training, quality against diversity, and lengths."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_captionrl.utils.io import atomic_write_bytes

COLOURS = ("#7a7f8a", "#e69f00", "#0072b2", "#cc79a7", "#009e73", "#d55e00", "#56b4e9", "#b8a400")
"""Okabe and Ito's colours, which colour-blind readers can distinguish, in the order of the gallery."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # so that points do not differ only in colour
LINES = ("-", "--", "-", "-.")
Point = Mapping[str, Any]  # numbers at one evaluation of a run, or at one temperature


def plain_label(name: str) -> str:
    """A name escaped for matplotlib, where a leading underscore hides it and a dollar sign starts a formula."""
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$")


def new_figure(width: float, height: float, *, columns: int = 1, rows: int = 1) -> tuple[Figure, Any]:
    """An empty figure, `width` inches of 150 pixels wide."""
    # Without pyplot, which chooses a backend and keeps state for the whole program.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def new_panels(number: int, height: float) -> tuple[Figure, Any]:
    """A figure of panels in two columns, whose letters a telephone can show: 390 pixels are half of the figure's."""
    rows = -(-number // 2)
    figure, axes = new_figure(5.6, 0.4 + height * rows, columns=min(2, number), rows=rows)
    for axis in np.ravel(axes)[number:]:
        axis.set_axis_off()
    return figure, np.ravel(axes)[:number]


def save_figure(
    path: str | os.PathLike[str], figure: Figure, *, title: str | None = None, text: Mapping[str, str] | None = None
) -> Path:
    """Write a figure atomically; the same numbers give the same bytes. `text` is stored as metadata."""
    if title:
        figure.suptitle(plain_label(title), fontsize=12)
    buffer = io.BytesIO()
    # Without matplotlib's version in the file.
    figure.savefig(buffer, format="png", metadata={"Software": None, **(text or {})})
    return atomic_write_bytes(path, buffer.getvalue())


def tidy(axis: Any, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Remove frames and ticks."""
    axis.grid(axis=grid, color="#e2e0da", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors="#5d6370", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#b9b6ae")


def _style(index: int) -> dict[str, Any]:
    """Colour, marker and line of the captioner with a number; what lies behind is drawn first."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
        "zorder": 3 + index,
    }


def _legend_below(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


# --- Curves over training: what the trainer's evaluation measures, or all that a results table has -------------------

Panels = Sequence[tuple[str, str]]  # key and title of each

_CURVE_PANELS: Panels = (("length", "Mean length (words)"), ("recall_at_1", "R@1, self-retrieval"))

DOSE_CURVES: Panels = (
    ("rd100_recall_at_1", "R@1 among 100"),
    ("length", "Mean length (words)"),
    ("hallucination", "Wrong claims"),
    ("unmentioned_objects", "Objects in no reference"),
)
"""Panels over the steps of a run with early evaluations, on the validation split."""

CURVES: Panels = (
    ("rd100_recall_at_1", "R@1 among 100, held-out scorer"),
    ("reward_rd100_recall_at_1", "R@1 among 100, reward scorer"),
    ("bag_7_truth_recall_at_1", "R@1 in bags of 7, truth"),
    ("cider_d", "CIDEr-D"),
    ("hallucination", "Wrong claims"),
    ("length", "Mean length (words)"),
)
"""Panels of a learning curve; the keys are those of a results table."""


def write_curves(
    path: str | os.PathLike[str],
    histories: Mapping[str, Sequence[Point]],
    *,
    x: str = "epoch",
    title: str | None = None,
    panels: Panels = _CURVE_PANELS,
    text: Mapping[str, str] | None = None,
) -> Path:
    """Draw numbers over training, one panel per number and one line per method, and write the PNG atomically.

    `histories` has the evaluations of each method: mappings with `x`, `epoch` or `step`, and the keys of the panels, None where
    not measured. Optional `<key>_ci`, `[low, high]`, is drawn as a band. Reference: Yue et al. 2023 (SMILE), Figure 3.
    """
    figure, panel_axes = new_panels(len(panels), 2.4)
    for axis, (key, label) in zip(panel_axes, panels, strict=True):
        for index, (name, history) in enumerate(histories.items()):
            points = sorted((point for point in history if point[key] is not None), key=lambda point: point[x])
            positions = [point[x] for point in points]
            values = [point[key] for point in points]
            # Without clipping, points on the axis (epoch 0) are drawn completely; a line without points would break the layout.
            style = {**_style(index), "linewidth": 2, "markersize": 5, "clip_on": not points}
            axis.plot(positions, values, label=plain_label(name) if history else None, **style)
            if points and all(point.get(f"{key}_ci") is not None for point in points):
                low, high = zip(*(point[f"{key}_ci"] for point in points), strict=True)  # type: ignore[misc]
                axis.fill_between(positions, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if not any(len(line.get_xdata()) for line in axis.lines):
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", color="#5d6370")
        axis.set_title(label, loc="left", fontsize=10, color="#1d1f23")
        axis.set_xlabel({"epoch": "Epoch", "step": "Training step"}.get(x, x))
        # From zero, because a truncated axis makes small differences look large.
        axis.set_ylim(bottom=0)
        if x == "step" or all(float(point[x]).is_integer() for history in histories.values() for point in history):
            axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        tidy(axis, grid="y")
    _legend_below(figure)
    return save_figure(path, figure, title=title, text=text)


# --- Quality of several captions per image against their diversity ---------------------------------------------------

_TRADEOFF_PANELS = (("div_2", "Div-2 of an image's captions"), ("mbleu_4_per_image", "mBLEU-4, axis reversed"))


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of points that no other point exceeds in both coordinates."""
    kept: list[int] = []
    best = -math.inf
    # From right to left: a point belongs to it if it is higher than all points to its right.
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i)):
        if points[index][1] > best:
            best = points[index][1]
            kept.append(index)
    return kept[::-1]


def write_diversity_tradeoff(
    path: str | os.PathLike[str],
    curves: Mapping[str, Sequence[Point]],
    *,
    title: str | None = None,
    text: Mapping[str, str] | None = None,
) -> Path:
    """Draw CIDEr-D against Div-2 and against mBLEU-4 over temperatures, one line per captioner, and write the PNG.

    A line connects the temperatures of a captioner that no other of its temperatures exceeds in both numbers; the others are
    pale marks. Error bars show `<key>_ci` of points that have it. Up and to the right is better in both panels.

    Reference: Chen and Jin 2020, Section 5.4 and Table 4, which report one temperature. A comparison at one temperature
    cannot distinguish a better captioner from one that samples from a narrower distribution.
    """
    y = "cider_d"
    figure, axes = new_panels(2, 3.4)
    for axis, (key, label) in zip(axes, _TRADEOFF_PANELS, strict=True):
        rises = key == "div_2"
        for index, (name, points) in enumerate(curves.items()):
            style = _style(index)
            bars = {"color": style["color"], "linewidth": 1, "alpha": 0.45, "zorder": 2}
            for point in points:
                if point.get(f"{key}_ci"):
                    axis.plot(point[f"{key}_ci"], [point[y]] * 2, **bars)
                if point.get(f"{y}_ci"):
                    axis.plot([point[key]] * 2, point[f"{y}_ci"], **bars)
            pairs = [(float(point[key]), float(point[y])) for point in points]
            best = frontier([(across if rises else -across, up) for across, up in pairs])
            line = [pairs[i] for i in best]
            axis.plot(*zip(*line, strict=True), linewidth=2, markersize=6, label=plain_label(name), **style)
            rest = [pair for i, pair in enumerate(pairs) if i not in best]
            if rest:
                axis.scatter(*zip(*rest, strict=True), color=style["color"], marker=style["marker"], s=26, alpha=0.4)
            # The others have the same temperatures in the same order; their numbers would cover each other.
            for point, pair in zip(points if index == 0 else [], pairs, strict=False):
                if point.get("temperature") is not None:
                    axis.set_title("small numbers: temperature", loc="left", fontsize=9, color="#5d6370")
                    shown = f"{point['temperature']:g}"
                    axis.annotate(shown, pair, xytext=(4, 4), textcoords="offset points", fontsize=9, color="#5d6370")
        axis.set_xlabel(label)
        if not rises:
            axis.invert_xaxis()
        tidy(axis)
    axes[0].set_ylabel("Mean CIDEr-D of the captions")
    _legend_below(figure)
    return save_figure(path, figure, title=title, text=text)


# --- Lengths of caption sets -----------------------------------------------------------------------------------------


def write_length_histogram(path: str | os.PathLike[str], lengths: Mapping[str, Sequence[int]]) -> Path:
    """Draw a histogram of caption lengths, in words, for each source, and write the PNG atomically.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 4. Shares of captions are drawn, so that sources of
    different size can be compared; a dotted line marks each mean.
    """
    counted = {name: np.asarray(values, dtype=np.int64) for name, values in lengths.items()}
    longest = max(int(array.max()) for array in counted.values())
    # At most 60 bars: one per length if possible, else one per two, three, ... lengths.
    step = math.ceil((longest + 1) / 60)
    edges = np.arange(0, longest + 1 + step, step) - 0.5
    figure, axis = new_figure(5.6, 3.6)
    for index, (name, array) in enumerate(counted.items()):
        style = {key: value for key, value in _style(index).items() if key != "marker"}
        shares = np.histogram(array, bins=edges)[0] / len(array)
        axis.stairs(shares, edges, linewidth=1.8, label=f"{plain_label(name)} (mean {array.mean():.1f})", **style)
        axis.stairs(shares, edges, fill=True, color=style["color"], alpha=0.12)
        axis.axvline(array.mean(), color=style["color"], linestyle=":", linewidth=1.2)
    axis.set_xlabel("Words of a caption")
    axis.set_ylabel("Share of captions")
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    tidy(axis)
    _legend_below(figure)
    return save_figure(path, figure)
