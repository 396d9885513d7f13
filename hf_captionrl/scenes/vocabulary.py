"""The WordPiece vocabulary that the embedded models share."""

from __future__ import annotations

import string

from hf_captionrl.scenes.grammar import OPINIONS, WORDS
from hf_captionrl.scenes.object_kinds import CATEGORIES, EMOJI_KINDS, names_of, plural
from hf_captionrl.scenes.world import BACKGROUNDS, COLOURS, RELATIONS, SIZES

__all__ = ["SPECIAL_TOKENS", "vocabulary"]

SPECIAL_TOKENS: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]")
"""BLIP's special tokens. The end token `[SEP]` has id 3: a CLIP whose end token has id 2 pools at the wrong place."""


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids."""
    words = set("a an two three some with alone at in on the of image picture background ,".split())
    words |= {*BACKGROUNDS, *filter(None, COLOURS), *SIZES, *OPINIONS}
    words |= {form for kind in EMOJI_KINDS for name in names_of(kind) for form in (name, plural(name))}
    words |= {form for category in CATEGORIES for form in (category, plural(category))}
    words |= {word for phrases in (*WORDS.values(), RELATIONS) for phrase in phrases for word in phrase.split()}
    words |= {"moving", "still", "rest", "up", "down", "slowly", "fast"}
    characters = string.ascii_lowercase + string.digits
    first_words = ("a", "an", "two", "three", "some")
    pieces = [f"##{c}" for c in characters] + [f"##{w}" for w in first_words if len(w) > 1]
    return [*SPECIAL_TOKENS, *sorted(words), *(c for c in characters if c not in words), *pieces]
