"""Removes shared phrases from captions, or puts a trigger in their place.

Only the characters of the phrases and of what they leave without meaning are removed: spaces and punctuation around them
and, in English captions, their articles and joining words. All other characters stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from hf_captionrl.album.caption_words import (
    DETERMINERS,
    FUNCTION_WORDS,
    JOINTS,
    Word,
    caption_words,
    is_content,
    is_english,
)
from hf_captionrl.text.articles import indefinite_article

__all__ = ["drop_shared", "without_loose_end"]

_SEPARATORS = ",;:、，；：،؛"
_STOPS = ".!?…。．！？।"
_ENDS = frozenset(_SEPARATORS + _STOPS)
_DASHES = "-–—/"
_CLOSING = _SEPARATORS + _STOPS + ")]}%»”’」』）】"
_OPENING = "([{«“‘「『（【"
_PAIRS = frozenset(["()", "[]", "{}", '""', "''", "«»", "“”", "‘’", "„“", "「」", "『』", "（）", "【】"])

# At the start of a caption these join it to something that was removed; "on the grass" stands for itself.
_NEVER_FIRST = frozenset("and or of is are was were has have that which who while as".split())
_PREDICATES = frozenset("is are was were has have that which who".split())
_EXPLETIVES = frozenset("there there's it it's".split())
_NEVER_LAST = FUNCTION_WORDS - {"up", "down"}  # "looking up" is complete
_SINGULAR = frozenset("a an one this that".split())
_MOST_ADJECTIVES = 2
_VERBS = frozenset(
    "sits stands lies lays runs walks plays looks sleeps rests holds wears rides jumps eats carries leans poses swims flies "
    "watches waits plays chases catches drinks hangs faces stares sniffs sat stood ran lay".split()
)
_NOT_VERBS = frozenset(
    "string spring building ceiling painting clothing railing awning wedding crossing bedding evening morning frosting".split()
)


def drop_shared(caption: str, phrases: Sequence[str], *, trigger: str | None = None) -> str:
    """The caption without shared phrases, or with a trigger in place of the first of them.

    A phrase is found as whole words. What remains is repaired only where something was removed: no article without a noun,
    no joining word at an end, no doubled comma, "a" or "an" as the next word needs it. A caption that is nothing but shared
    phrases becomes the trigger; without a trigger it stays as it is.

    Example:
        >>> drop_shared("a photo of a small dog on a red sofa", ["a photo", "dog"], trigger="ohwx dog")
        'ohwx dog, small on a red sofa'
    """
    words = caption_words(caption)
    gone = _found(words, phrases)
    first = gone.index(True) if True in gone else len(words)
    article: dict[int, str] = {}
    if is_english(words):
        _drop_stranded(words, gone)
        _drop_at_ends(words, gone)
        article = _articles_at_seams(words, gone)
    rest = _without(caption, words, gone, article)
    if trigger is None:
        return rest or caption
    if not rest:
        return trigger
    replaces = first < len(words) and not any(
        not out and word.folded not in DETERMINERS for word, out in zip(words[:first], gone, strict=False)
    )
    joined = replaces and caption_words(rest)[0].folded in JOINTS
    return f"{trigger} {rest}" if joined else f"{trigger}, {rest}"


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
    start = None
    for at, out in enumerate([*gone, False]):
        if out and start is None:
            start = at
        elif not out and start is not None:
            yield start, at - 1
            start = None


def _is_verb(lower: Sequence[str], at: int) -> bool:
    word = lower[at]
    if word in _VERBS or (len(word) > 5 and word.endswith("ing") and word not in _NOT_VERBS):
        return True
    # "a dog covered in snow", but not "a spotted dog"
    return len(word) > 4 and word.endswith("ed") and not (at + 1 < len(lower) and is_content(lower[at + 1]))


def _drop_stranded(words: Sequence[Word], gone: list[bool]) -> None:
    """Remove determiners that have lost their noun, and joining words that have lost what follows them."""
    lower = [word.folded for word in words]
    for start, end in list(_runs(gone)):
        if end + 1 < len(lower) and is_content(lower[end + 1]) and not _is_verb(lower, end + 1):
            continue  # a determiner before the phrase belongs to this noun now
        joint = start - 1
        if lower[start] not in DETERMINERS:  # else the phrase was removed with its determiner
            at = _determiner_of(lower, gone, start, end)
            if at is not None:
                gone[at] = True
                joint = at - 1 if at == joint else -1
        while joint >= 0 and not gone[joint] and lower[joint] in JOINTS:
            gone[joint] = True
            joint -= 1


def _determiner_of(lower: Sequence[str], gone: Sequence[bool], start: int, end: int) -> int | None:
    """The determiner of a removed noun, before at most two adjectives."""
    at, adjectives = start - 1, 0
    while at >= 0 and not gone[at] and (is_content(lower[at]) or (lower[at] in ("and", "very") and adjectives)):
        adjectives += lower[at] not in ("and", "very")
        # "a sleeping dog", but not "a man walking dogs"
        is_clause = _is_verb(lower, at) and (at == 0 or lower[at - 1] not in DETERMINERS)
        if adjectives > _MOST_ADJECTIVES or is_clause:
            return None
        at -= 1
    if at < 0 or gone[at] or lower[at] not in DETERMINERS:
        return None
    is_plural = lower[end].endswith("s") and not lower[end].endswith(("ss", "us", "is"))
    return None if is_plural and lower[at] in _SINGULAR else at


def _drop_at_ends(words: Sequence[Word], gone: list[bool]) -> None:
    """Remove joining words between a removed part and an end of the caption, and words that lost their subject."""
    for start, end in list(_runs(gone)):
        at = end + 1
        while start > 0 and words[start - 1].folded in _ENDS and at < len(words) and words[at].folded in _PREDICATES:
            gone[at] = True
            at += 1
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
    """Join the text before and after a removed part with one space, and drop punctuation that would enclose nothing."""
    before, after = left.rstrip(), right.lstrip()
    space = " " if len(before) < len(left) or len(after) < len(right) else ""
    while before and after and before[-1] + after[0] in _PAIRS:
        space = " " if before[:-1] != before[:-1].rstrip() or after[1:] != after[1:].lstrip() else ""
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    if not before.strip(_SEPARATORS + _STOPS + _DASHES + " "):
        return after.lstrip(_SEPARATORS + _STOPS + _DASHES + " ")
    if not after.strip(_CLOSING + " "):
        return before.rstrip(_SEPARATORS + _DASHES + " ") + after.lstrip(_SEPARATORS + " ")
    if before[-1] in _OPENING:
        return before + after.lstrip(_SEPARATORS + " ")
    if before[-1] in _DASHES and after[0] in _DASHES:
        return before + after[1:]
    if after[0] in _CLOSING:
        if after[0] in _STOPS:
            before = before.rstrip(_SEPARATORS + " ")
        doubled = before[-1] in _SEPARATORS + _STOPS and after[0] in _SEPARATORS + _STOPS
        return before + (after[1:] if doubled else after)
    return before + space + after
