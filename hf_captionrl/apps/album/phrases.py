"""The wording of captions: constraints, phrases that a group shares and how they are removed.

Legend: S candidates of all images, N texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from hf_captionrl.apps.album.options import AlbumSettings
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.text.tokenize import word_characters, word_pattern

# --- Words of a caption with their positions, and the English function words -----------------------------------------

DETERMINERS = frozenset("a an the this that these those its my your our his her their some one".split())
"""Words that need a noun."""
JOINTS = frozenset(
    "and or of is are was were has have with in on at to by from near for while as that which who above below behind beside "
    "between over under into onto against through inside among".split()
)
"""Words that join what follows them to what precedes them."""
FUNCTION_WORDS = DETERMINERS | JOINTS | frozenset("be there it there's it's being up down very".split())
"""English words without content."""


class Word(NamedTuple):
    """A word or a punctuation mark of a caption."""

    start: int
    end: int  # the character after its last one
    folded: str  # the word without case


@cache
def _pattern() -> re.Pattern[str]:
    """Times and numbers, words with hyphens and apostrophes, single punctuation marks."""
    letter = rf"[{word_characters()}]"
    return re.compile(rf"\d+(?:[.,:/]\d+)+{letter}*|{letter}+(?:['’-]{letter}+)*|[^\w\s]")


def caption_words(text: str) -> list[Word]:
    """The words and punctuation marks of a text; a run of letters without spaces is one word in every script."""
    return [Word(*found.span(), found[0].casefold()) for found in _pattern().finditer(text)]


def is_content(word: str) -> bool:
    """Whether a word is neither punctuation nor an English function word."""
    return word[0].isalnum() and word not in FUNCTION_WORDS


def is_english(words: Sequence[Word]) -> bool:
    """Whether English grammar may be applied to a caption; False in doubt."""
    folded = {word.folded for word in words}
    return all(word.isascii() for word in folded) or bool(folded & {"the", "of", "with", "and"})


# --- Constraints: length, words, repetitions ---------------------------------------------------------------------------


def shortened(candidates: Sequence[str], options: AlbumSettings) -> list[str]:
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


def check_candidates(texts: Sequence[str], options: AlbumSettings) -> np.ndarray:
    """Mask of the candidates that may be chosen, `(S,)`: not degenerate, more than the trigger, and accepted by [`meets_constraints`]."""
    has_words = _mask(text.replace(options.trigger or "", "", 1).strip() for text in texts)
    return meets_constraints(texts, options) & has_words & ~_mask(degenerate(texts))


def meets_constraints(texts: Sequence[str], options: AlbumSettings) -> np.ndarray:
    """Mask of the texts that are short enough and mention no word that they must not, `(S,)`."""
    longest = options.max_characters
    good = _mask(longest is None or len(text) <= longest for text in texts)
    for word in options.do_not_mention:
        good &= ~_mask(map(word_pattern(word).search, texts))
    return good


def _mask(values: Iterable[Any]) -> np.ndarray:
    return np.fromiter(map(bool, values), dtype=bool)


# --- What the captions of a group share ------------------------------------------------------------------------------

_LONGEST = 8  # words of a phrase
_MIN_IMAGES = 3  # what two captions share is hardly a property of the set


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


def shared_phrases(captions: Sequence[str], min_share: float = 0.9) -> tuple[str, ...]:
    """Longest phrases of content words in at least a share of three or more captions."""
    if len(captions) < _MIN_IMAGES:
        return ()
    needed = min_share * len(captions)
    # A shared phrase has shared words. All phrases of 100,000 captions would take gigabytes.
    words = Counter(word for text in captions for word in set(_words(text)))
    frequent = {word for word, count in words.items() if count >= needed}
    counts: Counter[tuple[str, ...]] = Counter()
    for text in captions:
        counts.update(_phrases(_words(text), frequent))
    longest: list[tuple[str, ...]] = []
    for phrase in sorted((p for p, count in counts.items() if count >= needed), key=lambda p: (-len(p), p)):
        # With a determiner and without one, a phrase is the same.
        if not any(other[at : at + len(phrase)] == phrase for other in longest for at in range(len(other))):
            longest.append(phrase)
    return tuple(" ".join(phrase) for phrase in longest)


def shared_of_groups(captions: Sequence[str], groups: Sequence[str], min_share: float) -> dict[str, tuple[str, ...]]:
    """Phrases that the captions of each group share; blank ones are left out."""
    members: dict[str, list[str]] = {}
    for caption, group in zip(captions, groups, strict=True):
        if caption.strip():
            members.setdefault(group, []).append(caption)
    return {group: shared_phrases(texts, min_share) for group, texts in members.items()}


# --- Removes shared phrases from captions, or puts a trigger in their place ------------------------------------------
# Only the characters of the phrases and of what they leave without meaning are removed: spaces and punctuation around them
# and, in English captions, the articles and joining words before them. All other characters stay as they are.

_SEPARATORS = ",;:、，；：،؛"
_STOPS = ".!?…。．！？।"
# At the start of a caption these join it to something that was removed; "on the grass" stands for itself.
_NEVER_FIRST = frozenset("and or of is are was were has have that which who while as".split())
_NEVER_LAST = FUNCTION_WORDS - {"up", "down"}  # "looking up" is complete
_TRIGGER = "CaptionrlTrigger"  # a noun in place of the trigger, in which no phrase is found
_VERBS = frozenset(
    "sits stands lies lays runs walks plays looks sleeps rests holds wears rides jumps eats carries leans poses swims flies "
    "watches waits chases catches drinks hangs faces stares sniffs sat stood ran lay".split()
)


def drop_shared(caption: str, phrases: Sequence[str], *, trigger: str | None = None) -> str:
    """The caption without shared phrases, or with a trigger in place of the first of them.

    A phrase is removed whole or not at all: in English it stays after an adjective and before a noun that it belongs to. It is
    removed with its article and the joining words before it. A caption that is nothing but shared phrases becomes the trigger;
    without a trigger it stays as it is. A trigger that the caption contains is not added again.

    Example:
        >>> drop_shared("a photo of a dog on a red sofa", ["a photo", "dog"], trigger="ohwx dog")
        'ohwx dog on a red sofa'
        >>> drop_shared("a photo of a small dog on a red sofa", ["a photo", "dog"])
        'a small dog on a red sofa'
    """
    if trigger and trigger in caption:
        return drop_shared(caption.replace(trigger, _TRIGGER), phrases).replace(_TRIGGER, trigger)
    words = caption_words(caption)
    lower, english = [word.folded for word in words], is_english(words)
    runs = [run for run in _runs(_matches(lower, phrases)) if not english or _is_whole(lower, *run)]
    if trigger is None:
        return _without(caption, words, runs, english) or caption
    if not runs:
        return ", ".join(filter(None, [trigger, caption.strip()]))
    # The trigger replaces the first part, with its article and the parts that only joining words separate from it.
    (start, end), *others = runs
    start -= english and start > 0 and lower[start - 1] in DETERMINERS
    for other, last in others if english else ():
        if not all(word in JOINTS | DETERMINERS for word in lower[end + 1 : other]):
            break
        end = last
    is_of = english and end + 1 < len(lower) and lower[end + 1] == "of"
    text = caption[: words[start].start] + _TRIGGER + "," * is_of + caption[words[end + is_of].end :]
    return drop_shared(text, phrases).replace(_TRIGGER, trigger)


def without_loose_end(text: str) -> str:
    """A truncated text without punctuation and, in English, without joining words and articles at its end."""
    words = caption_words(text)
    if is_english(words):
        while words and (words[-1].folded in _NEVER_LAST or words[-1].folded in _SEPARATORS):
            words.pop()
        text = text[: words[-1].end] if words else ""
    return text.strip(_SEPARATORS + " ")


@lru_cache(4096)
def _folded(phrase: str) -> tuple[str, ...]:
    return tuple(word.folded for word in caption_words(phrase))


def _matches(lower: Sequence[str], phrases: Sequence[str]) -> list[bool]:
    """Which words belong to one of the phrases; longer phrases first."""
    matches = [False] * len(lower)
    for phrase in sorted(filter(None, map(_folded, phrases)), key=len, reverse=True):
        for at in range(len(lower) - len(phrase) + 1):
            end = at + len(phrase)
            if tuple(lower[at:end]) == phrase and not any(matches[at:end]):
                matches[at:end] = [True] * len(phrase)
    return matches


def _runs(gone: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last word of each part."""
    for out, part in groupby(range(len(gone)), key=gone.__getitem__):
        if out:
            rows = list(part)
            yield rows[0], rows[-1]


def _is_verb(lower: Sequence[str], at: int) -> bool:
    word = lower[at]
    if word in _VERBS or (len(word) > 5 and word.endswith("ing")):
        return True
    # "a dog covered in snow", but not "a spotted dog"
    return len(word) > 4 and word.endswith("ed") and not (at + 1 < len(lower) and is_content(lower[at + 1]))


def _is_whole(lower: Sequence[str], start: int, end: int) -> bool:
    """Whether a part is a whole noun phrase: no adjective stands before it, and no noun that it belongs to after it."""
    if end + 1 < len(lower) and is_content(lower[end + 1]) and not _is_verb(lower, end + 1):
        return False  # "dog" in "a dog house"
    if start == 0 or lower[start] in DETERMINERS:
        return True
    before = start - 1
    # "a man walking dogs", but not "a sleeping dog"
    is_clause = _is_verb(lower, before) and (before == 0 or lower[before - 1] not in DETERMINERS)
    return is_clause or not (is_content(lower[before]) or lower[before] == "very")


def _without(caption: str, words: Sequence[Word], runs: Sequence[tuple[int, int]], english: bool) -> str:
    """The caption without some parts; empty if only punctuation remains."""
    gone = [any(start <= at <= end for start, end in runs) for at in range(len(words))]
    for start, _ in runs if english else ():
        while start > 0 and words[start - 1].folded in FUNCTION_WORDS:
            start -= 1
            gone[start] = True
    at = 0
    while english and gone and gone[0] and at < len(words) and (gone[at] or words[at].folded in _NEVER_FIRST):
        gone[at] = True
        at += 1
    text = caption
    for start, end in reversed(list(_runs(gone))):
        text = _closed(text[: words[start].start], text[words[end].end :])
    return text.strip() if any(letter.isalnum() for letter in text) else ""


def _closed(left: str, right: str) -> str:
    """Join the text before and after a removed part with one space, without doubled punctuation."""
    before, after = left.rstrip(), right.lstrip()
    space = " " if len(before) < len(left) or len(after) < len(right) else ""
    if not before.strip(_SEPARATORS + _STOPS + " "):
        return after.lstrip(_SEPARATORS + _STOPS + " ")
    if not after or after[0] in _SEPARATORS + _STOPS:
        before = before.rstrip(_SEPARATORS + " ")
        return before + (after[1:] if before[-1] in _STOPS else after)
    return before + space + after
