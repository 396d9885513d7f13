"""Checks that every caption metric makes of its texts."""

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["check_captions", "check_groups", "check_pairs", "listed_texts"]


def listed_texts(texts: Any, name: str) -> list[Any]:
    """What is given for each image, as a list.

    Raises:
        ValueError: If there is nothing to go through, or nothing in it.
    """
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ValueError(f"{name} is {texts!r} ({type(texts).__name__}), where a list of strings belongs. Use a list.")
    found = list(texts)
    if not found:
        raise ValueError(f"{name} is empty. Use at least one.")
    return found


def check_captions(captions: Any, name: str = "captions") -> list[str]:
    """A list of captions with something in each.

    Raises:
        ValueError: If it is one string or empty, or a caption is not a string or blank (its index is named).
    """
    if isinstance(captions, (str, bytes)):
        raise ValueError(f"{name} is one string, {captions!r}, whose characters are no captions. Pass a list.")
    found = listed_texts(captions, name)
    for i, caption in enumerate(found):
        if not isinstance(caption, str):
            raise ValueError(f"{name}[{i}] must be a string, got {type(caption).__name__} {caption!r}.")
        if not caption.strip():
            raise ValueError(f"{name}[{i}] is empty. Leave it out, or put a word for it that counts as wrong.")
    return found


def check_groups(groups: Any, name: str, minimum: int = 1) -> list[list[str]]:
    """A list of captions for each image.

    Raises:
        ValueError: If an image has a string instead of a list, or too few (its index is named).
    """
    if isinstance(groups, (str, bytes)):
        raise ValueError(f"{name} is one string. Pass a list of lists of captions, one list for each image.")
    groups = listed_texts(groups, name)
    found = []
    for i, captions in enumerate(groups):
        if isinstance(captions, (str, bytes)):
            raise ValueError(
                f"{name}[{i}] is the string {captions!r}; its characters are no captions. Pass [{captions!r}]."
            )
        found.append(check_captions(captions, f"{name}[{i}]"))
        if len(found[-1]) < minimum:
            raise ValueError(f"{name}[{i}] has {len(found[-1])} caption(s); at least {minimum} are needed.")
    return found


def check_pairs(candidates: Any, references: Any) -> tuple[list[list[str]], list[list[str]]]:
    """Candidates and references of the same images.

    Raises:
        ValueError: If the numbers of images disagree or a text is bad (its index is named).
    """
    if isinstance(candidates, (str, bytes)):
        raise ValueError("candidates is one string. Pass a list with one caption for each image.")
    listed = listed_texts(candidates, "candidates")
    # One string among them, and they are one caption for each image: what else there is, is what is wrong.
    if any(isinstance(c, str) for c in listed) and not any(isinstance(c, list | tuple) for c in listed):
        ours = [[caption] for caption in check_captions(listed, "candidates")]
    else:
        ours = check_groups(listed, "candidates")
    theirs = check_groups(references, "references")
    if len(ours) != len(theirs):
        raise ValueError(
            f"{len(ours)} candidates and {len(theirs)} lists of references: pass one each, in the same order."
        )
    return ours, theirs
