"""Captions of scenes and clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_captionrl.scenes.moving_world import ADVERBS, STILL
from hf_captionrl.scenes.world import (
    CATEGORIES,
    FACT_VALUES,
    Facts,
    category_of,
    choose,
    names_of,
    plural,
)

# --- Captions of a scene: the full caption, and captions of annotators, who mention some facts more often than others ---

_NUMBER = {1: "a", 2: "two", 3: "three"}

SALIENCE = {
    "count": 0.7,
    "second": 0.62,
    "motion": 0.6,
    "colour": 0.5,
    "relation": 0.45,
    "second_colour": 0.25,
    "speed": 0.2,
}
SALIENCE |= {"size": 0.18, "background": 0.15, "weather": 0.15, "time": 0.12, "position": 0.12, "pattern": 0.1}
SALIENCE |= {"orientation": 0.1}
"""Probability that an annotator of verbosity 1 mentions a fact. The kind or its category is always mentioned."""

WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny"),
    "large": ("large", "big", "huge"),
    "sideways": ("sideways", "lying down"),
    "upside down": ("upside down", "inverted"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
    "top": ("at the top", "in the upper part"),
    "middle": ("in the middle", "in the center"),
    "bottom": ("at the bottom", "in the lower part"),
    "gray": ("gray", "grey"),
    "purple": ("purple", "violet"),
    "pink": ("pink", "rose colored"),
    "golden": ("golden", "gold"),
    "red": ("red", "crimson"),
    "striped": ("striped", "lined"),
    "dotted": ("dotted", "spotted"),
    "rain": ("in the rain", "on a rainy day"),
    "snow": ("in the snow", "on a snowy day"),
    "night": ("at night", "in the dark"),
}
"""Words for a value, the most frequent first. All other values are named by their own name."""


def values_by_phrase(values: tuple[str, ...]) -> dict[str, str]:
    """Values by the phrases that people use for them."""
    return {phrase: value for value in filter(None, values) for phrase in WORDS.get(value, (value,))}


OPINIONS: tuple[str, ...] = ("nice", "cute", "pretty", "lovely", "beautiful")
"""Adjectives that make no claim that can be checked."""

_P_WORDS = (0.7, 0.2, 0.1)
_P_OPINION = 0.06
_P_MISTAKE = 0.03
_CAN_BE_MISTAKEN = {*FACT_VALUES, "kind", "second"}


def article(next_word: str) -> str:
    """The indefinite article."""
    return "an" if next_word[0] in "aeiou" else "a"


@dataclass(frozen=True)
class Annotator:
    """An annotator that omits some facts and is sometimes wrong."""

    verbosity: float  # factor of the probabilities of `SALIENCE`
    generic: float = 0.0  # probability of naming the category of the main group ("an animal") instead of its kind
    setting_first: bool = False  # starts every other caption with background, weather and time: "at night, two dogs"
    alt_text: bool = False  # separates phrases by commas, and starts with "image of"


ANNOTATORS: tuple[Annotator, ...] = (
    Annotator(0.6, 0.35),
    Annotator(0.8, 0.25),
    Annotator(1.0, 0.15, setting_first=True),
    Annotator(1.3, 0.1),
    Annotator(1.7, 0.05),
)
"""From terse to verbose."""

ALT_TEXT_ANNOTATORS: tuple[Annotator, ...] = tuple(
    replace(annotator, setting_first=False, alt_text=True, verbosity=annotator.verbosity * 0.9)
    for annotator in ANNOTATORS
)
"""Another domain: annotators that write alternative texts."""


class Words:
    """Chooses words for values: always the first one, or, with a generator, sometimes a synonym."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self.rng = rng

    def _one_of(self, words: tuple[str, ...]) -> str:
        if self.rng is None or len(words) == 1:
            return words[0]
        chosen = self.rng.random() * sum(_P_WORDS[: len(words)])
        for word, probability in zip(words, _P_WORDS, strict=False):
            if chosen < probability:
                return word
            chosen -= probability
        return words[-1]

    def value(self, value: str) -> str:
        """A word for a value of a fact."""
        return self._one_of(WORDS.get(value, (value,)))

    def noun(self, kind: str) -> str:
        """A name of a kind or category."""
        return kind if kind in CATEGORIES else self._one_of(names_of(kind))


def _noun_phrase(said: Mapping[str, Any], words: Words, opinion: str = "") -> str:
    noun = words.noun(said["kind"])
    count = said["count"]
    is_single = count == 1 or not (count or said.get("several"))
    noun = noun if is_single else plural(noun)
    adjectives = [words.value(said[name]) for name in ("size", "orientation", "colour") if said[name]]
    parts = [word for word in (opinion, *adjectives, noun) if word]
    if is_single:
        return " ".join([article(parts[0]), *parts])
    return " ".join([_NUMBER[count] if count else "some", *parts])


def _setting(said: Mapping[str, Any], words: Words) -> list[str]:
    parts = []
    if said["background"] or said["pattern"]:
        colours = [words.value(said[name]) for name in ("pattern", "background") if said[name]]
        parts.append(f"on {article(colours[0])} {' '.join(colours)} background")
    return parts + [words.value(said[name]) for name in ("weather", "time") if said[name]]


def _motion(said: Mapping[str, Any]) -> str:
    if said.get("motion") == STILL:
        return "at rest"
    motion, speed = said.get("motion"), said.get("speed")
    words = [word for word in (motion, ADVERBS[speed] if speed else "") if word]
    return " ".join(["moving", *words]) if words else ""


def write_sentence(
    said: Mapping[str, Any], words: Words | None = None, annotator: Annotator | None = None, opinion: str = ""
) -> str:
    """The caption that states the given facts.

    `said` maps each fact to its value, or `""`; `several`: more than one, without a number.
    """
    words = words or Words()
    parts = [_noun_phrase(said, words, opinion), _motion(said)]
    if said["second"]:
        noun = [words.value(said["second_colour"])] if said["second_colour"] else []
        noun.append(words.noun(said["second"]))
        relation = words.value(said["relation"]) if said["relation"] else "with"
        parts.append(" ".join([relation, article(noun[0]), *noun]))
    if said["position"]:
        parts.append(words.value(said["position"]))
    setting = _setting(said, words)
    parts = [part for part in parts if part]
    if annotator is not None and annotator.alt_text:
        return ", ".join([f"image of {parts[0]}", *parts[1:], *setting])
    if annotator is not None and annotator.setting_first and setting:
        return f"{' '.join(setting)}, {' '.join(parts)}"
    return " ".join([*parts, *setting])


def full_caption(facts: Facts) -> str:
    """All facts of a scene or clip that have a word, in one fixed wording.

    Args:
        facts ([`Facts`]): The scene's facts, or those of a clip.

    Returns:
        `str`: A caption that no other scene shares.

    Example:
        >>> full_caption(Facts("pig", 2, "small", "sideways", "top", "blue", "cup", "left of", colour="red"))
        'two small sideways red pigs left of a cup at the top on a blue background'
        >>> full_caption(MovingFacts("pig", 1, "small", "upright", "top", "blue", motion="left", speed="slow"))
        'a small pig moving left slowly at the top on a blue background'
    """
    said = facts.to_dict()
    said["orientation"] = "" if facts.orientation == "upright" else facts.orientation
    return write_sentence(said)


def _mistaken(rng: np.random.Generator, facts: Facts, name: str) -> Any:
    """A wrong value that can replace the true one."""
    value = getattr(facts, name)
    if name in ("kind", "second"):
        other = facts.second if name == "kind" else facts.kind
        values: tuple[Any, ...] = tuple(k for k in CATEGORIES[category_of(value)] if k != other)
    else:
        values = tuple(v for v in FACT_VALUES[name] if v and v != "upright")
    others = tuple(v for v in values if v != value)
    return choose(rng, others) if others else value


def annotate(rng: np.random.Generator, facts: Facts, annotator: Annotator) -> str:
    """One reference caption: incomplete, and rarely wrong."""
    said: dict[str, Any] = {}
    for name, value in facts.to_dict().items():
        mentions = name == "kind" or rng.random() < min(SALIENCE.get(name, 1.0) * annotator.verbosity, 0.97)
        said[name] = value if mentions and value and value != "upright" else ""
        if said[name] and name in _CAN_BE_MISTAKEN and rng.random() < _P_MISTAKE:
            said[name] = _mistaken(rng, facts, name)
    if not said["second"]:
        said["relation"] = said["second_colour"] = ""
    if rng.random() < annotator.generic and said["kind"] not in CATEGORIES:
        said["kind"] = category_of(said["kind"])
    said["several"] = not said["count"] and facts.count > 1
    opinion = str(choose(rng, OPINIONS)) if rng.random() < _P_OPINION else ""
    if annotator.setting_first and rng.random() < 0.5:
        annotator = replace(annotator, setting_first=False)
    return write_sentence(said, Words(rng), annotator, opinion)
