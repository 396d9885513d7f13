"""Style of all plots: colours, markers, axes, and how PNG files are written."""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_captionrl.io import atomic_write_bytes

__all__ = ["COLOURS", "LINES", "MARKERS", "check_png", "new_figure", "plain_label", "save_figure", "tidy"]

COLOURS = ("#7a7f8a", "#e69f00", "#0072b2", "#cc79a7", "#009e73", "#d55e00", "#56b4e9", "#b8a400")
"""Okabe and Ito's colours, which colour-blind readers can distinguish, in the order of the gallery."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Markers of points, so that they do not differ only in colour."""

LINES = ("-", "--", "-", "-.")
"""Styles of lines."""


def plain_label(name: str) -> str:
    """A name escaped for matplotlib, where a leading underscore hides it and a dollar sign starts a formula."""
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$")


def check_png(path: str | os.PathLike[str]) -> Path:
    """Check that a path ends in .png."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"path is {str(path)!r}; plots are written as PNG. Use a name that ends in .png.")
    return path


def new_figure(width: float, height: float, *, columns: int = 1, rows: int = 1) -> tuple[Figure, Any]:
    """An empty figure, `width` inches of 150 pixels wide."""
    # Without pyplot, which chooses a backend and keeps state for the whole program.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def save_figure(
    path: str | os.PathLike[str], figure: Figure, *, title: str | None = None, text: Mapping[str, str] | None = None
) -> Path:
    """Write a figure atomically; the same numbers give the same bytes. `text` is stored as metadata."""
    if title:
        figure.suptitle(plain_label(title), fontsize=12)
    buffer = io.BytesIO()
    # Without matplotlib's version in the file.
    figure.savefig(buffer, format="png", metadata={"Software": None, **(text or {})})
    return atomic_write_bytes(check_png(path), buffer.getvalue())


def tidy(axis: Any, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Remove frames and ticks."""
    axis.grid(axis=grid, color="#e2e0da", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors="#5d6370", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#b9b6ae")
