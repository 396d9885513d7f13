"""Where the claims of a caption stand in it, and which wrong ones are true of something else in the scene."""

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
"""Words that may stand between two of one claim, as in "on a very pale blue background"."""


@dataclass(frozen=True)
class ClaimMark:
    """A claim and its place."""

    claim: Claim
    # `"right"`, `"wrong"`, or `"misbound"`: wrong here, and true of `owner`.
    verdict: Literal["right", "wrong", "misbound"]
    # Where its words begin in the caption, in characters; None where they do not stand there literally.
    start: int | None
    end: int | None
    owner: str = ""  # what the claim is true of, where it is misbound; else empty


def binding_owner(claim: Claim, facts: Facts | Mapping[str, Any]) -> str:
    """What a wrong claim is true of, if it is true of something else in the scene: an attribute-binding error.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 9: the red of the crane given to the train. By rule: an
    orientation, or a number above 1, that the other object has; a place in the picture where the other object is; a side
    on which the other object stands; a colour or pattern that another thing or the background has. A wrong size never
    counts, as both objects share theirs, nor does "a", which every second object is.
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
        return second if value == "upright" else ""  # as every second object is
    if attribute == "relation":
        # What holds of the group is only wrong where it was said of the other object.
        return {OPPOSITES.get(str(known["relation"])): second, known["relation"]: kind}.get(value, "")
    if attribute == "position" and known["position"]:
        row = POSITIONS.index(str(known["position"]))
        other = row + ROWS_TO_SECOND.get(str(known["relation"]), 0)
        # The claim is wrong about its own object, so the object there is the other one.
        places = {POSITIONS[row]: kind, POSITIONS[other]: second}
        return places.get(value, "")
    return ""


def _placed_words(caption: str) -> list[tuple[str, int, int]]:
    """The words as `check` reads them, in small letters, and where they begin and end in the caption."""
    # One capital may become two small letters, so each keeps its place.
    letters = [(small, place) for place, letter in enumerate(caption) for small in letter.lower()]
    found = re.finditer(r"[a-z0-9]+", "".join(small for small, _ in letters))
    return [(word.group(), letters[word.start()][1], letters[word.end() - 1][1] + 1) for word in found]


def _places(words: list[str], wanted: list[str]) -> list[tuple[int, int]]:
    """First and last word of every place where the wanted words stand in order, the nearest ones to each last word."""
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
    """Judge a caption, and find every claim in it.

    Words may be said twice and claim two things ("two pigs left of two ducks"). A claim is therefore looked for up to the
    word that completes it: the one from which on the checker, reading the caption word by word, keeps making the claim.
    """
    result = check(caption, facts)
    placed = _placed_words(caption)
    words = [word for word, _, _ in placed]
    # Before each word the claims made so far; the last entry is the whole caption.
    prefixes: list[CheckResult] = [check(caption[:end], facts) for _, _, end in placed]
    marks = []
    for verdict, claims in (("right", result.right), ("wrong", result.wrong)):
        for claim in claims:
            complete = len(prefixes)
            while complete and claim in getattr(prefixes[complete - 1], verdict):
                complete -= 1
            # Now the number of words without which the claim is not made: word `complete` makes it.
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
