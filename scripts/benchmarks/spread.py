"""Median and quartiles of measured values."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


def spread(values: Sequence[float]) -> dict[str, float]:
    """`median`, `low` and `high` (the quartiles)."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "low": low, "high": high}


def summary(values: Sequence[float]) -> dict[str, Any]:
    """`median`, `quartiles` and the `values` themselves."""
    quartiles: list[float] = np.quantile(values, [0.25, 0.75]).tolist()
    return {"median": statistics.median(values), "quartiles": quartiles, "values": values}


def to_cell(ratio: dict[str, Any]) -> str:
    """Median and quartiles of [`summary`], for a table."""
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]"
