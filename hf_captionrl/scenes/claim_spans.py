"""Positions of claims in a caption, and wrong claims that are true of something else in the scene."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_captionrl.scenes.check_result import CheckResult, Claim
from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.scenes.world import OPPOSITES, POSITIONS, ROWS_TO_SECOND, Facts

__all__ = ["ClaimMark", "binding_owner", "mark_caption"]

_MOST_BETWEEN = 4
"""Largest number of words between two words of one claim, as in "on a very pale blue background"."""


@dataclass(frozen=True)
class ClaimMark:
    """A claim, its verdict and its position in the caption."""

    claim: Claim
    # `"right"`, `"wrong"`, or `"misbound"`: wrong here, and true of `owner`.
    verdict: Literal["right", "wrong", "misbound"]
    # First character of its words in the caption, and the one after the last; None if the caption does not contain them literally.
    start: int | None
    end: int | None
    owner: str = ""  # what a misbound claim is true of; else empty


def binding_owner(claim: Claim, facts: Facts | Mapping[str, Any]) -> str:
    """What a wrong claim is true of, if it is true of something else in the scene: an attribute-binding error.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 9, where the caption gives the red of the crane to the
    train. The rules: an orientation, or a number above 1, of the other object; the position of the other object in the
    picture; the side on which the other object is; a colour or pattern of another thing or of the background. A wrong size
    never counts, because both objects have the same size. "a" never counts, because every second object is single.
    """
    known = {n: facts[n] if isinstance(facts, Mapping) else getattr(facts, n) for n in Facts.__dataclass_fields__}
    kind, second = str(known["kind"]), str(known["second"])
    attribute, value = claim.attribute, claim.value
    if attribute == "pattern of a thing":
        return "background" if value.partition(" ")[0] == known["pattern"] else ""
    if attribute in ("colour", "second_colour", "background"):
        owners = {"colour": kind, "second_colour": second, "background": "background"}
        return next((owner for name, owner in owners.items() if name != attribute and known[name] == value), "")
    if not second:
        return ""
    if attribute == "second count":
        return kind if value == str(known["count"]) != "1" else ""
    if attribute == "second orientation":
        return kind if value == known["orientation"] else ""
    if attribute == "orientation":
        return second if value == "upright" else ""  # every second object is upright
    if attribute == "relation":
        # The relation of the group is wrong only if the caption claims it of the other object.
        return {OPPOSITES.get(str(known["relation"])): second, known["relation"]: kind}.get(value, "")
    if attribute == "position" and known["position"]:
        row = POSITIONS.index(str(known["position"]))
        other = row + ROWS_TO_SECOND.get(str(known["relation"]), 0)
        # The claim is wrong about its own object, so it is true of the other one.
        places = {POSITIONS[row]: kind, POSITIONS[other]: second}
        return places.get(value, "")
    return ""


def _placed_words(caption: str) -> list[tuple[str, int, int]]:
    """The words as `check` reads them, in lower case, with start and end in the caption."""
    # The lower case of one letter may have two letters, so each of them keeps the position of the original.
    letters = [(small, place) for place, letter in enumerate(caption) for small in letter.lower()]
    found = re.finditer(r"[a-z0-9]+", "".join(small for small, _ in letters))
    return [(word.group(), letters[word.start()][1], letters[word.end() - 1][1] + 1) for word in found]


def _places(words: list[str], wanted: list[str]) -> list[tuple[int, int]]:
    """First and last word of each occurrence of the wanted words in this order; each earlier word is the nearest one."""
    found = []
    for last, word in enumerate(words):
        if word != wanted[-1]:
            continue
        at = last
        for earlier in reversed(wanted[:-1]):
            near = range(at - 1, max(at - 2 - _MOST_BETWEEN, -1), -1)
            at = next((place for place in near if words[place] == earlier), -1)
            if at < 0:
                break
        else:
            found.append((at, last))
    return found


def mark_caption(caption: str, facts: Facts | Mapping[str, Any]) -> list[ClaimMark]:
    """Judge a caption, and locate each of its claims.

    The same words can make two claims ("two pigs left of two ducks"). A claim is therefore searched only up to the word
    that completes it: the first word from which on every longer beginning of the caption makes the claim.
    """
    result = check(caption, facts)
    placed = _placed_words(caption)
    words = [word for word, _, _ in placed]
    # Claims of the caption up to and including each word.
    prefixes: list[CheckResult] = [check(caption[:end], facts) for _, _, end in placed]
    marks = []
    for verdict, claims in (("right", result.right), ("wrong", result.wrong)):
        for claim in claims:
            complete = len(prefixes)
            while complete and claim in getattr(prefixes[complete - 1], verdict):
                complete -= 1
            # Word `complete` completes the claim: every beginning of the caption that includes it makes the claim.
            places = _places(words, claim.text.split())
            before = [place for place in places if place[1] <= complete]
            place = before[-1] if before else places[0] if places else None
            owner = binding_owner(claim, facts) if verdict == "wrong" else ""
            marks.append(
                ClaimMark(
                    claim,
                    "misbound" if owner else "wrong" if verdict == "wrong" else "right",
                    None if place is None else placed[place[0]][1],
                    None if place is None else placed[place[1]][2],
                    owner,
                )
            )
    return sorted(marks, key=lambda mark: len(caption) if mark.start is None else mark.start)
