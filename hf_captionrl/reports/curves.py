"""Curves over training: mean length of captions and self-retrieval."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

__all__ = ["write_curves"]

History = Sequence[Mapping[str, Any]]
"""Evaluations of one method over training."""

_PANELS = (("length", "Mean length (words)"), ("recall_at_1", "Self-retrieval R@1"))


def write_curves(
    path: str | os.PathLike[str], histories: Mapping[str, History], *, x: str = "epoch", title: str | None = None
) -> Path:
    """Draw mean length and self-retrieval R@1 over training, one line per method, and write the PNG atomically.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Figure 3.

    Args:
        path: File to write; the name must end in `.png`.
        histories: Evaluations of each method: mappings with `x`, `length` (words), `recall_at_1` (a fraction; None if
            there was no scorer) and optionally `recall_at_1_ci` and `length_ci`, `[low, high]`, drawn as a band.
        x: Key of the horizontal axis, `epoch` or `step`.
        title: Title above the panels.

    Returns:
        `pathlib.Path`: The file written.

    Raises:
        ValueError: If there is no method, a method has no evaluation, a key is missing, or a number is not finite.
    """
    path = check_png(path)
    _check(histories, x)
    figure, axes = new_figure(9.5, 4.0, columns=2)
    for axis, (key, label) in zip(axes, _PANELS, strict=True):
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
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    if title:
        figure.suptitle(plain_label(title), fontsize=12)
    return save_figure(path, figure)


def _check(histories: Mapping[str, History], x: str) -> None:
    if not histories:
        raise ValueError("There are no histories. Pass at least one method with one evaluation.")
    for name, history in histories.items():
        if not history:
            raise ValueError(f"{name!r} has no evaluation. Leave the method out, or evaluate it at least once.")
        for index, point in enumerate(history):
            for key in (x, *(key for key, _ in _PANELS)):
                if key not in point:
                    raise ValueError(f"Evaluation {index} of {name!r} has no {key!r}; it has {sorted(point)}.")
                if point[key] is None and key != x:
                    continue
                if point[key] is None or not math.isfinite(point[key]):
                    raise ValueError(f"{key} of {name!r} is {point[key]} at evaluation {index}; it must be finite.")
            if point["recall_at_1"] is not None and not 0.0 <= point["recall_at_1"] <= 1.0:
                raise ValueError(
                    f"recall_at_1 of {name!r} is {point['recall_at_1']} at evaluation {index}; "
                    "fractions are in [0, 1], never percent."
                )
