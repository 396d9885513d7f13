"""Checks of the texts that caption metrics take: users pass strings, lists and columns of any kind, often one level too flat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def _iterable(texts: Any, name: str, form: str) -> Iterable[Any]:
    if isinstance(texts, (str, bytes)):
        raise ValueError(f"{name} is one string, {texts!r:.80}. Pass {form}.")
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ValueError(f"{name} is {texts!r} ({type(texts).__name__}). Use a list of strings.")
    return texts


def as_sequence(texts: Any, name: str, form: str = "a list of lists of captions, one list per image") -> Sequence[Any]:
    """At least one text, as a list unless they are a sequence, whose items may be made when they are read."""
    given = _iterable(texts, name, form)
    found = given if isinstance(given, Sequence) else list(given)
    if not len(found):
        raise ValueError(f"{name} is empty. Use at least one.")
    return found


def listed_texts(texts: Any, name: str) -> list[Any]:
    """The texts as a list."""
    return list(as_sequence(texts, name))


def check_captions(captions: Any, name: str = "captions") -> list[str]:
    """A list of captions that are not blank."""
    return list(checked_captions(captions, name))


def checked_captions(captions: Any, name: str = "captions") -> Iterator[str]:
    """Captions of any iterable, checked when they are read; only one is needed at a time."""
    i = -1
    for i, caption in enumerate(_iterable(captions, name, "a list of captions")):
        if not isinstance(caption, str):
            raise ValueError(f"{name}[{i}] must be a string, got {type(caption).__name__} {caption!r}.")
        if not caption.strip():
            raise ValueError(f"{name}[{i}] is empty. Leave it out, or replace it by a word that counts as wrong.")
        yield caption
    if i < 0:
        raise ValueError(f"{name} is empty. Use at least one.")


def checked_groups(groups: Any, name: str, minimum: int = 1) -> Iterator[list[str]]:
    """The captions of each image, checked when they are read."""
    for i, captions in enumerate(as_sequence(groups, name)):
        if isinstance(captions, (str, bytes)):
            raise ValueError(f"{name}[{i}] is the string {captions!r}, not a list of captions. Pass [{captions!r}].")
        found = check_captions(captions, f"{name}[{i}]")
        if len(found) < minimum:
            raise ValueError(f"{name}[{i}] has {len(found)} caption(s). Pass at least {minimum}.")
        yield found


def check_groups(groups: Any, name: str, number: int | None = None) -> list[list[str]]:
    """A list of captions per image; of `number` images, if it is given."""
    found = list(checked_groups(groups, name))
    if number not in (None, len(found)):
        raise ValueError(f"{number} captions and {len(found)} lists of {name}. Pass one list per caption.")
    return found


def checked_pairs(candidates: Any, references: Any) -> tuple[Iterable[list[str]], Iterable[list[str]]]:
    """Candidates and references of the same images, checked when they are read."""
    given = as_sequence(candidates, "candidates", "a list with one caption per image")
    others = as_sequence(references, "references")
    if len(given) != len(others):
        raise ValueError(f"{len(given)} candidates, {len(others)} lists of references. Pass one list per candidate.")
    kinds = set(map(type, given))
    # If any of them is a string, they should be one caption per image; the check names those that are not strings.
    if any(issubclass(kind, str) for kind in kinds) and not any(issubclass(kind, list | tuple) for kind in kinds):
        ours: Iterable[list[str]] = ([caption] for caption in checked_captions(given, "candidates"))
    else:
        ours = checked_groups(given, "candidates")
    return ours, checked_groups(others, "references")


EMPTY_CAPTION = "."
"""Replaces an empty caption: scorers can read it, and it has no n-grams."""


def spoken(captions: Sequence[str]) -> list[str]:
    """Captions that every metric accepts: empty ones are replaced by `EMPTY_CAPTION`."""
    return [caption if caption.strip() else EMPTY_CAPTION for caption in captions]
