"""Checks of the texts that caption metrics take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def _iterable(texts: Any, name: str) -> Iterable[Any]:
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ValueError(f"{name} is {texts!r} ({type(texts).__name__}). Use a list of strings.")
    return texts


def listed_texts(texts: Any, name: str) -> list[Any]:
    """The texts as a list."""
    found = list(_iterable(texts, name))
    if not found:
        raise ValueError(f"{name} is empty. Use at least one.")
    return found


def check_captions(captions: Any, name: str = "captions") -> list[str]:
    """A list of captions that are not blank."""
    return list(checked_captions(captions, name))


def checked_captions(captions: Any, name: str = "captions") -> Iterator[str]:
    """Captions of any iterable, checked when they are read; only one is needed at a time."""
    if isinstance(captions, (str, bytes)):
        raise ValueError(f"{name} is one string, {captions!r}. Pass a list of captions.")
    i = -1
    for i, caption in enumerate(_iterable(captions, name)):
        if not isinstance(caption, str) or not caption.strip():
            check_caption(caption, f"{name}[{i}]")
        yield caption
    if i < 0:
        raise ValueError(f"{name} is empty. Use at least one.")


def check_caption(caption: Any, name: str) -> str:
    """A caption that is not blank."""
    if not isinstance(caption, str):
        raise ValueError(f"{name} must be a string, got {type(caption).__name__} {caption!r}.")
    if not caption.strip():
        raise ValueError(f"{name} is empty. Leave it out, or replace it by a word that counts as wrong.")
    return caption


def as_sequence(texts: Any, name: str) -> Sequence[Any]:
    """The texts, as a list unless they are a sequence, whose items may be made when they are read."""
    return texts if isinstance(texts, Sequence) and len(texts) else listed_texts(texts, name)


def checked_groups(groups: Any, name: str, minimum: int = 1) -> Iterator[list[str]]:
    """The captions of each image, checked when they are read."""
    if isinstance(groups, (str, bytes)):
        raise ValueError(f"{name} is one string. Pass a list of lists of captions, one list per image.")
    for i, captions in enumerate(as_sequence(groups, name)):
        if isinstance(captions, (str, bytes)):
            raise ValueError(f"{name}[{i}] is the string {captions!r}, not a list of captions. Pass [{captions!r}].")
        found = check_captions(captions, f"{name}[{i}]")
        if len(found) < minimum:
            raise ValueError(f"{name}[{i}] has {len(found)} caption(s). Pass at least {minimum}.")
        yield found


def check_groups(groups: Any, name: str, minimum: int = 1) -> list[list[str]]:
    """A list of captions per image."""
    return list(checked_groups(groups, name, minimum))


def checked_pairs(candidates: Any, references: Any) -> tuple[Iterable[list[str]], Iterable[list[str]]]:
    """Candidates and references of the same images, checked when they are read."""
    if isinstance(candidates, (str, bytes)):
        raise ValueError("candidates is one string. Pass a list with one caption per image.")
    given = as_sequence(candidates, "candidates")
    if isinstance(references, (str, bytes)):
        raise ValueError("references is one string. Pass a list of lists of captions, one list per image.")
    others = as_sequence(references, "references")
    if len(given) != len(others):
        raise ValueError(
            f"{len(given)} candidates and {len(others)} lists of references. Pass one list per candidate, in the same order."
        )
    kinds = set(map(type, given))
    # If any of them is a string, they should be one caption per image; the check names those that are not strings.
    if any(issubclass(kind, str) for kind in kinds) and not any(issubclass(kind, list | tuple) for kind in kinds):
        ours: Iterable[list[str]] = _single_captions(given)
    else:
        ours = checked_groups(given, "candidates")
    return ours, checked_groups(others, "references")


def _single_captions(captions: Sequence[Any]) -> Iterator[list[str]]:
    for i, caption in enumerate(captions):
        yield [check_caption(caption, f"candidates[{i}]")]


def check_pairs(candidates: Any, references: Any) -> tuple[list[list[str]], list[list[str]]]:
    """[`checked_pairs`] as lists."""
    ours, theirs = checked_pairs(candidates, references)
    return list(ours), list(theirs)
