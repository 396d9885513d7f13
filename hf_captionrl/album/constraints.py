"""Constraints on captions: length, words, repetitions, script.

Legend: S candidates of all images.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hf_captionrl.album.phrase_removal import without_loose_end
from hf_captionrl.album.settings import ConstraintOptions
from hf_captionrl.text.degenerate_captions import degenerate

__all__ = ["check_candidates", "meets_constraints", "script_of", "shortened", "with_word"]


def shortened(candidates: Sequence[str], options: ConstraintOptions) -> list[str]:
    """Candidates; those that are too long are truncated after a word, and duplicates are removed."""
    if options.max_characters is None:
        return list(candidates)
    found = []
    for text in candidates:
        if len(text) > options.max_characters:
            start = text[: options.max_characters + 1]
            # Prefer the end of a clause in the second half; else the last whole word.
            clause = max(start.rfind(mark) for mark in (", ", "; ", ". "))
            start = start[:clause] if clause > options.max_characters // 2 else start.rpartition(" ")[0]
            text = without_loose_end(start) or text[: options.max_characters]
        found.append(text)
    return list(dict.fromkeys(found))


_WITHOUT_SPACES = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}


def script_of(text: str) -> str | None:
    """Most frequent script of the letters of a text, such as `LATIN` or `CYRILLIC`; None without letters."""
    names = (unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha())
    counts = Counter(name for name in names if name)
    return counts.most_common(1)[0][0] if counts else None


def check_candidates(
    candidates: Sequence[Sequence[str]],
    old: Sequence[Sequence[str]],
    options: ConstraintOptions,
    *,
    trigger: str | None = None,
) -> np.ndarray:
    """Mask of the candidates that may be chosen, `(S,)`: not blank, not degenerate, and accepted by [`meets_constraints`]."""
    flat = [text for mine in candidates for text in mine]
    good = meets_constraints(candidates, old, options, trigger=trigger)
    good &= np.array([bool(text.strip()) for text in flat], dtype=bool)
    return good & ~np.array(degenerate(flat), dtype=bool)


def meets_constraints(
    candidates: Sequence[Sequence[str]],
    old: Sequence[Sequence[str]],
    options: ConstraintOptions,
    *,
    trigger: str | None = None,
) -> np.ndarray:
    """Mask of the candidates that meet the constraints of the options, `(S,)`.

    A candidate must also use the script of the existing captions of its image, if there are any; the trigger does not count.
    """
    flat = [text for mine in candidates for text in mine]
    good: np.ndarray = np.ones(len(flat), dtype=bool)
    if options.max_characters is not None:
        good &= np.array([len(text) <= options.max_characters for text in flat], dtype=bool)
    for word in options.require:
        good &= with_word(flat, word)
    for word in options.forbid:
        good &= ~with_word(flat, word)
    wanted = [{script_of(text) for text in mine} - {None} for mine in old]
    if any(wanted):
        found = (script_of(text.removeprefix(trigger or "")) for text in flat)
        scripts = (wanted[row] for row, mine in enumerate(candidates) for _ in mine)
        good &= np.array([not s or script in s for script, s in zip(found, scripts, strict=True)], dtype=bool)
    return good


def with_word(texts: Sequence[str], word: str) -> np.ndarray:
    """Mask of the texts that contain a word, `(S,)`; in scripts without spaces between words, its letters."""
    wanted = re.escape(word)
    pattern = re.compile(wanted if script_of(word) in _WITHOUT_SPACES else rf"(?<!\w){wanted}(?!\w)", re.IGNORECASE)
    return np.array([pattern.search(text) is not None for text in texts], dtype=bool)
