"""The kinds of things in the embedded world, from frequent to rare, and their names."""

from __future__ import annotations

import functools
import math

__all__ = [
    "CATEGORIES",
    "EMOJI_KINDS",
    "NATURAL_COLOURS",
    "SHAPE_KINDS",
    "category_of",
    "cumulative_probabilities",
    "names_of",
    "plural",
]

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

_PLANTS = "tree sunflower rose tulip cactus palm mushroom"
_FOOD = (
    "apple cake pizza banana egg burger cheese carrot lemon donut tomato cookie strawberry pear pumpkin watermelon "
    "pineapple"
)
_VEHICLES = "car bus train boat truck bicycle helicopter tractor scooter rocket"
_BUILDINGS = "house tent church castle"
_THINGS = (
    "ball cup chair book umbrella hat clock shoe dress camera guitar key shirt bell balloon teapot crown telephone candle "
    "basket drum backpack trumpet violin"
)
_OTHERS = {
    "plant": tuple(_PLANTS.split()),
    "food": tuple(_FOOD.split()),
    "vehicle": tuple(_VEHICLES.split()),
    "building": tuple(_BUILDINGS.split()),
    "thing": tuple(_THINGS.split()),
}

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": tuple(kind for kind in EMOJI_KINDS if not any(kind in kinds for kinds in _OTHERS.values())),
    **_OTHERS,
    "shape": SHAPE_KINDS,
}
"""Kinds by category, which is the less specific name."""

_SYNONYMS = {
    "backpack": "rucksack",
    "ball": "football",
    "bicycle": "bike",
    "boat": "sailboat",
    "burger": "hamburger",
    "car": "automobile",
    "castle": "palace",
    "cat": "kitten",
    "church": "chapel",
    "cup": "mug",
    "dog": "puppy",
    "donut": "doughnut",
    "dress": "gown",
    "hen": "chicken",
    "horse": "pony",
    "house": "cottage",
    "monkey": "ape",
    "mouse": "rat",
    "rabbit": "bunny",
    "scooter": "moped",
    "sheep": "lamb",
    "snake": "serpent",
    "telephone": "phone",
    "train": "locomotive",
    "truck": "lorry",
}

_PLURALS = {
    "bunny": "bunnies",
    "butterfly": "butterflies",
    "bus": "buses",
    "cactus": "cacti",
    "church": "churches",
    "dress": "dresses",
    "fish": "fish",
    "food": "food",
    "gown": "gowns",
    "kitten": "kittens",
    "lorry": "lorries",
    "mouse": "mice",
    "octopus": "octopuses",
    "deer": "deer",
    "pony": "ponies",
    "puppy": "puppies",
    "sheep": "sheep",
    "strawberry": "strawberries",
    "tomato": "tomatoes",
    "fox": "foxes",
}

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

    They are proportional to `1 / (rank + 2) ** 1.2`, where the first rank is 1.
    The last one, 1, is left out.
    """
    weights = [(rank + 2.0) ** -1.2 for rank in range(1, len(kinds) + 1)]
    total = math.fsum(weights)
    return tuple(math.fsum(weights[: at + 1]) / total for at in range(len(kinds) - 1))
