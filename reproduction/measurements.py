"""Numbers of result files with their 95 % intervals, and whether two of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import false_discovery_control, norm
from scipy.stats import t as student

_NORMAL = 1.959964


@dataclass(frozen=True)
class Measured:
    """A number or mean over seeds, and its 95 % interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None
    values: tuple[float, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether every seed gives the same number."""
        return len(self.values) > 1 and max(self.values) - min(self.values) < 1e-9


def seed_interval(values: Sequence[float]) -> Measured:
    """Mean and 95 % t-interval of one number per seed; none of two, as it would reach 12.7 standard errors to each side."""
    if not values:
        raise ValueError("values is empty, and a mean needs one. Name a place of the result that holds seeds.")
    mean = math.fsum(values) / len(values)
    number = Measured(mean, values=tuple(values))
    if len(values) < 3 or number.is_constant:
        return number
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = float(student.ppf(0.975, len(values) - 1)) * math.sqrt(variance / len(values))
    return Measured(mean, mean - half, mean + half, tuple(values))


def look_up(place: str, record: Any) -> Any:
    """What stands at a place of a result.

    A row may be named without its settings in parentheses if it is the only one; a point of a learning curve is named by its
    step or as "last".
    """
    keys = place.split("/")
    if keys[0] in ("start", "trained"):
        keys.insert(0, "rows")
    for key in keys:
        if isinstance(record, list) and record and "name" not in record[0]:
            record = {**{str(point["step"]): point for point in record}, "last": record[-1]}
        if isinstance(record, list):
            named = {entry["name"]: entry for entry in record}
            written = [entry for entry in record if entry["name"] != "references"]
            if key not in named and key in ("start", "trained") and written:
                record = written[0 if key == "start" else -1]
                continue
            # "SLL-ME" is "SLL-ME (entropy=0.03)": the result, not the place, says which weight it has.
            variants = [name for name in named if name.startswith(f"{key} (")]
            key = variants[0] if key not in named and len(variants) == 1 else key
            record = named
        if not isinstance(record, Mapping) or key not in record:
            raise KeyError(f"{place} leads nowhere at {key!r}. Compare it with the keys of the result.")
        record = record[key]
    return record


def measured(place: str, record: Any) -> Measured:
    """A number of a result with its 95 % interval."""
    found = look_up(place, record)
    if isinstance(found, Mapping):
        if "values" in found:
            return seed_interval([float(value) for value in found["values"]])
        low, high = found["interval"]
        return Measured(float(found["value"]), float(low), float(high))
    try:
        low, high = look_up(f"{place}_ci", record)
    except KeyError:
        return Measured(float(found))
    return Measured(float(found), float(low), float(high))


def scaled(number: Measured, times: float) -> Measured:
    """A number and its interval times a factor."""
    ends = [None if end is None else times * end for end in (number.low, number.high)]
    low, high = ends if times >= 0 else ends[::-1]
    return Measured(times * number.value, low, high, tuple(times * value for value in number.values))


def difference(more: Measured, less: Measured) -> Measured:
    """`more` minus `less`, paired by seed where both have seeds.

    Errors of two numbers without seeds count as independent. A result with a paired difference of the same images has a
    smaller error: compare that one.
    """
    if more.values and len(more.values) == len(less.values):
        return seed_interval([a - b for a, b in zip(more.values, less.values, strict=True)])
    value = more.value - less.value
    if more.low is None or more.high is None or less.low is None or less.high is None:
        return Measured(value)
    half = math.hypot(more.high - more.low, less.high - less.low) / 2
    return Measured(value, value - half, value + half)


def p_value(number: Measured) -> float | None:
    """Two-sided p-value of 0: of Student's t over seeds, else of the normal distribution with the interval's width."""
    if number.low is None or number.high is None:
        return None
    errors = abs(number.value) / _standard_error(number)
    return float(2 * (student.sf(errors, len(number.values) - 1) if number.values else norm.sf(errors)))


def survivors(differences: Sequence[Measured]) -> str:
    """How many significant differences of a table remain so when it corrects for their number, as a sentence."""
    known = [p for number in differences if (p := p_value(number)) is not None]
    remain = sum(q < 0.05 for q in false_discovery_control(known)) if known else 0
    return (
        f"{remain} of {sum(p < 0.05 for p in known)} intervals that exclude 0 remain significant after Benjamini and Hochberg's "
        f"correction for the {len(known)} differences of the table."
    )


def detectable(number: Measured, power: float = 0.8) -> float | None:
    """The smallest true difference that as many seeds or images would have shown, with a probability of `power`."""
    if number.low is None or number.high is None:
        return None
    at = student(len(number.values) - 1) if number.values else norm
    return float((at.ppf(0.975) + at.ppf(power)) * _standard_error(number))


def _standard_error(number: Measured) -> float:
    assert None not in (number.low, number.high)  # nosec B101
    widths = 2 * float(student.ppf(0.975, len(number.values) - 1)) if number.values else 2 * _NORMAL
    return (float(number.high or 0) - float(number.low or 0)) / widths


def shown(number: float) -> str:
    """A number as the pages print it."""
    return f"{number:.{3 if abs(number) < 2 else 2 if abs(number) < 100 else 0}f}"
