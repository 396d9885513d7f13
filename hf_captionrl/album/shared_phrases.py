"""What the captions of a group share and what varies; removing the shared part, or putting a trigger in its place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GroupFacts", "drop_shared", "group_facts", "repair", "shared_phrases"]

_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_LONGEST = 8  # words of a phrase
_MIN_IMAGES = 3  # what two captions share is hardly a property of the set
_SHOWN = 30  # varying facts of a group

_DETERMINERS = frozenset("a an the this that these those its his her their some one".split())
_JOINTS = frozenset(
    "and or of is are was were has have with in on at to by from near for while as that which who".split()
)
_FUNCTION_WORDS = (
    _DETERMINERS | _JOINTS | frozenset("be there it there's it's being over under into up down very".split())
)
# At the start of a text these join it to something that was removed; "on the grass" stands for itself.
_NEVER_FIRST = frozenset("and or of is are was were has have that which who while as".split())


@dataclass(frozen=True)
class GroupFacts:
    """What the captions of a group of images say.

    Args:
        group: Name of the group; empty if the whole album is one.
        num_images: Number of its images.
        shared: Phrases that (nearly) all captions contain, longest first.
        varying: Words or noun phrases of some captions, with the number of captions, most frequent first.
    """

    group: str
    num_images: int
    shared: tuple[str, ...]
    varying: tuple[tuple[str, int], ...]


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _is_content(word: str) -> bool:
    return word[0].isalnum() and word not in _FUNCTION_WORDS


def _phrases(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Phrases without punctuation that begin and end with content words, except for a determiner at the start."""
    found = set()
    for start, first in enumerate(words):
        if not (_is_content(first) or first in _DETERMINERS):
            continue
        for end in range(start + 1, min(start + _LONGEST, len(words)) + 1):
            last = words[end - 1]
            if not (last[0].isalnum()):
                break
            if _is_content(last):
                found.add(tuple(words[start:end]))
    return found


def shared_phrases(captions: Sequence[str], *, min_share: float = 0.9) -> tuple[str, ...]:
    """Longest phrases of content words that at least a share of the captions contain.

    Captions are compared in lower case. Fewer than three captions share nothing.
    """
    if not 0 < min_share <= 1:
        raise ValueError(f"min_share is {min_share}. Use a share in (0, 1].")
    if len(captions) < _MIN_IMAGES:
        return ()
    counts = Counter(phrase for text in captions for phrase in _phrases(_words(text.casefold())))
    needed = min_share * len(captions)
    found = sorted((p for p, count in counts.items() if count >= needed), key=lambda p: (-len(p), p))
    longest: list[tuple[str, ...]] = []
    for phrase in found:
        # With a determiner and without one, a phrase is the same.
        if not any(_contains(other, phrase) for other in longest):
            longest.append(phrase)
    return tuple(" ".join(phrase) for phrase in longest)


def _contains(words: Sequence[str], phrase: Sequence[str]) -> bool:
    return any(tuple(words[at : at + len(phrase)]) == tuple(phrase) for at in range(len(words) - len(phrase) + 1))


def group_facts(
    captions: Sequence[str], groups: Sequence[str], *, min_share: float = 0.9, noun_chunks: bool | None = None
) -> list[GroupFacts]:
    """Shared and varying phrases of each group, in the order of the groups' first captions.

    Args:
        groups: Name of the group of each caption.
        noun_chunks: Whether varying facts are spaCy's noun phrases instead of words. None: if spaCy is installed and no
            group has more than 5,000 captions.
    """
    members: dict[str, list[str]] = {}
    for caption, group in zip(captions, groups, strict=True):
        members.setdefault(group, []).append(caption)
    parser = _load_parser(noun_chunks, max(map(len, members.values()), default=0))
    found = []
    for group, mine in members.items():
        shared = shared_phrases(mine, min_share=min_share)
        known = {word for phrase in shared for word in phrase.split()}
        counts: Counter[str] = Counter()
        for facts in _facts(mine, parser):
            counts.update({fact for fact in facts if not set(fact.split()) <= known})
        varying = sorted(((f, n) for f, n in counts.items() if n < len(mine)), key=lambda item: (-item[1], item[0]))
        found.append(GroupFacts(group, len(mine), shared, tuple(varying[:_SHOWN])))
    return found


def _load_parser(noun_chunks: bool | None, most: int) -> object | None:
    if noun_chunks is False or (noun_chunks is None and most > 5000):
        return None
    from hf_captionrl.text.spacy_models import load_spacy

    try:
        return load_spacy(exclude=["ner"])  # type: ignore[no-any-return]
    except ModuleNotFoundError:
        if noun_chunks:
            raise
        return None


def _facts(captions: Sequence[str], parser: object | None) -> list[set[str]]:
    """Content words of each caption, or its noun phrases without determiners."""
    if parser is None:
        return [{word for word in _words(text.casefold()) if _is_content(word)} for text in captions]
    found = []
    for document in parser.pipe([text.casefold() for text in captions]):  # type: ignore[attr-defined]
        chunks = (
            [token.text for token in chunk if token.pos_ not in ("DET", "PRON")] for chunk in document.noun_chunks
        )
        found.append({" ".join(words) for words in chunks if words})
    return found


def drop_shared(caption: str, phrases: Sequence[str], *, trigger: str | None = None) -> str:
    """The caption without shared phrases, or with a trigger in place of the first of them.

    What remains is repaired: no article without a noun, no joining word at an end, no doubled comma, "a" or "an" as the next
    word needs it. A caption that is nothing but shared phrases becomes the trigger; without a trigger it stays as it is.

    Example:
        >>> drop_shared("a photo of a small dog on a red sofa", ["a photo", "dog"], trigger="ohwx dog")
        'ohwx dog, small on a red sofa'
    """
    words = _words(caption)
    lower = [word.casefold() for word in words]
    gone = [False] * len(words)
    for phrase in sorted((p.split() for p in phrases), key=len, reverse=True):
        for at in range(len(words) - len(phrase) + 1):
            if lower[at : at + len(phrase)] == phrase and not any(gone[at : at + len(phrase)]):
                gone[at : at + len(phrase)] = [True] * len(phrase)
    _drop_stranded(lower, gone)
    rest = repair(" ".join(_rejoined([w for w, out in zip(words, gone, strict=True) if not out], caption)))
    if trigger is None:
        return rest or caption
    if not rest:
        return trigger
    first = next((at for at, out in enumerate(gone) if out), None)
    follows = first is not None and not any(
        not out and lower[at] not in _DETERMINERS for at, out in enumerate(gone[:first])
    )
    joined = follows and rest.split()[0].casefold() in _JOINTS
    return f"{trigger} {rest}" if joined else f"{trigger}, {rest}"


def _drop_stranded(lower: Sequence[str], gone: list[bool]) -> None:
    """Remove determiners that have lost their noun, and joining words that have lost what follows them."""
    for at, out in enumerate(list(gone)):
        if not out or (at + 1 < len(gone) and (gone[at + 1] or _is_content(lower[at + 1]))):
            continue
        # A removed phrase ends here: look back, over adjectives, to the determiner of its noun phrase.
        back = at
        while back >= 0 and gone[back]:
            back -= 1
        noun = back
        while back >= 0 and not gone[back] and (_is_content(lower[back]) or lower[back] == "and"):
            back -= 1
        if back >= 0 and lower[back] in _DETERMINERS:
            gone[back] = True
            noun = back - 1 if back == noun else noun
        if noun >= 0 and lower[noun] in _JOINTS:
            gone[noun] = True


def _rejoined(words: Sequence[str], caption: str) -> list[str]:
    """Words with punctuation put back after the word before it."""
    found: list[str] = []
    for word in words:
        if found and not word[0].isalnum() and word in ",.;:!?)%’'":
            found[-1] += word
        else:
            found.append(word)
    return found


def repair(text: str) -> str:
    """Remove what joins a text to parts that were removed: at its ends, doubled, or with the wrong article."""
    words = text.split()
    while words and (words[0].strip(",.;:").casefold() in _NEVER_FIRST or not words[0].strip(",.;:")):
        words.pop(0)
    while words and (words[-1].strip(",.;:").casefold() in _FUNCTION_WORDS or not words[-1].strip(",.;:")):
        words.pop()
    kept: list[str] = []
    for word in words:
        if kept and word.casefold() == kept[-1].casefold() and word.casefold() in _FUNCTION_WORDS:
            continue
        if kept and word in ("a", "an") and kept[-1] in ("a", "an", "the"):
            continue
        kept.append(word)
    for at, word in enumerate(kept[:-1]):
        if word.casefold() in ("a", "an"):
            right = "an" if kept[at + 1][0].casefold() in "aeiou" else "a"
            kept[at] = right.capitalize() if word[0].isupper() else right
    return re.sub(r"([,;:])(?:\s*[,;:])+", r"\1", " ".join(kept)).strip(" ,;:")
