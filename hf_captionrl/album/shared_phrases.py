"""What the captions of a group share, and what varies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.album.caption_words import DETERMINERS, caption_words, is_content

__all__ = ["GroupFacts", "group_facts", "shared_phrases"]

_LONGEST = 8  # words of a phrase
_MIN_IMAGES = 3  # what two captions share is hardly a property of the set
_SHOWN = 30  # varying facts of a group


@dataclass(frozen=True)
class GroupFacts:
    """What the captions of a group of images say."""

    group: str  # name of the group; empty if the whole album is one
    num_images: int  # number of its images
    shared: tuple[str, ...]  # phrases that (nearly) all captions contain, longest first
    # Words or noun phrases of some captions, with the number of captions, most frequent first.
    varying: tuple[tuple[str, int], ...]


def _words(text: str) -> list[str]:
    return [word.folded for word in caption_words(text)]


def _phrases(words: Sequence[str], frequent: Collection[str]) -> set[tuple[str, ...]]:
    """Phrases of frequent words that begin and end with content words, except for a determiner at the start."""
    found = set()
    for start, first in enumerate(words):
        if not (is_content(first) or first in DETERMINERS):
            continue
        for end in range(start + 1, min(start + _LONGEST, len(words)) + 1):
            last = words[end - 1]
            if last not in frequent or not last[0].isalnum():
                break
            if is_content(last):
                found.add(tuple(words[start:end]))
    return found


def shared_phrases(
    captions: Sequence[str], *, min_share: float = 0.9, noun_chunks: Sequence[Collection[str]] | None = None
) -> tuple[str, ...]:
    """Longest phrases that at least a share of the captions contain: phrases of content words, and noun chunks.

    Captions are compared in lower case. Fewer than three captions share nothing. `noun_chunks` are those of each caption; unlike
    other phrases they may contain commas and end with words such as "up".
    """
    if not 0 < min_share <= 1:
        raise ValueError(f"min_share is {min_share}. Use a share in (0, 1].")
    if len(captions) < _MIN_IMAGES:
        return ()
    needed = min_share * len(captions)
    # A shared phrase has shared words. All phrases of 100,000 captions would take gigabytes.
    words = Counter(word for text in captions for word in set(_words(text)))
    frequent = {word for word, count in words.items() if count >= needed}
    chunks = [()] * len(captions) if noun_chunks is None else noun_chunks
    counts = Counter(
        phrase
        for text, mine in zip(captions, chunks, strict=True)
        for phrase in _phrases(_words(text), frequent) | _chunk_phrases(mine)
    )
    found = sorted((p for p, count in counts.items() if count >= needed), key=lambda p: (-len(p), p))
    longest: list[tuple[str, ...]] = []
    for phrase in found:
        # With a determiner and without one, a phrase is the same.
        if not any(_contains(other, phrase) for other in longest):
            longest.append(phrase)
    return tuple(" ".join(phrase).replace(" ,", ",") for phrase in longest)


def _chunk_phrases(chunks: Collection[str]) -> set[tuple[str, ...]]:
    """Noun chunks with and without their determiner; pronouns and others without content words are left out."""
    found = set()
    for words in map(_words, chunks):
        if any(map(is_content, words)):
            found.add(tuple(words))
            found.add(tuple(words[words[0] in DETERMINERS :]))
    return found


def _contains(words: Sequence[str], phrase: Sequence[str]) -> bool:
    return any(tuple(words[at : at + len(phrase)]) == tuple(phrase) for at in range(len(words) - len(phrase) + 1))


def group_facts(
    captions: Sequence[str], groups: Sequence[str], *, min_share: float = 0.9, noun_chunks: bool | None = None
) -> list[GroupFacts]:
    """Shared and varying phrases of each group, in the order of the groups' first captions.

    `noun_chunks=None` uses spaCy's noun chunks if spaCy is installed and no group has more than 5,000 captions.
    """
    members: dict[str, list[str]] = {}
    for caption, group in zip(captions, groups, strict=True):
        members.setdefault(group, []).append(caption)
    parser = _load_parser(noun_chunks, max(map(len, members.values()), default=0))
    found = []
    for group, mine in members.items():
        chunks = None if parser is None else _noun_chunks(mine, parser)
        texts = None if chunks is None else [[text for text, _ in one] for one in chunks]
        shared = shared_phrases(mine, min_share=min_share, noun_chunks=texts)
        known = {word for phrase in shared for word in _words(phrase)}
        counts: Counter[str] = Counter()
        for facts in _facts(mine, chunks):
            counts.update({fact for fact in facts if not set(fact.split()) <= known})
        varying = sorted(((f, n) for f, n in counts.items() if n < len(mine)), key=lambda item: (-item[1], item[0]))
        found.append(GroupFacts(group, len(mine), shared, tuple(varying[:_SHOWN])))
    return found


def _load_parser(noun_chunks: bool | None, most: int) -> Any | None:
    if noun_chunks is False or (noun_chunks is None and most > 5000):
        return None
    from hf_captionrl.text.spacy_models import load_spacy

    try:
        return load_spacy(exclude=["ner"])
    except ModuleNotFoundError:
        if noun_chunks:
            raise
        return None


def _noun_chunks(captions: Sequence[str], parser: Any) -> list[list[tuple[str, str]]]:
    """Text of each noun chunk of each caption, and its words without determiners and pronouns."""
    return [
        [
            (chunk.text, " ".join(token.text for token in chunk if token.pos_ not in ("DET", "PRON")))
            for chunk in document.noun_chunks
        ]
        for document in parser.pipe([text.casefold() for text in captions])
    ]


def _facts(captions: Sequence[str], chunks: Sequence[Sequence[tuple[str, str]]] | None) -> list[set[str]]:
    """Content words of each caption, or its noun phrases without determiners."""
    if chunks is None:
        return [{word for word in _words(text) if is_content(word)} for text in captions]
    return [{words for _, words in mine if words} for mine in chunks]
