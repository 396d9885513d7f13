"""Constraints on captions: length, words, repetitions, language.

Legend: S candidates of all images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from hf_captionrl.album.caption_language import load_language_identifier, script_of
from hf_captionrl.album.phrase_removal import without_loose_end
from hf_captionrl.album.settings import ConstraintOptions
from hf_captionrl.text.degenerate_captions import degenerate

__all__ = ["check_candidates", "meets_constraints", "shortened", "with_word"]


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

    With `language="auto"`, a candidate must also have the script and, if py3langid is installed, the language of an existing
    caption of its image, if there are any. The trigger does not count.
    """
    flat = [text for mine in candidates for text in mine]
    good: np.ndarray = np.ones(len(flat), dtype=bool)
    if options.max_characters is not None:
        good &= np.array([len(text) <= options.max_characters for text in flat], dtype=bool)
    for word in options.require:
        good &= with_word(flat, word)
    for word in options.forbid:
        good &= ~with_word(flat, word)
    if options.language == "any" or (
        options.language == "auto" and not any(text.strip() for mine in old for text in mine)
    ):
        return good
    own = [[text.removeprefix(trigger or "") for text in mine] for mine in candidates]
    return good & (
        _in_scripts(own, old) & _in_languages(own, old)
        if options.language == "auto"
        else _in_language(own, options.language)
    )


def _in_scripts(candidates: Sequence[Sequence[str]], old: Sequence[Sequence[str]]) -> np.ndarray:
    wanted = [{script_of(text) for text in mine} - {None} for mine in old]
    pairs = ((text, scripts) for mine, scripts in zip(candidates, wanted, strict=True) for text in mine)
    return np.array([not scripts or script_of(text) in scripts for text, scripts in pairs], dtype=bool)


def _in_languages(candidates: Sequence[Sequence[str]], old: Sequence[Sequence[str]]) -> np.ndarray:
    flat = [text for mine in candidates for text in mine]
    identifier = load_language_identifier()
    if identifier is None:
        return np.ones(len(flat), dtype=bool)
    wanted = identifier.languages_of(old)
    languages = (wanted[row] for row, mine in enumerate(candidates) for _ in mine)
    return np.array([not identifier.is_foreign(*pair) for pair in zip(flat, languages, strict=True)], dtype=bool)


def _in_language(candidates: Sequence[Sequence[str]], language: str) -> np.ndarray:
    identifier = load_language_identifier(language)
    assert identifier is not None
    return np.array([not identifier.is_foreign(text, [language]) for mine in candidates for text in mine], dtype=bool)


def with_word(texts: Sequence[str], word: str) -> np.ndarray:
    """Mask of the texts that contain a word, `(S,)`; in scripts without spaces between words, its letters."""
    wanted = re.escape(word)
    pattern = re.compile(wanted if script_of(word) in _WITHOUT_SPACES else rf"(?<!\w){wanted}(?!\w)", re.IGNORECASE)
    return np.array([pattern.search(text) is not None for text in texts], dtype=bool)
