"""Releases of transformers and TRL that were tested, and what differs between them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

# From the lowest to the newest; `make test-versions`, the lower bounds, constraints.txt and the documentation follow these.
TESTED = {"transformers": ("5.18.0", "5.21.1", "5.24.0"), "trl": ("1.16.0",)}


@functools.cache
def cache_name() -> str:
    """Name of the keys and values in inputs and outputs of models: `cache` since transformers 5.24."""
    return str(importlib.import_module("transformers.generation.utils").ALL_CACHE_NAMES[0])


def is_word_piece(tokenizer: Any) -> bool:
    """Whether a tokenizer has `##` forms; by its model, as GPT-2's vocabulary also contains "##" (from Markdown)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "wordpiece_tokenizer")
    return type(getattr(backend, "model", None)).__name__ == "WordPiece"
