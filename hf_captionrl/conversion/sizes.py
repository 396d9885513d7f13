"""Sizes of a model that the shapes of its tensors tell."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["HEAD_WIDTH", "head_count", "layer_count", "side"]

HEAD_WIDTH = 64
"""Width of an attention head in BERT, ViT, CLIP and BLIP of every published size."""


def layer_count(names: Iterable[str], prefix: str) -> int:
    """Number of layers whose names begin with a prefix and a number."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})


def head_count(width: int, given: int | None = None) -> int:
    """Number of attention heads: the one given, or that of the standard width."""
    heads = given or width // HEAD_WIDTH
    if not heads or width % heads:
        raise ValueError(
            f"A width of {width} cannot be split into {f'{given} heads' if given else f'heads of {HEAD_WIDTH}'}. Use --config with a "
            "folder whose config.json has the number of heads."
        )
    return heads


def side(count: int, what: str) -> int:
    """Length of the side of a square with that many places."""
    root = math.isqrt(count)
    if root * root != count:
        raise ValueError(f"{what} ({count}) are not a square. Use a checkpoint as it was released.")
    return root
