"""Quality of several captions per image against their diversity."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

__all__ = ["frontier", "write_diversity_tradeoff"]

Point = Mapping[str, Any]
"""Numbers at one temperature."""

_PANELS = (
    ("div_2", "Div-2 of the captions of an image", True),
    ("mbleu_4_per_image", "mBLEU-4, axis reversed", False),
)


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
    precision: tuple[str, str] = ("cider_d", "Mean CIDEr-D of the captions"),
    title: str | None = None,
    text: Mapping[str, str] | None = None,
) -> Path:
    """Draw CIDEr-D against Div-2 and against mBLEU-4 over temperatures, one line per captioner, and write the PNG.

    A line connects the temperatures of a captioner that no other of its temperatures exceeds in both numbers; the others are
    pale marks. Error bars show `<key>_ci` of points that have it. Up and to the right is better in both panels.

    `text` is stored in the PNG.

    Reference: Chen and Jin 2020, Section 5.4 and Table 4, which report one temperature. A comparison at one temperature
    cannot distinguish a better captioner from one that samples from a narrower distribution.
    """
    path = check_png(path)
    _check(curves, precision[0])
    figure, axes = new_figure(10.0, 4.5, columns=2)
    for axis, (key, label, rises) in zip(axes, _PANELS, strict=True):
        for index, (name, points) in enumerate(curves.items()):
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            _error_bars(axis, points, key, precision[0], colour)
            pairs = [(float(point[key]), float(point[precision[0]])) for point in points]
            best = frontier([(x if rises else -x, y) for x, y in pairs])
            axis.plot(
                [pairs[i][0] for i in best],
                [pairs[i][1] for i in best],
                color=colour,
                marker=marker,
                linestyle=LINES[index % len(LINES)],
                linewidth=2,
                markersize=6,
                label=plain_label(name),
                zorder=3 + index,
            )
            rest = [pair for i, pair in enumerate(pairs) if i not in best]
            if rest:
                axis.scatter(*zip(*rest, strict=True), color=colour, marker=marker, s=26, alpha=0.4)
            for point, pair in zip(points, pairs, strict=True):
                if point.get("temperature") is not None:
                    shown = f"{point['temperature']:g}"
                    axis.annotate(shown, pair, xytext=(4, 4), textcoords="offset points", fontsize=7, color="#5d6370")
        axis.set_xlabel(label)
        if not rises:
            axis.invert_xaxis()
        tidy(axis)
    axes[0].set_ylabel(precision[1])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    return save_figure(path, figure, title=title, text=text)


def _error_bars(axis: Any, points: Sequence[Point], x: str, y: str, colour: Any) -> None:
    for point in points:
        ends = {key: point.get(f"{key}_ci") for key in (x, y)}
        if ends[x]:
            axis.plot(ends[x], [point[y]] * 2, color=colour, linewidth=1, alpha=0.45, zorder=2)
        if ends[y]:
            axis.plot([point[x]] * 2, ends[y], color=colour, linewidth=1, alpha=0.45, zorder=2)


def _check(curves: Mapping[str, Sequence[Point]], precision: str) -> None:
    if not curves:
        raise ValueError("There are no captioners. Pass at least one with one point.")
    for name, points in curves.items():
        if not points:
            raise ValueError(f"{name!r} has no point. Leave the captioner out, or sample from it.")
        for index, point in enumerate(points):
            for key in (precision, *(key for key, _, _ in _PANELS)):
                value = point.get(key)
                if value is None or not math.isfinite(value):
                    raise ValueError(f"{key} of {name!r} is {value} at point {index}; it must be a finite number.")
                if key != precision and not 0.0 <= value <= 1.0:
                    raise ValueError(
                        f"{key} of {name!r} is {value} at point {index}; fractions are in [0, 1], never percent."
                    )
