"""Results as JSON takes them, and a word about arguments that do nothing."""

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hf_captionrl.io import to_plain

__all__ = ["plain_result", "warn_of_misspelling"]


def plain_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as JSON takes it: Python numbers and lists; None where a number is not finite."""
    return {key: to_plain(_finite(value), where=key) for key, value in result.items()}


def _finite(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def warn_of_misspelling(others: Mapping[str, Any], compute: Callable[..., Any]) -> None:
    """Arguments that a module does not know are for its siblings in `evaluate.combine`, or misspelt."""
    own = [name for name in inspect.signature(compute).parameters if name not in ("self", "others")]
    for name in others:
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.85)
        if near:
            warnings.warn(f"{name!r} is not known here and does nothing. Did you mean {near[0]!r}?", stacklevel=4)
