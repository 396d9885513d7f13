"""Curves over training: what the trainer's evaluation measures, or all that a results table has."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from hf_captionrl.reports.plot_style import (
    COLOURS,
    LINES,
    MARKERS,
    check_png,
    new_figure,
    plain_label,
    save_figure,
    tidy,
)

__all__ = ["CURVES", "write_curves"]

History = Sequence[Mapping[str, Any]]
"""Evaluations of one method over training."""

Panels = Sequence[tuple[str, str]]
"""Key and title of each panel."""

_PANELS: Panels = (("length", "Mean length (words)"), ("recall_at_1", "Self-retrieval R@1"))

CURVES: Panels = (
    ("rd100_recall_at_1", "R@1 among 100, held-out scorer"),
    ("reward_rd100_recall_at_1", "R@1 among 100, reward scorer"),
    ("bag_7_truth_recall_at_1", "R@1 in bags of 7, truth"),
    ("cider_d", "CIDEr-D"),
    ("hallucination", "Hallucination"),
    ("length", "Mean length (words)"),
)
"""Panels of a learning curve; the keys are those of a results table."""


def write_curves(
    path: str | os.PathLike[str],
    histories: Mapping[str, History],
    *,
    x: str = "epoch",
    title: str | None = None,
    panels: Panels = _PANELS,
    text: Mapping[str, str] | None = None,
) -> Path:
    """Draw numbers over training, one panel per number and one line per method, and write the PNG atomically.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Figure 3.

    Args:
        path: File to write; the name must end in `.png`.
        histories: Evaluations of each method: mappings with `x` and the keys of the panels, by default `length` (words)
            and `recall_at_1` (a fraction), None where not measured. Optional `<key>_ci`, `[low, high]`, is drawn as a band.
        x: Key of the horizontal axis, `epoch` or `step`.
        title: Title above the panels.
        panels: Key and title of each panel, at most three in a row.
        text: Metadata of the file.

    Returns:
        `pathlib.Path`: The file written.

    Raises:
        ValueError: If there is no method, a method has no evaluation, a key is missing, or a number is not finite.
    """
    path = check_png(path)
    _check(histories, x, panels)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(9.5, 4.0 if rows == 1 else 2.8 * rows, columns=columns, rows=rows)
    panel_axes = np.ravel(axes)
    for axis in panel_axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (key, label) in zip(panel_axes, panels, strict=False):
        for index, (name, history) in enumerate(histories.items()):
            points = sorted((point for point in history if point[key] is not None), key=lambda point: point[x])
            positions = [point[x] for point in points]
            colour = COLOURS[index % len(COLOURS)]
            axis.plot(
                positions,
                [point[key] for point in points],
                label=plain_label(name),
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                linestyle=LINES[index % len(LINES)],
                linewidth=2,
                markersize=5,
                # Points on the axis (epoch 0) are drawn completely.
                clip_on=False,
                zorder=3 + index,
            )
            if points and all(point.get(f"{key}_ci") is not None for point in points):
                low, high = zip(*(point[f"{key}_ci"] for point in points), strict=True)  # type: ignore[misc]
                axis.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
        if not any(len(line.get_xdata()) for line in axis.lines):
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", color="#5d6370")
        axis.set_title(label, loc="left", fontsize=11, color="#1d1f23")
        axis.set_xlabel({"epoch": "Epoch", "step": "Training step"}.get(x, x))
        # From zero, because a truncated axis makes small differences look large.
        axis.set_ylim(bottom=0)
        if x == "step" or all(float(point[x]).is_integer() for history in histories.values() for point in history):
            axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        tidy(axis, grid="y")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    return save_figure(path, figure, title=title, text=text)


def _check(histories: Mapping[str, History], x: str, panels: Panels) -> None:
    if not histories:
        raise ValueError("There are no histories. Pass at least one method with one evaluation.")
    for name, history in histories.items():
        if not history:
            raise ValueError(f"{name!r} has no evaluation. Leave the method out, or evaluate it at least once.")
        for index, point in enumerate(history):
            for key in (x, *(key for key, _ in panels)):
                if key not in point:
                    raise ValueError(f"Evaluation {index} of {name!r} has no {key!r}; it has {sorted(point)}.")
                if point[key] is None and key != x:
                    continue
                if point[key] is None or not math.isfinite(point[key]):
                    raise ValueError(f"{key} of {name!r} is {point[key]} at evaluation {index}; it must be finite.")
                if key.endswith("recall_at_1") and not 0.0 <= point[key] <= 1.0:
                    raise ValueError(
                        f"{key} of {name!r} is {point[key]} at evaluation {index}; fractions are in [0, 1], never percent."
                    )
