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
from hf_captionrl.text.tokenize import indefinite_article, word_characters, word_pattern

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

_SENTENCE = DETERMINERS | frozenset("and is are was were has have there".split())  # no tag contains them


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


def split_tags(text: str) -> list[str]:
    """The tags of a list such as "1girl, red hair, looking at viewer"; empty for a sentence."""
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    are_short = all(len(words := tag.casefold().split()) <= 4 and _SENTENCE.isdisjoint(words) for tag in tags)
    return tags if len(tags) > 2 and are_short else []


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
    """Longest phrases of content words, or tags, in at least a share of three or more captions."""
    if len(captions) < _MIN_IMAGES:
        return ()
    needed = min_share * len(captions)
    # A shared phrase has shared words. All phrases of 100,000 captions would take gigabytes.
    words = Counter(word for text in captions for word in set(_words(text)))
    frequent = {word for word, count in words.items() if count >= needed}
    counts: Counter[tuple[str, ...]] = Counter()
    for text in captions:
        tags = [tag for tag in map(_folded, split_tags(text)) if frequent.issuperset(tag)]
        counts.update(set(tags) if split_tags(text) else _phrases(_words(text), frequent))
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
# and, in English captions, their articles and joining words. All other characters stay as they are.

_SEPARATORS = ",;:、，；：،؛"
_STOPS = ".!?…。．！？।"
# At the start of a caption these join it to something that was removed; "on the grass" stands for itself.
_NEVER_FIRST = frozenset("and or of is are was were has have that which who while as".split())
_NUMBERS = frozenset("two three four five six seven eight nine ten several many".split())
_EXPLETIVES = frozenset("there there's it it's".split())
_NEVER_LAST = FUNCTION_WORDS - {"up", "down"}  # "looking up" is complete
_TRIGGER = "CaptionrlTrigger"  # a noun in place of the trigger, in which no phrase is found
_VERBS = frozenset(
    "sits stands lies lays runs walks plays looks sleeps rests holds wears rides jumps eats carries leans poses swims flies "
    "watches waits plays chases catches drinks hangs faces stares sniffs sat stood ran lay".split()
)
_NOT_VERBS = frozenset(
    "string spring building ceiling painting clothing railing awning wedding crossing bedding evening morning frosting".split()
)


def drop_shared(caption: str, phrases: Sequence[str], *, trigger: str | None = None) -> str:
    """The caption without shared phrases, or with a trigger in place of the first of them.

    A phrase is removed whole or not at all: in English, a noun stays if an adjective would be left without it. What remains is
    repaired only where something was removed: no article without a noun, no joining word at an end, no doubled comma, "a" or
    "an" as the next word needs it. A caption that is nothing but shared phrases becomes the trigger; without a trigger it stays
    as it is. Of tags separated by commas, whole tags are removed, and the trigger is the first tag. A trigger that the caption
    contains is not added again.

    Example:
        >>> drop_shared("a photo of a dog on a red sofa", ["a photo", "dog"], trigger="ohwx dog")
        'ohwx dog on a red sofa'
        >>> drop_shared("a photo of a small dog on a red sofa", ["a photo", "dog"])
        'a small dog on a red sofa'
    """
    if trigger and trigger in caption:
        return drop_shared(caption.replace(trigger, _TRIGGER), phrases).replace(_TRIGGER, trigger)
    if tags := split_tags(caption):
        shared = set(map(_folded, phrases))
        kept = [tag for tag in tags if _folded(tag) not in shared]
        rest = caption if kept == tags else ", ".join(kept)
        return (rest or caption) if trigger is None else ", ".join(filter(None, [trigger, rest]))
    words = caption_words(caption)
    gone = _found(words, phrases)
    if trigger is not None:
        if (place := _place(words, list(gone))) is None:
            rest = drop_shared(caption, phrases).strip() if caption.strip() else ""
            return ", ".join(filter(None, [trigger, rest]))
        start, end, joint = place
        text = caption[: words[start].start] + _TRIGGER + joint + caption[words[end].end :]
        return drop_shared(text, phrases).replace(_TRIGGER, trigger)
    article: dict[int, str] = {}
    if is_english(words):
        _keep_parts(words, gone)
        _drop_stranded(words, gone)
        _drop_at_ends(words, gone)
        article = _articles_at_seams(words, gone)
    return _without(caption, words, gone, article) or caption


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


def _found(words: Sequence[Word], phrases: Sequence[str]) -> list[bool]:
    """Which words belong to one of the phrases; longer phrases first."""
    lower = tuple(word.folded for word in words)
    gone = [False] * len(words)
    for phrase in sorted(filter(None, map(_folded, phrases)), key=len, reverse=True):
        for at in range(len(words) - len(phrase) + 1):
            end = at + len(phrase)
            if lower[at:end] == phrase and not any(gone[at:end]):
                gone[at:end] = [True] * len(phrase)
    return gone


def _runs(gone: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last word of each removed part."""
    for out, part in groupby(range(len(gone)), key=gone.__getitem__):
        if out:
            rows = list(part)
            yield rows[0], rows[-1]


def _is_verb(lower: Sequence[str], at: int) -> bool:
    word = lower[at]
    if word in _VERBS or (len(word) > 5 and word.endswith("ing") and word not in _NOT_VERBS):
        return True
    # "a dog covered in snow", but not "a spotted dog"
    return len(word) > 4 and word.endswith("ed") and not (at + 1 < len(lower) and is_content(lower[at + 1]))


def _is_modified(lower: Sequence[str], start: int, end: int) -> bool:
    """Whether a removed part would leave an adjective before it without its noun."""
    if start == 0 or lower[start] in DETERMINERS:
        return False
    before = start - 1
    if end > start and lower[before] in ("and", "or", ",") and before > 0 and is_content(lower[before - 1]):
        return before == 1 or lower[before - 2] in DETERMINERS | _NUMBERS  # "a brown and" of "a brown and white dog"
    if _precedes_noun(lower, end):
        return False
    # "a sleeping dog", but not "a man walking dogs"
    is_clause = _is_verb(lower, before) and (before == 0 or lower[before - 1] not in DETERMINERS)
    return (is_content(lower[before]) or lower[before] == "very") and not is_clause


def _precedes_noun(lower: Sequence[str], end: int) -> bool:
    """Whether a removed part belongs to a noun after it, as "dog" in "a dog house"."""
    return end + 1 < len(lower) and is_content(lower[end + 1]) and not _is_verb(lower, end + 1)


def _keep_parts(words: Sequence[Word], gone: list[bool]) -> None:
    """Keep nouns whose adjectives would be left, before them or after "is"."""
    lower = [word.folded for word in words]
    for start, end in list(_runs(gone)):
        is_subject = end + 1 < len(lower) and lower[end + 1] in ("is", "are", "was", "were")
        if _is_modified(lower, start, end) or (is_subject and _precedes_noun(lower, end + 1)):
            gone[start : end + 1] = [False] * (end + 1 - start)


def _place(words: Sequence[Word], gone: list[bool]) -> tuple[int, int, str] | None:
    """First and last word of the part that a trigger replaces, and the punctuation after it; None if there is no such part."""
    # The first removed part that no noun follows, with its article and with the parts that only joining words separate from it.
    lower, english = [word.folded for word in words], is_english(words)
    runs = list(_runs(gone))
    if english:
        runs = [r for r in runs if not _is_modified(lower, *r) and not _precedes_noun(lower, r[1])]
    if not runs:
        return None
    (start, end), *others = runs
    if not english:
        return start, end, ""
    start -= start > 0 and lower[start - 1] in DETERMINERS
    for other, last in others:
        if not all(word in JOINTS | DETERMINERS for word in lower[end + 1 : other]):
            break
        end = last
    is_of = end + 1 < len(lower) and lower[end + 1] == "of"
    return start, end + is_of, "," * is_of


def _drop_stranded(words: Sequence[Word], gone: list[bool]) -> None:
    """Remove determiners that have lost their noun, and joining words that have lost what follows them."""
    lower = [word.folded for word in words]
    for start, end in list(_runs(gone)):
        if _precedes_noun(lower, end):
            continue  # a determiner before the phrase belongs to this noun now
        joint = start - 1
        if joint >= 0 and lower[start] not in DETERMINERS and lower[joint] in DETERMINERS:
            gone[joint] = True
            joint -= 1
        while joint >= 0 and not gone[joint] and lower[joint] in JOINTS:
            gone[joint] = True
            joint -= 1


def _drop_at_ends(words: Sequence[Word], gone: list[bool]) -> None:
    """Remove joining words between a removed part and an end of the caption, and "there is" before one."""
    start = gone.index(True) if True in gone else 0
    if all(word.folded in _EXPLETIVES for word in words[:start]):
        gone[:start] = [True] * start
    for order, never in ((range(len(words)), _NEVER_FIRST), (range(len(words) - 1, -1, -1), _NEVER_LAST)):
        is_seam = False
        for at in order:
            is_seam |= gone[at]
            if gone[at] or not words[at].folded[0].isalnum():
                continue
            if not is_seam or words[at].folded not in never:
                break
            gone[at] = True


def _articles_at_seams(words: Sequence[Word], gone: list[bool]) -> dict[int, str]:
    """Correct articles before removed parts, by word; function words that would be repeated there are removed."""
    found = {}
    for start, end in list(_runs(gone)):
        before, after = start - 1, end + 1
        if before < 0 or after == len(words) or not words[after].folded[0].isalnum():
            continue
        left, right = words[before].folded, words[after].folded
        if (left in DETERMINERS and right in DETERMINERS) or (left == right and left in FUNCTION_WORDS):
            gone[before] = True
        elif left in ("a", "an"):
            found[before] = indefinite_article(right)
    return found


def _without(caption: str, words: Sequence[Word], gone: Sequence[bool], article: dict[int, str]) -> str:
    """The caption without the removed words; empty if only punctuation remains."""
    text = caption
    edits = [(words[a].start, words[b].end, "") for a, b in _runs(gone)]
    edits += [(words[at].start, words[at].end, new) for at, new in article.items()]
    for start, end, new in sorted(edits, reverse=True):
        left, old, right = text[:start], text[start:end], text[end:]
        if new:
            text = left + (new.capitalize() if old[0].isupper() else new) + right
        else:
            text = _closed(left, right)
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
