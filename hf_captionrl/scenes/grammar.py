"""What people write about a scene: one full description, and five annotators who leave most of it out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_captionrl.scenes.moving_world import MovingFacts, motion_words
from hf_captionrl.scenes.world import Facts, category_of

__all__ = ["ANNOTATORS", "POSITION_PHRASES", "Annotator", "annotate", "article", "full_caption", "plural"]

_NUMBER = {1: "a", 2: "two", 3: "three"}
_IRREGULAR = {
    "butterfly": "butterflies",
    "bus": "buses",
    "cactus": "cacti",
    "fish": "fish",
    "octopus": "octopuses",
    "strawberry": "strawberries",
}


def plural(kind: str) -> str:
    """Plural of a kind."""
    return _IRREGULAR.get(kind, kind + "s")


def article(next_word: str) -> str:
    """The indefinite article."""
    return "an" if next_word[0] in "aeiou" else "a"


def _noun_phrase(facts: Facts, *, number: bool, size: str, orientation: str, generic: bool = False) -> str:
    noun = category_of(facts.kind) if generic else facts.kind
    noun = noun if facts.count == 1 else plural(noun)
    words = [w for w in (size, orientation, noun) if w]
    if facts.count == 1:
        return " ".join([article(words[0]), *words])
    return " ".join([_NUMBER[facts.count] if number else "some", *words])


def _orientation(facts: Facts) -> str:
    # The only unmarked value of the world: captions do not say that something is upright.
    return "" if facts.orientation == "upright" else facts.orientation


POSITION_PHRASES = {"top": "at the top", "middle": "in the middle", "bottom": "at the bottom"}
"""What is said of each position."""


def full_caption(facts: Facts) -> str:
    """The whole truth about a scene or clip, in one fixed wording.

    Args:
        facts ([`Facts`]): The scene's facts, or those of a clip.

    Returns:
        `str`: A caption that no other scene shares.

    Example:
        >>> full_caption(Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of"))
        'two small sideways pigs left of a mushroom at the top on a blue background'
        >>> full_caption(MovingFacts("pig", 1, "small", "upright", "top", "blue", motion="left", speed="slow"))
        'a small pig moving left slowly at the top on a blue background'
    """
    parts = [_noun_phrase(facts, number=True, size=facts.size, orientation=_orientation(facts))]
    if isinstance(facts, MovingFacts):
        parts.append(motion_words(facts))
    else:
        parts.append(f"{facts.relation} {article(facts.second)} {facts.second}" if facts.second else "alone")
    if facts.position:
        parts.append(POSITION_PHRASES[facts.position])
    parts.append(f"on {article(facts.background)} {facts.background} background")
    return " ".join(parts)


@dataclass(frozen=True)
class Annotator:
    """A person who mentions each fact only sometimes.

    Args:
        verbosity (`float`): Probability of mentioning each fact, in [0, 1].
        generic (`float`): Probability of naming the category of the main group ("an animal") instead of its kind.
        small (`str`): Word for small.
        large (`str`): Word for large.
        short_background (`bool`): Says "on blue" instead of "on a blue background".
    """

    verbosity: float
    generic: float = 0.0
    small: str = "small"
    large: str = "large"
    short_background: bool = False


ANNOTATORS: tuple[Annotator, ...] = (
    Annotator(0.06, 0.9, short_background=True),
    Annotator(0.12, 0.8, small="little", large="big"),
    Annotator(0.20, 0.6),
    Annotator(0.28, 0.4, small="tiny", large="huge"),
    Annotator(0.40, 0.3),
)
"""From terse to verbose. On average a reference has about five words, a full caption more than twice as many."""


def annotate(rng: np.random.Generator, facts: Facts, annotator: Annotator) -> str:
    """One reference caption: true, but incomplete."""
    number, size, orientation, position, background, second, relation = rng.random(7) < annotator.verbosity
    generic = bool(rng.random() < annotator.generic)
    size_word = {"small": annotator.small, "large": annotator.large}[facts.size] if size else ""
    noun = _noun_phrase(
        facts,
        number=bool(number),
        size=size_word,
        orientation=_orientation(facts) if orientation else "",
        generic=generic,
    )
    parts = [noun]
    if isinstance(facts, MovingFacts):
        motion, speed = rng.random(2) < annotator.verbosity
        if words := motion_words(facts, motion=bool(motion), speed=bool(speed)):
            parts.append(words)
    elif facts.second and (second or relation):
        # A caption with the relation also names the other object; the converse does not hold.
        parts.append(f"{facts.relation if relation else 'with'} {article(facts.second)} {facts.second}")
    elif not facts.second and second:
        parts.append("alone")
    if position and facts.position:
        parts.append(POSITION_PHRASES[facts.position])
    if background:
        colour = facts.background
        parts.append(f"on {colour}" if annotator.short_background else f"on {article(colour)} {colour} background")
    return " ".join(parts)
