"""Releases of transformers and TRL: those that were tested, and a warning beyond them."""

from __future__ import annotations

import functools
import importlib
import logging
from importlib import metadata
from typing import Any

from packaging.version import Version

logger = logging.getLogger(__name__)

# From the lowest to the newest; `make test-versions`, the lower bounds, constraints.txt and the documentation follow these.
TESTED = {"transformers": ("5.18.0", "5.21.1", "5.24.0"), "trl": ("1.16.0",)}


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
