"""Checks of the texts that caption metrics take: users pass strings, lists and columns of any kind, often one level too flat."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hf_captionrl.text.tokenize import ptb_tokenize, split_characters


def as_sequence(texts: Any, name: str, form: str = "a list of lists of captions, one list per image") -> Sequence[Any]:
    """At least one text, as a list unless they are a sequence, whose items may be made when they are read."""
    if isinstance(texts, str | bytes | dict) or not isinstance(texts, Iterable):
        raise ValueError(f"{name} is {texts!r:.80} ({type(texts).__name__}). Pass {form}.")
    rows = texts if isinstance(texts, Sequence) else list(texts)
    if not len(rows):
        raise ValueError(f"{name} is empty. Use at least one.")
    return rows


def check_captions(captions: Any, name: str = "captions") -> list[str]:
    """A list of captions that are not blank."""
    texts = list(as_sequence(captions, name, "a list of captions"))
    for i, caption in enumerate(texts):
        if not isinstance(caption, str):
            raise ValueError(f"{name}[{i}] must be a string, got {type(caption).__name__} {caption!r}.")
        if not caption.strip():
            raise ValueError(f"{name}[{i}] is empty. Leave it out, or replace it by a word that counts as wrong.")
    return texts


def checked_groups(groups: Any, name: str, minimum: int = 1) -> Iterator[list[str]]:
    """The captions of each image, checked when they are read."""
    for i, captions in enumerate(as_sequence(groups, name)):
        texts = check_captions(captions, f"{name}[{i}]")
        if len(texts) < minimum:
            raise ValueError(f"{name}[{i}] has {len(texts)} caption(s). Pass at least {minimum}.")
        yield texts


def check_groups(groups: Any, name: str, number: int | None = None) -> list[list[str]]:
    """A list of captions per image; of `number` images, if it is given."""
    lists = list(checked_groups(groups, name))
    if number not in (None, len(lists)):
        raise ValueError(f"{number} captions and {len(lists)} lists of {name}. Pass one list per caption.")
    return lists


def checked_pairs(candidates: Any, references: Any) -> tuple[Iterable[list[str]], Iterable[list[str]]]:
    """Candidates and references of the same images, checked when they are read."""
    ours = as_sequence(candidates, "candidates", "a list with one caption per image")
    theirs = as_sequence(references, "references")
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} candidates, {len(theirs)} lists of references. Pass one list per candidate.")
    if any(isinstance(caption, str) for caption in ours):
        ours = [[caption] for caption in check_captions(ours, "candidates")]
    return checked_groups(ours, "candidates"), checked_groups(theirs, "references")


EMPTY_CAPTION = "."
"""Replaces an empty caption: scorers can read it, and it has no n-grams."""


def spoken(captions: Sequence[str]) -> list[str]:
    """Captions that every metric accepts: empty ones are replaced by `EMPTY_CAPTION`."""
    return [caption if caption.strip() else EMPTY_CAPTION for caption in captions]


# --- Texts that were probably not meant to be measured ---------------------------------------------------------------

_Rule = Callable[[Sequence[str], Sequence[Sequence[str]]], list[str]]
"""Of N captions and their references, the suspicious texts, at most one per caption."""


def _search(pattern: str) -> _Rule:
    return lambda captions, _: [caption for caption in captions if re.search(pattern, caption, re.IGNORECASE)]


def _printed_lists(_: Sequence[str], references: Sequence[Sequence[str]]) -> list[str]:
    pattern = re.compile(r"""\s*\[\s*["'].*["']\s*,?\s*\]\s*""", re.DOTALL)
    return [text for group in references for text in list(filter(pattern.fullmatch, group))[:1]]


def _shared_words(captions: Sequence[str], _: Sequence[Sequence[str]]) -> list[str]:
    words = [tuple(split_characters(caption).split()) for caption in captions]
    ends = [end for (end, *others) in ({each[:3] for each in words}, {each[-3:] for each in words}) if not others]
    return [" ".join(end) for end in ends[:1] if len(end) == 3] * len(captions)


def _longest(captions: Sequence[str], _: Sequence[Sequence[str]]) -> list[str]:
    """Captions with the largest number of words, at least 10, that end without a full stop."""
    lengths = [len(split_characters(caption).split()) for caption in captions]
    most = max(10, *lengths)
    return [c for c, n in zip(captions, lengths, strict=True) if n == most and c.rstrip()[-1] not in ".!?。"]


@functools.lru_cache(maxsize=1)  # the rows of a table share their references
def _usual_words(texts: frozenset[str]) -> frozenset[str]:
    counts = Counter(word for text in texts for word in set(ptb_tokenize(split_characters(text))))
    return frozenset(word for word, count in counts.items() if 1000 * count > len(texts))


def _foreign(captions: Sequence[str], references: Sequence[Sequence[str]]) -> list[str]:
    """Captions of which at most a third of the words are usual, in more than a thousandth of the references."""
    usual = _usual_words(frozenset(text for group in references for text in group))
    words = ((caption, ptb_tokenize(split_characters(caption))) for caption in (captions if any(references) else ()))
    return [caption for caption, each in words if each and 3 * sum(word in usual for word in each) <= len(each)]


_CHAT = (
    r"^\W*(?:(?:sure|certainly|of course|absolutely|okay)[!,.:]|(?:caption|description|answer|assistant)\W*:"
    r"|here(?: is|'s| are)\b.{0,60}\b(?:captions?|descriptions?)\b[^.]{0,40}:|i'm sorry\b|as an ai\b)"
)
# fmt: off
TEXT_WARNINGS: tuple[tuple[str, _Rule, float, str], ...] = (
    ("lists", _printed_lists, 0, "references are lists printed as text: {}. Use a list of captions."),
    ("chat", _search(_CHAT), 0, "captions begin as the answer of a chat model: {}. Keep the caption alone."),
    ("think", _search("</?think"), 0, "captions hold a block <think>: {}. Remove it."),
    ("letters", _search(r"\A(?=.*\S)[\W\d_]*\Z"), 0, "captions have no letter: {}. Check the column."),
    ("prompt", _shared_words, 0.99, "captions all begin or end with the same words: {}. Remove a prompt."),
    ("equal", lambda captions, references: [c for c, group in zip(captions, references, strict=True) if c in group], 0.8,
     "captions are references: {}. Leave them out of the references."),
    ("truncated", _search(r"\b(?:an?|the|of|and|with|is|are)\s*\Z"), 0.1,
     "captions end in the middle of a sentence: {}. Raise the length limit."),
    ("limit", _longest, 0.5, "captions have the same largest number of words: {}. Raise the length limit."),
    ("language", _foreign, 0.8, "captions have hardly a word of the references: {}. Use the same language."),
)
# fmt: on
"""Name, rule, share of the captions above which it warns, which needs 10 captions unless it is 0, and sentence."""


def text_warnings(captions: Sequence[str | Sequence[str]], references: Sequence[Any] | None = None) -> list[str]:
    """What is suspicious in N captions, or lists of them, and their references: sentences with a count and the first example."""
    groups = [[group] if isinstance(group, str) else group for group in captions]
    pairs = [(c, g) for group, g in zip(groups, references or [()] * len(groups), strict=True) for c in group]
    sentences = []
    for _, rule, share, sentence in TEXT_WARNINGS if pairs else ():
        texts = rule([c for c, _ in pairs], [g for _, g in pairs])
        if len(texts) > share * len(pairs) and (not share or len(pairs) >= 10):
            sentences.append(sentence.format(f"{len(texts)} of {len(pairs)}, such as {texts[0][:60]!r}"))
    return sentences
