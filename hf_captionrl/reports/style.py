"""How pictures look, and how they are made and written: colours, markers, a quiet frame, a PNG."""

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
"""Okabe and Ito's colours, told apart by colour-blind readers, in the order of the gallery's."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Of points, so that colour is not all that tells them apart."""

LINES = ("-", "--", "-", "-.")
"""Of lines, likewise."""


def plain_label(name: str) -> str:
    """A name as matplotlib shows it unchanged: a leading underscore would hide it, a dollar sign start a formula."""
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$")


def check_png(path: str | os.PathLike[str]) -> Path:
    """The name of a picture, before anything is drawn."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"path is {str(path)!r}; pictures are written as PNG. End the name in .png.")
    return path


def new_figure(width: float, height: float, *, columns: int = 1) -> tuple[Figure, Any]:
    """An empty picture.

    Args:
        width: In inches; 150 pixels each.
    """
    # By hand: pyplot would choose a backend for, and keep state in, the program that called.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def save_figure(path: str | os.PathLike[str], figure: Figure, *, text: Mapping[str, str] | None = None) -> Path:
    """Write a picture atomically; the same numbers give the same bytes.

    Args:
        text: Stored in the file beside the pixels, e.g. the numbers that the picture shows.
    """
    buffer = io.BytesIO()
    # Without matplotlib's version in the file.
    figure.savefig(buffer, format="png", metadata={"Software": None, **(text or {})})
    return atomic_write_bytes(check_png(path), buffer.getvalue())


def tidy(axis: Any, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Take away what is not data."""
    axis.grid(axis=grid, color="#e2e0da", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors="#5d6370", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#b9b6ae")
