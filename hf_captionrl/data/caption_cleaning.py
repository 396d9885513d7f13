"""Cleans captions and finds faulty ones."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

__all__ = ["CAPTION_REMEDIES", "MAX_CAPTION_WORDS", "caption_fault", "clean_caption", "to_caption_list"]

MAX_CAPTION_WORDS = 200
"""Longest accepted caption in words: longer than the captions of data sets, shorter than a web page."""

CAPTION_REMEDIES: dict[str, str] = {
    "caption_missing": "give the row at least one caption, or remove the row",
    "caption_not_text": "write the caption as a string, or set caption_column to the column that holds text",
    "caption_empty": "write a caption with at least one letter or digit, or remove it",
    "caption_too_long": "shorten the caption, or raise max_caption_words",
}
"""Faults of captions, and the remedy for each."""

# Without spaces, a Chinese sentence and base64 each count as one word.
_CHARACTERS_PER_WORD = 20
_SURROGATE = re.compile("[\ud800-\udfff]")
# Kept: zero-width (non-)joiners are part of Persian, Indic scripts and emoji; tags (U+E0020-E007F) are part of flags.
_KEPT_FORMAT = {"\u200c", "\u200d"} | {chr(code) for code in range(0xE0020, 0xE0080)}
_KEYS_OF_TEXT = ("raw", "caption", "text", "sentence")


def clean_caption(caption: str) -> str:
    r"""Normalise a caption: Unicode NFC, no control characters, single spaces.

    Control characters (category Cc) and line breaks become spaces; invisible format characters (Cf: byte-order marks,
    soft hyphens, bidirectional overrides) are dropped, except joiners; half surrogate pairs become U+FFFD.

    Args:
        caption (`str`): Any string.

    Returns:
        `str`: The clean caption; empty if nothing remains.
    """
    if caption.isascii():
        if not caption.isprintable():
            caption = "".join(c if c.isprintable() else " " for c in caption)
        return " ".join(caption.split())
    caption = unicodedata.normalize("NFC", _SURROGATE.sub("\ufffd", caption))
    characters = []
    for c in caption:
        category = unicodedata.category(c)
        if category == "Cc":
            characters.append(" ")
        elif category != "Cf" or c in _KEPT_FORMAT:
            characters.append(c)
    return " ".join("".join(characters).split())


def caption_fault(caption: Any, *, max_words: int = MAX_CAPTION_WORDS) -> tuple[str, str] | None:
    """The fault of a cleaned caption, or None."""
    if not isinstance(caption, str):
        return "caption_not_text", "the caption is not a string (empty, a number, or nested too deep)"
    if not any(map(str.isalnum, caption)):
        return "caption_empty", f"the caption {caption[:40]!r} has no letter or digit"
    words = caption.count(" ") + 1
    if words > max_words or len(caption) > max_words * _CHARACTERS_PER_WORD:
        return (
            "caption_too_long",
            f"the caption {caption[:40] + '...'!r} has {words} words and {len(caption)} characters, "
            f"more than {max_words} words or {max_words * _CHARACTERS_PER_WORD} characters",
        )
    return None


def to_caption_list(value: Any) -> list[str | None]:
    """The cleaned captions of one row, in any form that sources use."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = _text_of(value)
    captions = value if isinstance(value, list | tuple) else [value]
    clean: list[str | None] = []
    for caption in captions:
        if isinstance(caption, Mapping):
            caption = _text_of(caption)
        clean.append(clean_caption(caption) if isinstance(caption, str) else None)
    return clean


def _text_of(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in _KEYS_OF_TEXT if key in value), None)
