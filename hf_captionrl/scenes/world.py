"""The rules of the embedded world: which scenes exist, and how they are drawn at random.

A scene shows one to three copies of one `kind` of thing, side by side in one row of a 3 x 3 grid; a second thing may
stand beside, above or below them. Everything that a caption can say about a scene is in its `Facts`. Where exactly
things stand, and the light and noise of the picture, are nuisances that no caption mentions.

Facts depend on each other, as in photographs: kinds have Zipfian frequencies, and each kind prefers a background, a
position and a partner. A captioner can therefore guess facts from others, and is wrong if a scene goes against these preferences.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

# --- The kinds of things in the embedded world, from frequent to rare, and their names -------------------------------

_FROM_FREQUENT_TO_RARE = """
dog car cat tree house ball horse bus cup apple chair cake book train boat cow pizza umbrella hat sheep
clock truck duck banana bicycle shoe elephant sunflower dress fish camera rabbit guitar egg tent rose bear key burger
shirt frog mushroom helicopter giraffe bell cheese zebra balloon carrot monkey church teapot tulip pig crown lemon
tractor butterfly donut telephone penguin candle tomato fox scooter hen cookie basket lion turtle strawberry drum mouse
castle whale pear backpack tiger cactus trumpet owl snail pumpkin deer dolphin rocket palm violin crab parrot
watermelon squirrel bee camel snake kangaroo pineapple shark octopus hedgehog flamingo peacock
"""
EMOJI_KINDS: tuple[str, ...] = tuple(_FROM_FREQUENT_TO_RARE.split())
"""Kinds drawn with the committed Noto Emoji sprites, from the most frequent to the rarest."""

SHAPE_KINDS: tuple[str, ...] = ("arrow", "heart", "flag", "triangle", "crescent", "bolt", "drop", "pin")
"""Kinds drawn without any asset. No shape looks the same upside down, so that orientation stays visible."""

_OTHERS = {
    category: tuple(kinds.split())
    for category, kinds in {
        "plant": "tree sunflower rose tulip cactus palm mushroom",
        "food": "apple cake pizza banana egg burger cheese carrot lemon donut tomato cookie strawberry pear pumpkin watermelon "
        "pineapple",
        "vehicle": "car bus train boat truck bicycle helicopter tractor scooter rocket",
        "building": "house tent church castle",
        "thing": "ball cup chair book umbrella hat clock shoe dress camera guitar key shirt bell balloon teapot crown "
        "telephone candle basket drum backpack trumpet violin",
    }.items()
}

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": tuple(kind for kind in EMOJI_KINDS if not any(kind in kinds for kinds in _OTHERS.values())),
    **_OTHERS,
    "shape": SHAPE_KINDS,
}
"""Kinds by category, which is the less specific name."""

_SYNONYMS = dict(
    pair.split(":")
    for pair in """
backpack:rucksack ball:football bicycle:bike boat:sailboat burger:hamburger car:automobile castle:palace cat:kitten
church:chapel cup:mug dog:puppy donut:doughnut dress:gown hen:chicken horse:pony house:cottage monkey:ape mouse:rat
rabbit:bunny scooter:moped sheep:lamb snake:serpent telephone:phone train:locomotive truck:lorry
""".split()
)

_PLURALS = dict(
    pair.split(":")
    for pair in """
bunny:bunnies butterfly:butterflies bus:buses cactus:cacti church:churches dress:dresses fish:fish food:food
gown:gowns kitten:kittens lorry:lorries mouse:mice octopus:octopuses deer:deer pony:ponies puppy:puppies sheep:sheep
strawberry:strawberries tomato:tomatoes fox:foxes
""".split()
)

NATURAL_COLOURS: dict[str, str] = {
    kind: colour
    for colour, kinds in {
        "red": "apple balloon backpack car clock crab drum octopus rose strawberry teapot telephone tomato",
        "golden": "banana bell cheese crown duck giraffe key lemon lion scooter trumpet",
        "green": "cactus frog palm pear snake tree turtle",
        "blue": "bus dolphin dress fish shirt shoe umbrella whale",
    }.items()
    for kind in kinds.split()
}
"""Natural colours of kinds. Nothing is painted in its natural colour."""


def category_of(kind: str) -> str:
    """The category of a kind."""
    return next(category for category, kinds in CATEGORIES.items() if kind in kinds)


def names_of(kind: str) -> tuple[str, ...]:
    """Names of a kind, the most frequent first."""
    return (kind, _SYNONYMS[kind]) if kind in _SYNONYMS else (kind,)


def plural(name: str) -> str:
    """Plural of the name of a kind or category."""
    return _PLURALS.get(name, name + "s")


@functools.cache
def cumulative_probabilities(kinds: tuple[str, ...]) -> tuple[float, ...]:
    """Cumulative Zipfian probabilities of kinds that are ordered from frequent to rare.

    They are proportional to `1 / (rank + 2) ** 1.2`, where the first rank is 1. The last one, 1, is left out.
    """
    weights = [(rank + 2.0) ** -1.2 for rank in range(1, len(kinds) + 1)]
    total = math.fsum(weights)
    return tuple(math.fsum(weights[: at + 1]) / total for at in range(len(kinds) - 1))


# --- Sets of scenes or clips that differ pairwise in one or two facts ------------------------------------------------

F = TypeVar("F")


def sample_look_alikes_of(
    rng: np.random.Generator,
    size: int,
    draw: Callable[[], tuple[F, dict[str, tuple[Any, ...]]]],
    change: Callable[[F, dict[str, Any]], F | None],
    weights: Mapping[str, float],
) -> list[F]:
    """Facts that differ pairwise in one or two values; all combinations of the values of two facts are equally likely."""
    while True:
        base, values = draw()
        names = [name for name in weights if name in values]
        p = np.array([weights[name] for name in names], dtype=float)
        first, second = (names[i] for i in rng.choice(len(names), 2, replace=False, p=p / p.sum()))
        pairs = itertools.product(values[first], values[second])
        changed = [change(base, {first: a, second: b}) for a, b in pairs]
        others = [facts for facts in dict.fromkeys(changed) if facts is not None and facts != base]
        if len(others) >= size - 1:
            chosen = [base, *(others[i] for i in rng.choice(len(others), size - 1, replace=False))]
            return [chosen[i] for i in rng.permutation(size)]


# --- The rules of the embedded world: which scenes exist, and how they are drawn at random ---------------------------

COUNTS: tuple[int, ...] = (1, 2, 3)
SIZES: tuple[str, ...] = ("small", "large")
ORIENTATIONS: tuple[str, ...] = ("upright", "sideways", "upside down")
POSITIONS: tuple[str, ...] = ("top", "middle", "bottom")
BACKGROUNDS: tuple[str, ...] = ("black", "blue", "gray", "green", "pink", "purple", "white", "yellow")
COLOURS: tuple[str, ...] = ("", "red", "blue", "green", "golden", "purple")
"""Colours in which a thing may be painted; `""` is its natural colour."""
PATTERNS: tuple[str, ...] = ("", "striped", "dotted")
WEATHERS: tuple[str, ...] = ("", "rain", "snow")
TIMES: tuple[str, ...] = ("", "night")
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
"""Where the main group stands seen from the second object."""
OPPOSITES: dict[str, str] = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
"""Where the second object stands seen from the main group."""
ROWS_TO_SECOND: dict[str, int] = {"above": 1, "below": -1}
"""Rows from the main group down to the second object, where they differ."""

FACT_VALUES: dict[str, tuple[Any, ...]] = {
    "count": COUNTS,
    "size": SIZES,
    "orientation": ORIENTATIONS,
    "position": POSITIONS,
    "background": BACKGROUNDS,
    "relation": RELATIONS,
    "colour": COLOURS,
    "second_colour": COLOURS,
    "pattern": PATTERNS,
    "weather": WEATHERS,
    "time": TIMES,
}
"""Values of the facts that are not kinds."""

UNMARKED: dict[str, str] = {
    "orientation": "upright",
    **dict.fromkeys(("colour", "second_colour", "pattern", "weather", "time"), ""),
}
"""Values that have no word, because no one mentions them. A captioner that always mentions such a fact is wrong there."""

_P_SECOND = 0.65
"""Probability of a second object."""
_P_PREFERRED = 0.65
"""Probability that background, position and partner are those that the kind prefers."""
_P_UNMARKED = {"orientation": 0.6, "colour": 0.5, "second_colour": 0.5, "pattern": 0.55, "weather": 0.55, "time": 0.7}
_NUM_PARTNERS = 24
_GRID = 3


@dataclass(frozen=True)
class Facts:
    """Facts of a scene, in words.

    Args:
        kind (`str`): Kind of the main group.
        count (`int`): Copies in the main group, 1 to 3.
        size (`str`): Size of everything in the scene.
        orientation (`str`): Orientation of the main group.
        position (`str`): Row of the main group.
        background (`str`): Background colour.
        second (`str`): Kind of the second object (one, upright, of the scene's size), or `""` if the group is alone.
        relation (`str`): Where the main group stands seen from the second object, or `""`.
        colour (`str`): Colour in which the main group is painted, or `""`.
        second_colour (`str`): The same of the second object.
        pattern (`str`): Pattern of the background, or `""`.
        weather (`str`): Rain, snow or `""`.
        time (`str`): `"night"` or `""`.
    """

    kind: str
    count: int
    size: str
    orientation: str
    position: str
    background: str
    second: str = ""
    relation: str = ""
    colour: str = ""
    second_colour: str = ""
    pattern: str = ""
    weather: str = ""
    time: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The facts as a plain dict, the form of the data set's `facts` column."""
        # Not dataclasses.asdict, which copies each value deeply and takes ten times longer.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Scene:
    """Facts plus the nuisances that decide the pixels.

    Args:
        facts ([`Facts`]): What captions may say.
        column (`int`): First column of the main group, 0 to 2.
        nuisance (`int`): Seed of places, light, blur, noise and clutter.
    """

    facts: Facts
    column: int
    nuisance: int = 0

    @property
    def row(self) -> int:
        """Row of the main group, 0 (top) to 2."""
        return POSITIONS.index(self.facts.position)

    def second_cell(self) -> tuple[int, int] | None:
        """Row and column of the second object, or None if the main group is alone."""
        facts = self.facts
        if not facts.second:
            return None
        return {
            "left of": (self.row, self.column + facts.count),
            "right of": (self.row, self.column - 1),
            "above": (self.row + 1, self.column),
            "below": (self.row - 1, self.column),
        }[facts.relation]


class Preferences(NamedTuple):
    """Preferred values of a kind."""

    background: str
    position: str
    partner: str  # kind of the second object


@functools.cache
def preferences(kind: str, kinds: tuple[str, ...] = EMOJI_KINDS) -> Preferences:
    """Preferences of a kind. Each value is preferred by about equally many kinds; no two frequent kinds share all three."""
    at = kinds.index(kind)
    # Steps without a common divisor with the numbers of values, so that all of them occur. Partners are frequent kinds.
    partner = kinds[(at * 5 + 7) % min(_NUM_PARTNERS, len(kinds))]
    return Preferences(
        BACKGROUNDS[(3 * at + at // len(BACKGROUNDS)) % len(BACKGROUNDS)],
        POSITIONS[(at + at // len(POSITIONS)) % len(POSITIONS)],
        partner if partner != kind else kinds[at - 1],
    )


def goes_against_preferences(facts: Facts, kinds: tuple[str, ...] = EMOJI_KINDS) -> bool:
    """Whether background, position and partner (if there is one) all differ from the preferences of the kind."""
    preferred = preferences(facts.kind, kinds)
    return (
        facts.background != preferred.background
        and facts.position != preferred.position
        and facts.second != preferred.partner
    )


def choose(rng: np.random.Generator, values: tuple[Any, ...]) -> Any:
    """Draw one of several values, all equally likely."""
    return values[int(rng.integers(len(values)))]


def usual(rng: np.random.Generator, preferred: Any, values: tuple[Any, ...], against_preferences: bool) -> Any:
    """The preferred value, or another one."""
    if not against_preferences and rng.random() < _P_PREFERRED:
        return preferred
    return choose(rng, tuple(value for value in values if value != preferred))


def marked(rng: np.random.Generator, fact: str, values: tuple[str, ...]) -> str:
    """The value without a word, or one of those that have one."""
    unmarked = UNMARKED[fact]
    if rng.random() < _P_UNMARKED[fact]:
        return unmarked
    return str(choose(rng, tuple(value for value in values if value != unmarked)))


def draw_kind(rng: np.random.Generator, kinds: tuple[str, ...], other_than: tuple[str, ...] = ()) -> str:
    """Draw a kind by its frequency."""
    while True:
        kind = kinds[bisect.bisect(cumulative_probabilities(kinds), rng.random())]
        if kind not in other_than:
            return kind


def _columns(facts: Facts) -> list[int]:
    """Columns at which the main group can start with everything on the grid; empty if the facts are impossible."""
    row = POSITIONS.index(facts.position)
    if (facts.relation == "above" and row == _GRID - 1) or (facts.relation == "below" and row == 0):
        return []
    first = 1 if facts.relation == "right of" else 0
    last = _GRID - facts.count - (1 if facts.relation == "left of" else 0)
    return list(range(first, last + 1))


def has_possible_colours(facts: Facts) -> bool:
    """Whether nothing is painted in its natural colour, or in that of the background, where it would be invisible."""
    painted = ((facts.kind, facts.colour), (facts.second, facts.second_colour))
    return all(not c or c not in (NATURAL_COLOURS.get(kind), facts.background) for kind, c in painted)


def _is_possible(facts: Facts) -> bool:
    return has_possible_colours(facts) and facts.kind != facts.second and bool(_columns(facts))


def _place(rng: np.random.Generator, facts: Facts) -> Scene:
    return Scene(facts, choose(rng, tuple(_columns(facts))), int(rng.integers(2**31)))


def sample_scene(
    rng: np.random.Generator, kinds: tuple[str, ...] = EMOJI_KINDS, *, against_preferences: bool = False
) -> Scene:
    """Draw one scene.

    Args:
        rng (`numpy.random.Generator`): Source of randomness; the same state gives the same scene.
        kinds (`tuple[str, ...]`): Kinds to choose from, the most frequent first.
        against_preferences (`bool`): Whether background, position and partner are never those that the kind prefers.

    Returns:
        [`Scene`]: A possible scene.
    """
    while True:
        kind = draw_kind(rng, kinds)
        preferred = preferences(kind, kinds)
        second = relation = second_colour = ""
        if rng.random() < _P_SECOND:
            if not against_preferences and rng.random() < _P_PREFERRED:
                second = preferred.partner
            else:
                second = draw_kind(rng, kinds, (kind, preferred.partner))
            relation = choose(rng, RELATIONS)
            second_colour = marked(rng, "second_colour", COLOURS)
        facts = Facts(
            kind=kind,
            count=choose(rng, COUNTS),
            size=choose(rng, SIZES),
            orientation=marked(rng, "orientation", ORIENTATIONS),
            position=usual(rng, preferred.position, POSITIONS, against_preferences),
            background=usual(rng, preferred.background, BACKGROUNDS, against_preferences),
            second=second,
            relation=relation,
            colour=marked(rng, "colour", COLOURS),
            second_colour=second_colour,
            pattern=marked(rng, "pattern", PATTERNS),
            weather=marked(rng, "weather", WEATHERS),
            time=marked(rng, "time", TIMES),
        )
        if _is_possible(facts):
            return _place(rng, facts)


def _values(facts: Facts, kinds: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Values that each fact of a scene may have."""
    values = {"kind": kinds, "second": kinds} | FACT_VALUES
    if not facts.second:
        values = {name: known for name, known in values.items() if name not in ("second", "relation", "second_colour")}
    return values


def vary_scene(rng: np.random.Generator, scene: Scene, kinds: tuple[str, ...] = EMOJI_KINDS) -> Scene:
    """A near-duplicate: another picture in which one fact is different."""
    values = _values(scene.facts, kinds)
    while True:
        name = choose(rng, tuple(values))
        changed = replace(scene.facts, **{name: choose(rng, values[name])})
        if changed != scene.facts and _is_possible(changed):
            return _place(rng, changed)


# Weights of the facts in which the images of a clique differ; the largest are those of facts that people rarely mention.
# Orientation has a small one, because it is hard to see for many kinds.
_CLIQUE_WEIGHTS = {"orientation": 1} | dict.fromkeys("position size pattern weather colour second_colour".split(), 3)
_CLIQUE_WEIGHTS |= {"time": 2, "relation": 2, "background": 1, "count": 1}


def sample_look_alikes(
    rng: np.random.Generator, size: int, kinds: tuple[str, ...] = EMOJI_KINDS, *, against_preferences: bool = False
) -> list[Scene]:
    """Scenes that differ pairwise in one or two facts, in random order; two facts vary, all others are equal.

    With `against_preferences` they go against what their kind prefers.
    """

    def draw() -> tuple[Facts, dict[str, tuple[Any, ...]]]:
        facts = sample_scene(rng, kinds, against_preferences=against_preferences).facts
        return facts, _values(facts, kinds)

    def change(facts: Facts, changes: dict[str, Any]) -> Facts | None:
        changed = replace(facts, **changes)
        usual_again = against_preferences and not goes_against_preferences(changed, kinds)
        return changed if _is_possible(changed) and not usual_again else None

    return [_place(rng, facts) for facts in sample_look_alikes_of(rng, size, draw, change, _CLIQUE_WEIGHTS)]
