"""How far people agree beyond chance: Krippendorff's alpha.

Legend: U units, P people.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Literal

import numpy as np

__all__ = ["krippendorff_alpha"]

Level = Literal["nominal", "ordinal", "interval"]
"""What may be said of two values: that they differ, which is larger, or by how much."""


def _distances(values: np.ndarray, totals: np.ndarray, level: Level) -> np.ndarray:
    """Squared differences between the values, of shape `(V, V)`."""
    if level == "nominal":
        return 1.0 - np.eye(len(values))
    if level == "interval":
        return (values[:, None] - values[None, :]).astype(np.float64) ** 2
    # Half of a value's own uses lie on either side of its middle: the distance counts the uses from middle to middle.
    middles = np.cumsum(totals) - totals / 2
    return (middles[:, None] - middles[None, :]) ** 2


def krippendorff_alpha(
    ratings: Iterable[tuple[Hashable, Hashable, Any]], *, level: Level = "nominal"
) -> dict[str, Any]:
    """Krippendorff's alpha: `1 - D_o / D_e`, observed over expected disagreement.

    Reference: Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011. Nobody need judge everything; units that
    one person alone judged say nothing about agreement and are left out.

    Args:
        ratings: `(unit, person, value)`, each person at most once a unit; numbers for the ordinal and the interval level.
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
            raise ValueError(f"{person!r} judged {unit!r} twice. Keep one of the two.")
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
        return {**result, "alpha_reason": "nothing was judged by two people"}
    different = sorted(set(used), key=repr) if level == "nominal" else sorted(set(used))
    if len(different) == 1:
        return {**result, "alpha_reason": "everybody gave everything the same value, so chance cannot be told apart"}
    place = {value: number for number, value in enumerate(different)}
    coincidences = np.zeros((len(different), len(different)))
    for given in units:
        counts = np.bincount([place[value] for value in given.values()], minlength=len(different)).astype(np.float64)
        # Ordered pairs of two people's values, each unit weighing as many pairs as it has values.
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(given) - 1)
    totals = coincidences.sum(axis=1)
    numbers = np.arange(len(different)) if level == "nominal" else np.asarray(different, dtype=np.float64)
    if level == "interval":  # alpha has no unit; by a power of two, which is exact, so that no square leaves a float
        numbers = np.ldexp(numbers, -int(np.frexp(np.abs(numbers).max())[1]))
    distances = _distances(numbers, totals, level)
    observed = (coincidences * distances).sum()
    expected = (np.outer(totals, totals) * distances).sum() / (totals.sum() - 1)
    return {**result, "alpha": float(1 - observed / expected)}
