"""Claims of captions of the embedded world, read from the words alone, and captions written from claims.

Nothing here knows the truth of a scene: a blender and a combiner built on it decide as a language model must, from texts.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hf_captionrl.scenes.grammar import ANNOTATORS, POSITION_PHRASES, article, plural
from hf_captionrl.scenes.world import BACKGROUNDS, CATEGORIES, EMOJI_KINDS, RELATIONS, SHAPE_KINDS, category_of

__all__ = ["ALONE", "SceneClaims", "blend_claims", "combine_claims", "read_claims", "write_claims"]

ALONE = "alone"
"""Value of `second` where a caption says that there is no second object."""

_NUMBERS = {"a": 1, "an": 1, "two": 2, "three": 3, "some": 0}


@dataclass(frozen=True)
class SceneClaims:
    """What a caption says of a scene; `""` and 0 stand for what it does not say.

    Args:
        kind (`str`): Kind of the main group, or only its category.
        count (`int`): Copies, 1 to 3.
        several (`bool`): More than one, the number unsaid.
        size (`str`): `small` or `large`, whatever word was used.
        orientation (`str`): `sideways` or `upside down`.
        position (`str`): `top`, `middle` or `bottom`.
        background (`str`): Its colour.
        second (`str`): Kind of the second object, or `ALONE`.
        relation (`str`): Where the main group stands seen from the second object.
    """

    kind: str
    count: int = 0
    several: bool = False
    size: str = ""
    orientation: str = ""
    position: str = ""
    background: str = ""
    second: str = ""
    relation: str = ""


@functools.cache
def _nouns() -> dict[str, str]:
    """Singulars and plurals to the world's own name."""
    names = (*EMOJI_KINDS, *SHAPE_KINDS, *CATEGORIES)
    return {form: name for name in names for form in (name, plural(name))}


@functools.cache
def _sizes() -> dict[str, str]:
    small = {annotator.small: "small" for annotator in ANNOTATORS}
    return small | {annotator.large: "large" for annotator in ANNOTATORS}


@functools.cache
def _grammar() -> re.Pattern[str]:
    def one_of(words: object) -> str:
        return "|".join(sorted(map(re.escape, words), key=len, reverse=True))  # type: ignore[call-overload]

    return re.compile(
        rf"(?P<number>{one_of(_NUMBERS)}) (?:(?P<size>{one_of(_sizes())}) )?(?:(?P<orientation>sideways|upside down) )?"
        rf"(?P<noun>{one_of(_nouns())})"
        rf"(?: (?:with|(?P<relation>{one_of(RELATIONS)})) an? (?P<second>{one_of(_nouns())})| (?P<alone>alone))?"
        rf"(?: (?P<position>{one_of(POSITION_PHRASES.values())}))?"
        rf"(?: on (?:an? )?(?P<background>{one_of(BACKGROUNDS)})(?: background)?)?"
    )


def read_claims(caption: str) -> SceneClaims | None:
    """Read a caption of the world's grammar.

    Example:
        >>> read_claims("Two tiny pigs left of a mushroom on blue.")
        SceneClaims(kind='pig', count=2, several=False, size='small', orientation='', position='', background='blue', \
second='mushroom', relation='left of')
    """
    found = _grammar().fullmatch(" ".join(caption.lower().rstrip(" .").split()))
    if found is None:
        return None
    number, nouns = _NUMBERS[found["number"]], _nouns()
    return SceneClaims(
        kind=nouns[found["noun"]],
        count=number,
        several=number == 0,
        size=_sizes().get(found["size"] or "", ""),
        orientation=found["orientation"] or "",
        position=next((name for name, phrase in POSITION_PHRASES.items() if phrase == found["position"]), ""),
        background=found["background"] or "",
        second=ALONE if found["alone"] else nouns.get(found["second"] or "", ""),
        relation=found["relation"] or "",
    )


def write_claims(claims: SceneClaims) -> str:
    """Write a caption that claims just this, in the wording of the world's full captions."""
    one = claims.count == 1 or (claims.count == 0 and not claims.several)
    words = [w for w in (claims.size, claims.orientation, claims.kind if one else plural(claims.kind)) if w]
    number = article(words[0]) if one else {0: "some", 2: "two", 3: "three"}[claims.count]
    parts = [number, *words]
    if claims.second == ALONE:
        parts.append(ALONE)
    elif claims.second:
        parts += [claims.relation or "with", article(claims.second), claims.second]
    if claims.position:
        parts.append(POSITION_PHRASES[claims.position])
    if claims.background:
        parts += ["on", article(claims.background), claims.background, "background"]
    return " ".join(parts)


def _most(values: Sequence[str | int]) -> str | int:
    """The most frequent value, the earliest of equals; what was not said does not count."""
    said = [value for value in values if value]
    return Counter(said).most_common(1)[0][0] if said else type(values[0])()


def blend_claims(captions: Sequence[SceneClaims]) -> SceneClaims:
    """The union of what several people say; where they differ the majority, then the first."""
    if not captions:
        raise ValueError("There are no claims to blend. Give those of at least one caption.")
    merged = {
        f.name: _most([getattr(c, f.name) for c in captions]) for f in fields(SceneClaims) if f.name != "several"
    }
    exact = [c.kind for c in captions if c.kind not in CATEGORIES]
    merged["kind"] = _most(exact) if exact else merged["kind"]
    if merged["second"] in ("", ALONE):
        merged["relation"] = ""  # a caption with a relation names the other object
    several = not merged["count"] and any(c.several for c in captions)
    return SceneClaims(**merged, several=several)  # type: ignore[arg-type]


def combine_claims(correct: SceneClaims, new: SceneClaims) -> SceneClaims:
    """What `correct` says, and of what it leaves open what `new` says: human text wins every conflict.

    As in the paper's worked examples, details of a subject that `new` calls by a wrong name are carried over ("a woman
    ... wearing a white shirt" gives the man of the correct caption a white shirt); a relation to a second object that
    the two name differently is not, because it says where that other object stands.
    """
    merged = correct
    # "an animal" leaves open which one; "a teapot" contradicts it.
    if correct.kind in CATEGORIES and new.kind not in CATEGORIES and category_of(new.kind) == correct.kind:
        merged = replace(merged, kind=new.kind)
    if not correct.count and (new.count > 1 or not correct.several):
        merged = replace(merged, count=new.count, several=correct.several and not new.count)
    for name in ("size", "orientation", "position", "background"):
        if not getattr(correct, name):
            merged = replace(merged, **{name: getattr(new, name)})
    if not correct.second:
        merged = replace(merged, second=new.second, relation=new.relation)
    elif correct.second == new.second and not correct.relation:
        merged = replace(merged, relation=new.relation)
    if merged.second == merged.kind:
        # The new caption gives its second object the name that people gave the main one: one thing, not two.
        merged = replace(merged, second=correct.second, relation=correct.relation)
    return merged
