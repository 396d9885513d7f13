"""Releases of transformers and TRL: those that were tested, a warning beyond them, and names that move between releases."""

from __future__ import annotations

import functools
import importlib
import logging
from contextlib import suppress
from importlib import metadata
from typing import Any

from packaging.version import Version

logger = logging.getLogger(__name__)

TESTED = {"transformers": ("5.18.0", "5.21.1", "5.24.0"), "trl": ("1.16.0",)}
"""Releases with which the tests pass, from the lowest to the newest. `make test-versions`, the lower bounds and the
documentation follow these; constraints.txt has the newest ones."""

# Where the releases have them. The newest place stands first: an older one may only forward, with a warning.
_PLACES = {
    "AsyncGRPOConfig": ("trl", "trl.experimental.async_grpo"),  # stable in TRL 1.18
    "AsyncGRPOTrainer": ("trl", "trl.experimental.async_grpo"),
    "FusedCausalLMOutput": ("trl.trainer.utils", "trl.trainer.sft_trainer"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    for place in _PLACES[name]:
        with suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(place), name)
    library = _PLACES[name][0].partition(".")[0]
    raise ImportError(
        f"{library} {metadata.version(library)} has no {name} in {' or '.join(_PLACES[name])}. Use {library}=={TESTED[library][-1]}, "
        "the newest release that was tested."
    )


@functools.cache
def cache_name() -> str:
    """Name of the keys and values in inputs and outputs of models: `cache` since transformers 5.24."""
    names: tuple[str, ...] = importlib.import_module("transformers.generation.utils").ALL_CACHE_NAMES
    return names[0]


def first_untested(library: str) -> str:
    """The first release, such as `"5.25"`, that is newer than all tested ones."""
    major, minor = Version(TESTED[library][-1]).release[:2]
    return f"{major}.{minor + 1}"


@functools.cache
def warn_untested(library: str) -> bool:
    """Whether the installed release is newer than the tested ones; logs a warning the first time."""
    installed = metadata.version(library)
    # Tuples, because a development version precedes its release.
    untested = Version(installed).release >= Version(first_untested(library)).release
    if untested:
        logger.warning(
            "%s %s is installed. Releases from %s to %s were tested; %s is the first that was not. If something fails, use %s==%s.",
            library,
            installed,
            *(TESTED[library][0], TESTED[library][-1], first_untested(library)),
            *(library, TESTED[library][-1]),
        )
    return untested
