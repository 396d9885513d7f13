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

# From the lowest to the newest; `make test-versions`, the lower bounds, constraints.txt and the documentation follow these.
TESTED = {"transformers": ("5.18.0", "5.21.1", "5.24.0"), "trl": ("1.16.0",)}
# The newest place stands first: an older one may only forward, with a warning.
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
    places, newest = " or ".join(_PLACES[name]), TESTED["trl"][-1]
    raise ImportError(f"trl {metadata.version('trl')} has no {name} in {places}. Use trl=={newest}, which was tested.")


@functools.cache
def cache_name() -> str:
    """Name of the keys and values in inputs and outputs of models: `cache` since transformers 5.24."""
    return str(importlib.import_module("transformers.generation.utils").ALL_CACHE_NAMES[0])


@functools.cache
def warn_untested(library: str) -> bool:
    """Whether the installed release is newer than the tested ones; logs a warning the first time."""
    lowest, newest, installed = TESTED[library][0], TESTED[library][-1], metadata.version(library)
    major, minor = Version(newest).release[:2]
    # Tuples, because a development version precedes its release.
    if untested := Version(installed).release >= (major, minor + 1):
        said = "%s %s is installed. Tested were %s to %s; %s is the first release that was not. If something fails, use %s==%s."
        logger.warning(said, library, installed, lowest, newest, f"{major}.{minor + 1}", library, newest)
    return untested


def is_word_piece(tokenizer: Any) -> bool:
    """Whether a tokenizer has `##` forms; by its model, as GPT-2's vocabulary also contains "##" (from Markdown)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "wordpiece_tokenizer")
    return type(getattr(backend, "model", None)).__name__ == "WordPiece"
