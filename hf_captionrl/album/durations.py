"""Parses durations such as 10m."""

import re

__all__ = ["duration"]

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Convert a duration such as `90s`, `10m` or `1.5h` to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a duration. Use a number above 0 and s, m or h, such as 10m.")
    return float(match[1]) * _SECONDS[match[2]]
