"""Claims of captions of the embedded world, read from the words alone, and captions written from claims.

The functions do not know the facts of a scene. Like a language model, they blend and combine captions from the texts alone.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from hf_captionrl.scenes.grammar import OPINIONS, values_by_phrase, write_sentence
from hf_captionrl.scenes.world import (
    BACKGROUNDS,
    CATEGORIES,
    COLOURS,
    EMOJI_KINDS,
    ORIENTATIONS,
    PATTERNS,
    POSITIONS,
    RELATIONS,
    SHAPE_KINDS,
    SIZES,
    TIMES,
    WEATHERS,
    Facts,
    category_of,
    names_of,
    plural,
)

_NUMBERS = {"a": 1, "an": 1, "two": 2, "three": 3, "some": 0}


@dataclass(frozen=True)
class SceneClaims(Facts):
    """Claims of a caption about a scene; `""` and 0 mean that it makes no such claim. `kind` may be only a category."""

    count: int = 0  # copies, 1 to 3
    size: str = ""
    orientation: str = ""
    position: str = ""
    background: str = ""
    several: bool = False  # more than one, without a number


_ADJECTIVES = {"size": SIZES, "orientation": ORIENTATIONS[1:], "colour": COLOURS[1:]}
_SETTING = {"pattern": PATTERNS[1:], "background": BACKGROUNDS, "weather": WEATHERS[1:], "time": TIMES[1:]}


@functools.cache
def _nouns() -> dict[str, str]:
    """The world's own name by singular or plural."""
    names = {name: kind for kind in (*EMOJI_KINDS, *SHAPE_KINDS) for name in names_of(kind)}
    names |= {category: category for category in CATEGORIES}
    return {form: kind for name, kind in names.items() for form in (name, plural(name))}


@functools.cache
def _grammar() -> re.Pattern[str]:
    def group(name: str, words: Iterable[str]) -> str:
        return f"(?P<{name}>{'|'.join(sorted(map(re.escape, words), key=len, reverse=True))})"

    adjectives = "".join(f"(?:{group(name, values_by_phrase(values))} )?" for name, values in _ADJECTIVES.items())
    return re.compile(
        f"{group('number', _NUMBERS)} (?:(?:{'|'.join(OPINIONS)}) )?{adjectives}{group('noun', _nouns())}"
        f"(?: (?:with|{group('relation', values_by_phrase(RELATIONS))}) an? "
        f"(?:{group('second_colour', values_by_phrase(COLOURS[1:]))} )?{group('second', _nouns())})?"
        f"(?: {group('position', values_by_phrase(POSITIONS))})?"
        f"(?: on an?(?: {group('pattern', values_by_phrase(PATTERNS[1:]))})?"
        f"(?: {group('background', values_by_phrase(BACKGROUNDS))})? background)?"
        f"(?: {group('weather', values_by_phrase(WEATHERS[1:]))})?(?: {group('time', values_by_phrase(TIMES[1:]))})?"
    )


def read_claims(caption: str) -> SceneClaims | None:
    """Read a caption of the world's grammar, in any of its styles.

    Example:
        >>> claims = read_claims("On a gray background, two tiny pigs left of a mug.")
        >>> claims.kind, claims.count, claims.size, claims.second, claims.background
        ('pig', 2, 'small', 'cup', 'gray')
    """
    text = " ".join(caption.lower().rstrip(" .").split())
    if text.startswith("image of "):
        text = text.removeprefix("image of ").replace(",", "")
    elif ", " in text:
        setting, _, rest = text.partition(", ")
        text = f"{rest} {setting}"
    found = _grammar().fullmatch(text)
    if found is None:
        return None
    number, nouns = _NUMBERS[found["number"]], _nouns()
    values = _ADJECTIVES | _SETTING | {"position": POSITIONS, "relation": RELATIONS, "second_colour": COLOURS[1:]}
    return SceneClaims(
        kind=nouns[found["noun"]],
        count=number,
        several=number == 0,
        second=nouns.get(found["second"] or "", ""),
        **{name: values_by_phrase(known).get(found[name] or "", "") for name, known in values.items()},
    )


def write_claims(claims: SceneClaims) -> str:
    """Write a caption with these claims only, in the wording of the world's full captions."""
    return write_sentence(asdict(claims))


def _most(values: Sequence[str | int]) -> str | int:
    """The most frequent value, the first one in case of a tie; empty values do not count."""
    said = [value for value in values if value]
    return Counter(said).most_common(1)[0][0] if said else type(values[0])()


def blend_claims(captions: Sequence[SceneClaims]) -> SceneClaims:
    """The union of the claims of several captions; if they differ, the most frequent value, then the first."""
    if not captions:
        raise ValueError("There are no claims to blend. Give those of at least one caption.")
    merged = {
        f.name: _most([getattr(c, f.name) for c in captions]) for f in fields(SceneClaims) if f.name != "several"
    }
    exact = [c.kind for c in captions if c.kind not in CATEGORIES]
    merged["kind"] = _most(exact) if exact else merged["kind"]
    if not merged["second"]:
        merged["relation"] = merged["second_colour"] = ""  # a caption with either names the other object
    several = not merged["count"] and any(c.several for c in captions)
    return SceneClaims(**merged, several=several)  # type: ignore[arg-type]


def combine_claims(correct: SceneClaims, new: SceneClaims) -> SceneClaims:
    """The claims of `correct`, completed with claims of `new`; in every conflict, `correct`, the human text, wins.

    As in the paper's worked examples, details of a subject are kept even if `new` gives it a wrong name ("a woman ...
    wearing a white shirt" gives the man of the correct caption a white shirt). If the two captions name different second
    objects, the relation of `new` is dropped, because it locates another object.
    """
    merged = correct
    # "an animal" does not name the kind; "a teapot" contradicts it.
    if correct.kind in CATEGORIES and new.kind not in CATEGORIES and category_of(new.kind) == correct.kind:
        merged = replace(merged, kind=new.kind)
    if not correct.count and (new.count > 1 or not correct.several):
        merged = replace(merged, count=new.count, several=correct.several and not new.count)
    for name in ("size", "orientation", "position", "background", "colour", "pattern", "weather", "time"):
        if not getattr(correct, name):
            merged = replace(merged, **{name: getattr(new, name)})
    if not correct.second:
        merged = replace(merged, second=new.second, relation=new.relation, second_colour=new.second_colour)
    elif correct.second == new.second:
        merged = replace(
            merged, relation=correct.relation or new.relation, second_colour=correct.second_colour or new.second_colour
        )
    if merged.second == merged.kind:
        # `new` names its second object as `correct` names the main one: they are the same thing.
        merged = replace(merged, second=correct.second, relation=correct.relation, second_colour=correct.second_colour)
    return merged
