"""Sets of scenes or clips that differ pairwise in one or two facts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

__all__ = ["sample_look_alikes_of"]

F = TypeVar("F")


def sample_look_alikes_of(
    rng: np.random.Generator,
    size: int,
    draw: Callable[[], tuple[F, dict[str, tuple[Any, ...]]]],
    change: Callable[[F, dict[str, Any]], F | None],
    weights: Mapping[str, float],
) -> list[F]:
    """Facts that differ pairwise in one or two values; all combinations of the values of two facts are equally likely."""
    while True:
        base, values = draw()
        names = [name for name in weights if name in values]
        p = np.array([weights[name] for name in names], dtype=float)
        first, second = (names[i] for i in rng.choice(len(names), 2, replace=False, p=p / p.sum()))
        pairs = itertools.product(values[first], values[second])
        changed = [change(base, {first: a, second: b}) for a, b in pairs]
        others = [facts for facts in dict.fromkeys(changed) if facts is not None and facts != base]
        if len(others) >= size - 1:
            chosen = [base, *(others[i] for i in rng.choice(len(others), size - 1, replace=False))]
            return [chosen[i] for i in rng.permutation(size)]
