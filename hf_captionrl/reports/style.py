"""How pictures look: colours, markers and a quiet frame."""

from typing import Any

__all__ = ["COLOURS", "LINES", "MARKERS", "plain_label", "tidy"]

COLOURS = ("#7a7f8a", "#e69f00", "#0072b2", "#cc79a7", "#009e73", "#d55e00", "#56b4e9", "#b8a400")
"""Okabe and Ito's colours, told apart by colour-blind readers, in the order of the gallery's."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Of points, so that colour is not all that tells them apart."""

LINES = ("-", "--", "-", "-.")
"""Of lines, likewise."""


def plain_label(name: str) -> str:
    """A name as matplotlib shows it unchanged: a leading underscore would hide it, a dollar sign start a formula.

    Args:
        name: The name.

    Returns:
        `str`: What to pass as a label.
    """
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$")


def tidy(axis: Any) -> None:
    """Take away what is not data.

    Args:
        axis (`matplotlib.axes.Axes`): The panel.
    """
    axis.grid(color="#e2e0da", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors="#5d6370", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#b9b6ae")
