"""The WordPiece vocabulary that the embedded models share."""

from __future__ import annotations

import string

from hf_captionrl.scenes.grammar import ANNOTATORS, plural
from hf_captionrl.scenes.world import BACKGROUNDS, CATEGORIES, EMOJI_KINDS, ORIENTATIONS, RELATIONS, SIZES

__all__ = ["SPECIAL_TOKENS", "vocabulary"]

SPECIAL_TOKENS: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]")
"""BLIP's special tokens. The end token `[SEP]` has id 3: a CLIP whose end token has id 2 pools at the wrong place."""


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids."""
    words = {
        "a",
        "an",
        "two",
        "three",
        "some",
        "with",
        "alone",
        "at",
        "in",
        "on",
        "the",
        "of",
        "picture",
        "background",
    }
    words |= {"top", "middle", "bottom", *BACKGROUNDS, *EMOJI_KINDS, *map(plural, EMOJI_KINDS), *SIZES}
    words |= {word for category in CATEGORIES for word in (category, plural(category))}
    words |= {annotator.small for annotator in ANNOTATORS} | {annotator.large for annotator in ANNOTATORS}
    words |= {word for phrase in (*ORIENTATIONS, *RELATIONS) for word in phrase.split()} - {"upright"}
    characters = string.ascii_lowercase + string.digits
    first_words = ("a", "an", "two", "three", "some")
    pieces = [f"##{c}" for c in characters] + [f"##{w}" for w in first_words if len(w) > 1]
    return [*SPECIAL_TOKENS, *sorted(words), *(c for c in characters if c not in words), *pieces]
