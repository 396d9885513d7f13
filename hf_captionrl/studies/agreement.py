"""Agreement of raters beyond chance: Krippendorff's alpha, which scipy does not have.

Legend: V different values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Literal

import numpy as np

__all__ = ["krippendorff_alpha"]

Level = Literal["nominal", "ordinal", "interval"]
"""Whether values are only equal or different, can be ordered, or have distances."""


def _distances(values: np.ndarray, totals: np.ndarray, level: Level) -> np.ndarray:
    """Squared differences between the values, of shape `(V, V)`."""
    if level == "nominal":
        return 1.0 - np.eye(len(values))
    if level == "interval":
        return (values[:, None] - values[None, :]).astype(np.float64) ** 2
    # A value's rank is the middle of its uses; distances are differences of ranks.
    middles = np.cumsum(totals) - totals / 2
    return (middles[:, None] - middles[None, :]) ** 2


def krippendorff_alpha(
    ratings: Iterable[tuple[Hashable, Hashable, Any]], *, level: Level = "nominal"
) -> dict[str, Any]:
    """Krippendorff's alpha: `1 - D_o / D_e`, observed over expected disagreement.

    Reference: Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011. Raters need not rate
    every unit; units with one rating are left out.

    `ratings` are `(unit, person, value)`, at most one per person and unit; numbers for the ordinal and the interval
    level.
    """
    if level not in ("nominal", "ordinal", "interval"):
        raise ValueError(f"level is {level!r}, but must be 'nominal', 'ordinal' or 'interval'.")
    of_unit: dict[Hashable, dict[Hashable, Any]] = {}
    for unit, person, value in ratings:
        if level != "nominal" and (
            isinstance(value, bool | str) or not hasattr(value, "__float__") or not np.isfinite(value)
        ):
            raise ValueError(f"{person!r} gave {unit!r} the value {value!r}; the {level} level needs finite numbers.")
        given = of_unit.setdefault(unit, {})
        if person in given:
            raise ValueError(f"{person!r} rated {unit!r} twice. Keep one of the ratings.")
        given[person] = value
    units = [given for given in of_unit.values() if len(given) > 1]
    used = [value for given in units for value in given.values()]
    result: dict[str, Any] = {
        "alpha": None,
        "level": level,
        "units": len(units),
        "ratings": len(used),
        "people": len({person for given in units for person in given}),
    }
    if not used:
        return {**result, "alpha_reason": "no unit was rated by two people"}
    different = sorted(set(used), key=repr) if level == "nominal" else sorted(set(used))
    if len(different) == 1:
        return {**result, "alpha_reason": "all ratings are equal, so agreement by chance is undefined"}
    place = {value: number for number, value in enumerate(different)}
    coincidences = np.zeros((len(different), len(different)))
    for given in units:
        counts = np.bincount([place[value] for value in given.values()], minlength=len(different)).astype(np.float64)
        # Ordered pairs of values of two people, weighted so that a unit counts as many pairs as it has values.
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(given) - 1)
    totals = coincidences.sum(axis=1)
    numbers = np.arange(len(different)) if level == "nominal" else np.asarray(different, dtype=np.float64)
    if level == "interval":  # scaling by a power of two is exact and keeps squares finite; alpha does not change
        numbers = np.ldexp(numbers, -int(np.frexp(np.abs(numbers).max())[1]))
    distances = _distances(numbers, totals, level)
    observed = (coincidences * distances).sum()
    expected = (np.outer(totals, totals) * distances).sum() / (totals.sum() - 1)
    return {**result, "alpha": float(1 - observed / expected)}
