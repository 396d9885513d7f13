"""Plots of caption sets: lengths, and retrieval against faithfulness."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from hf_captionrl.reports.plot_style import COLOURS, LINES, MARKERS, new_figure, plain_label, save_figure, tidy

__all__ = ["write_length_histogram", "write_trade_off"]


def write_length_histogram(
    path: str | os.PathLike[str],
    lengths: Mapping[str, Sequence[int]],
    *,
    unit: str = "words",
    title: str | None = None,
) -> Path:
    """Draw a histogram of caption lengths for each source, and write the PNG atomically.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 4. Shares of captions are drawn, so that sources of
    different size can be compared; a dotted line marks each mean.
    """
    if not lengths:
        raise ValueError("There are no lengths. Pass at least one source with one caption.")
    counted = {}
    for name, values in lengths.items():
        array = np.asarray(values)
        if array.size == 0:
            raise ValueError(f"{name!r} has no captions. Leave the source out.")
        if not np.isfinite(array).all() or (array < 0).any() or (array != np.floor(array)).any():
            raise ValueError(
                f"Lengths of {name!r} must be integers of 0 or more {unit}. Pass the length of each caption."
            )
        counted[name] = array.astype(np.int64)
    longest = max(int(array.max()) for array in counted.values())
    # At most 60 bars: one per length if possible, else one per two, three, ... lengths.
    step = math.ceil((longest + 1) / 60)
    edges = np.arange(0, longest + 1 + step, step) - 0.5
    figure, axis = new_figure(7.0, 4.0)
    for index, (name, array) in enumerate(counted.items()):
        colour = COLOURS[index % len(COLOURS)]
        shares, _ = np.histogram(array, bins=edges)
        style = {"color": colour, "linestyle": LINES[index % len(LINES)]}
        label = f"{plain_label(name)} (mean {array.mean():.1f})"
        axis.stairs(shares / len(array), edges, linewidth=1.8, label=label, zorder=3 + index, **style)
        axis.stairs(shares / len(array), edges, fill=True, color=colour, alpha=0.12)
        axis.axvline(array.mean(), color=colour, linestyle=":", linewidth=1.2)
    axis.set_xlabel(f"{unit.capitalize()} of a caption")
    axis.set_ylabel("Share of captions")
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    tidy(axis)
    axis.legend(frameon=False)
    return save_figure(path, figure, title=title)


def write_trade_off(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    x: tuple[str, str] = ("pool_recall_at_1", "Self-retrieval R@1 in the pool"),
    y: tuple[str, str] = ("hallucination", "Hallucination (share of wrong claims)"),
    title: str | None = None,
) -> Path | None:
    """Draw each captioner as a point between two numbers, with its 95 % intervals, and write the PNG atomically."""
    points = [row for row in rows if row.get(x[0]) is not None and row.get(y[0]) is not None]
    if not points:
        return None
    figure, axis = new_figure(6.0, 4.5)
    for index, row in enumerate(points):
        errors = []
        for key in (x[0], y[0]):
            low, high = row.get(f"{key}_ci") or (row[key], row[key])
            errors.append([[max(row[key] - low, 0.0)], [max(high - row[key], 0.0)]])
        axis.errorbar(
            row[x[0]],
            row[y[0]],
            xerr=errors[0],
            yerr=errors[1],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=plain_label(row["name"]),
            markersize=8,
            elinewidth=1.2,
            capsize=2,
        )
    axis.set_xlabel(x[1])
    axis.set_ylabel(y[1])
    axis.margins(0.12)
    tidy(axis)
    axis.legend(frameon=False)
    return save_figure(path, figure, title=title)
