"""Scripts of captions, and languages by py3langid if it is installed (extra `[language]`); it needs no network.

Legend: N texts.
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

__all__ = ["LANGUAGES", "MARGIN", "LanguageIdentifier", "load_language_identifier", "script_of"]

logger = logging.getLogger(__name__)

LANGUAGES = frozenset(
    "ar bn cs da de el en es fa fi fr he hi hr hu id it ja ko nl no pl pt ro ru sv sw te th tr uk vi zh".split()
)
"""Languages that captions are compared with: those of Crossmodal-3600 that py3langid knows. Among all 139, rare languages win for
captions of three words."""
MARGIN = 3.0
"""Log-likelihood in nats by which another language must be more likely. The true language of short captions is within 2.3 nats."""


def script_of(text: str) -> str | None:
    """Most frequent script of the letters of a text, such as `LATIN` or `CYRILLIC`; None without letters."""
    if text.isascii():  # most captions, whose letters need no names
        return "LATIN" if any(map(str.isalpha, text)) else None
    counts = Counter(name for letter in text if letter.isalpha() and (name := _script_of_letter(letter)))
    return counts.most_common(1)[0][0] if counts else None


@cache
def _script_of_letter(letter: str) -> str:
    """Empty for a letter without a name."""
    return unicodedata.name(letter, "").partition(" ")[0]


class LanguageIdentifier:
    """Compares the languages of captions; a caption of two or three words often fits several."""

    def __init__(self, identifier: Any, languages: Collection[str] = LANGUAGES) -> None:
        self._identifier = identifier
        self._identifier.set_languages(sorted(languages))

    def is_foreign(self, text: str, languages: Collection[str]) -> bool:
        """Whether a text is clearly in none of some languages."""
        if not languages or script_of(text) is None or self._identifier.classify(text)[0] in languages:
            return False
        scores = dict(self._identifier.rank(text))
        return bool(max(scores.values()) - max(scores[language] for language in languages) > MARGIN)

    def languages_of(self, groups: Sequence[Iterable[str]]) -> list[set[str]]:
        """Languages of groups of texts. A text that may be in the most frequent language is in that language."""
        found = [
            [(text, self._identifier.classify(text)[0]) for text in texts if script_of(text) is not None]
            for texts in groups
        ]
        counts = Counter(language for mine in found for _, language in mine)
        main = max(counts, key=lambda language: (counts[language], language), default="")
        return [
            {language if language == main or self.is_foreign(text, [main]) else main for text, language in mine}
            for mine in found
        ]


def load_language_identifier(language: str | None = None) -> LanguageIdentifier | None:
    """The identifier for `LANGUAGES` and another language; None if py3langid is not installed.

    Raises:
        ModuleNotFoundError: If a language is passed and py3langid is not installed.
        ValueError: If py3langid does not know the language.
    """
    try:
        from py3langid.langid import MODEL_FILE
        from py3langid.langid import LanguageIdentifier as Identifier
    except ModuleNotFoundError as error:
        if language is None:
            _report_missing()
            return None
        raise ModuleNotFoundError(
            f"The language {language!r} needs py3langid. Install it with: pip install 'hf-captionrl[language]'"
        ) from error
    return _loaded(Identifier, MODEL_FILE, language)


@cache
def _report_missing() -> None:
    logger.warning(
        "py3langid is not installed, so only the scripts of new and existing captions are compared, not their languages. Install "
        "it with: pip install 'hf-captionrl[language]'"
    )


@cache
def _loaded(kind: Any, file: Any, language: str | None) -> LanguageIdentifier:
    identifier = kind.from_model_file(file)
    if language is not None and language not in identifier.labels:
        raise ValueError(
            f"The language {language!r} is unknown. Use an ISO 639 code that py3langid knows, such as 'en'."
        )
    return LanguageIdentifier(identifier, LANGUAGES | {language} if language else LANGUAGES)
