"""Checks of the texts that caption metrics take: users pass strings, lists and columns of any kind, often one level too flat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


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
