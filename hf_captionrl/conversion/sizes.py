"""Sizes of a model from the shapes of its tensors, and a comparison of two sets of shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["HEAD_WIDTH", "head_count", "layer_count", "misfits", "side"]

HEAD_WIDTH = 64
"""Width of an attention head in BERT, ViT, CLIP and BLIP of every published size."""


def layer_count(names: Iterable[str], prefix: str) -> int:
    """Number of layers whose names begin with a prefix and a number."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})


def head_count(width: int, given: int | None = None) -> int:
    """Number of attention heads: the given one, or the width divided by that of a standard head."""
    heads = given or width // HEAD_WIDTH
    if not heads or width % heads:
        raise ValueError(
            f"A width of {width} cannot be split into {f'{given} heads' if given else f'heads of {HEAD_WIDTH}'}. Use --config with a "
            "folder whose config.json has the number of heads."
        )
    return heads


def side(count: int, what: str) -> int:
    """Side of a square grid with `count` positions."""
    root = math.isqrt(count)
    if root * root != count:
        raise ValueError(f"{what} ({count}) are not a square. Use a checkpoint as it was released.")
    return root


def misfits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first differences in names and shapes between two sets of tensors; empty if they fit."""
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    wrong += [
        f"{name} is {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    return "; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else "")
