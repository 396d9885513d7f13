"""Words of a caption with their positions, and the English function words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

__all__ = ["DETERMINERS", "FUNCTION_WORDS", "JOINTS", "Word", "caption_words", "is_content", "is_english"]

DETERMINERS = frozenset("a an the this that these those its my your our his her their some one".split())
"""Words that need a noun."""
JOINTS = frozenset(
    "and or of is are was were has have with in on at to by from near for while as that which who".split()
)
"""Words that join what follows them to what precedes them."""
FUNCTION_WORDS = (
    DETERMINERS | JOINTS | frozenset("be there it there's it's being over under into up down very".split())
)
"""English words without content."""

# Frequent words of other languages in Latin script that English captions do not contain.
_OTHER_LANGUAGES = frozenset(
    "un une le la les du des de et est il elle avec sur dans y el los las una con en del por para uno gli che di da della "
    "um uma com o os ao der das ein eine einen und mit auf im ist het een van met op och ett på og egy és az jest w z".split()
)


class Word(NamedTuple):
    """A word or a punctuation mark of a caption."""

    start: int
    end: int  # the character after its last one
    folded: str  # the word without case


@cache
def _pattern() -> re.Pattern[str]:
    """Times and numbers, words with hyphens and apostrophes, single punctuation marks."""
    # \w lacks combining marks, such as the vowel signs of Hindi, and the joiners of Hindi and Persian. Marks above U+FFFF
    # are left out: with them, `re` would search the set one by one.
    marks = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
    letter = rf"(?:\w|[\u200c\u200d{marks}])"
    return re.compile(rf"\d+(?:[.,:/]\d+)+{letter}*|{letter}+(?:['’-]{letter}+)*|[^\w\s]")


def caption_words(text: str) -> list[Word]:
    """The words and punctuation marks of a text; a run of letters without spaces is one word in every script."""
    return [Word(*found.span(), found[0].casefold()) for found in _pattern().finditer(text)]


def is_content(word: str) -> bool:
    """Whether a word is neither punctuation nor an English function word."""
    return word[0].isalnum() and word not in FUNCTION_WORDS


def is_english(words: Sequence[Word]) -> bool:
    """Whether English grammar may be applied to a caption; False in doubt."""
    known = {word.folded for word in words}
    if known & _OTHER_LANGUAGES:
        return False
    return all(word.isascii() for word in known) or bool(known & {"the", "of", "with", "and"})
