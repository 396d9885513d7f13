"""Checks of the texts that caption metrics take."""

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["check_captions", "check_groups", "check_pairs", "listed_texts"]


def listed_texts(texts: Any, name: str) -> list[Any]:
    """The texts as a list."""
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ValueError(f"{name} is {texts!r} ({type(texts).__name__}). Use a list of strings.")
    found = list(texts)
    if not found:
        raise ValueError(f"{name} is empty. Use at least one.")
    return found


def check_captions(captions: Any, name: str = "captions") -> list[str]:
    """A list of captions that are not blank."""
    if isinstance(captions, (str, bytes)):
        raise ValueError(f"{name} is one string, {captions!r}. Pass a list of captions.")
    found = listed_texts(captions, name)
    for i, caption in enumerate(found):
        if not isinstance(caption, str):
            raise ValueError(f"{name}[{i}] must be a string, got {type(caption).__name__} {caption!r}.")
        if not caption.strip():
            raise ValueError(f"{name}[{i}] is empty. Leave it out, or replace it by a word that counts as wrong.")
    return found


def check_groups(groups: Any, name: str, minimum: int = 1) -> list[list[str]]:
    """A list of captions per image."""
    if isinstance(groups, (str, bytes)):
        raise ValueError(f"{name} is one string. Pass a list of lists of captions, one list per image.")
    groups = listed_texts(groups, name)
    found = []
    for i, captions in enumerate(groups):
        if isinstance(captions, (str, bytes)):
            raise ValueError(f"{name}[{i}] is the string {captions!r}, not a list of captions. Pass [{captions!r}].")
        found.append(check_captions(captions, f"{name}[{i}]"))
        if len(found[-1]) < minimum:
            raise ValueError(f"{name}[{i}] has {len(found[-1])} caption(s). Pass at least {minimum}.")
    return found


def check_pairs(candidates: Any, references: Any) -> tuple[list[list[str]], list[list[str]]]:
    """Candidates and references of the same images."""
    if isinstance(candidates, (str, bytes)):
        raise ValueError("candidates is one string. Pass a list with one caption per image.")
    listed = listed_texts(candidates, "candidates")
    # If any of them is a string, they should be one caption per image; the check names those that are not strings.
    if any(isinstance(c, str) for c in listed) and not any(isinstance(c, list | tuple) for c in listed):
        ours = [[caption] for caption in check_captions(listed, "candidates")]
    else:
        ours = check_groups(listed, "candidates")
    theirs = check_groups(references, "references")
    if len(ours) != len(theirs):
        raise ValueError(
            f"{len(ours)} candidates and {len(theirs)} lists of references. Pass one list per candidate, in the same order."
        )
    return ours, theirs
