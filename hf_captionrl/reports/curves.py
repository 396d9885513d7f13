"""Curves over training: how long captions become, and how well they find their image."""

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_captionrl.io import atomic_write_bytes

__all__ = ["write_curves"]

History = Sequence[Mapping[str, Any]]
"""Evaluations of one method in order of time."""

# Okabe and Ito's colours, told apart by colour-blind readers, in the order of the gallery's.
_COLOURS = ("#7a7f8a", "#e69f00", "#0072b2", "#cc79a7", "#009e73", "#d55e00", "#56b4e9", "#b8a400")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-", "-.")
_PANELS = (("length", "Mean length (words)"), ("recall_at_1", "Self-retrieval R@1"))


def write_curves(
    path: str | os.PathLike[str], histories: Mapping[str, History], *, x: str = "epoch", title: str | None = None
) -> Path:
    """Draw mean length and self-retrieval R@1 over training, one line a method, and write the PNG atomically.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Figure 3.

    Args:
        path: Where to write; the name must end in `.png`.
        histories: For each method its evaluations: mappings with `x`, `length` (words), `recall_at_1` (a fraction;
            None where there was no scorer) and, if known, `recall_at_1_ci` and `length_ci`, `[low, high]`, drawn as a
            band.
        x: Key of the horizontal axis, `epoch` or `step`.
        title: A line above the panels.

    Returns:
        `pathlib.Path`: The file written.

    Raises:
        ValueError: If there is no method, a method has no evaluation, a key is missing, or a number is not finite.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"path is {str(path)!r}; curves are written as PNG. End the name in .png.")
    _check(histories, x)
    # Figure and canvas by hand: pyplot would choose a backend for, and keep state in, the program that called.
    figure = Figure(figsize=(9.5, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for axis, (key, label) in zip(axes, _PANELS, strict=True):
        for index, (name, history) in enumerate(histories.items()):
            points = sorted((point for point in history if point[key] is not None), key=lambda point: point[x])
            positions = [point[x] for point in points]
            colour = _COLOURS[index % len(_COLOURS)]
            axis.plot(
                positions,
                [point[key] for point in points],
                # A leading underscore would hide the line from the legend, a dollar sign start a formula.
                label=("\u200b" * name.startswith("_") + name).replace("$", r"\$"),
                color=colour,
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle=_LINES[index % len(_LINES)],
                linewidth=2,
                markersize=5,
                # A point that lies on the axis (epoch 0) is still drawn whole.
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
        # From zero: a cut axis makes a small gain look large.
        axis.set_ylim(bottom=0)
        if x == "step" or all(float(point[x]).is_integer() for history in histories.values() for point in history):
            axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.grid(axis="y", color="#e2e0da", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors="#5d6370", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color("#b9b6ae")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=12)
    buffer = io.BytesIO()
    # Without matplotlib's version in the file, the same histories give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return atomic_write_bytes(path, buffer.getvalue())


def _check(histories: Mapping[str, History], x: str) -> None:
    if not histories:
        raise ValueError("There are no histories. Give at least one method with one evaluation.")
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
