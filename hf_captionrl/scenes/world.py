"""The rules of the embedded world: which scenes exist, and how they are drawn at random.

A scene is a 3 x 3 grid. One to three copies of one `kind` of thing stand side by side in one row; a second thing may
stand beside, above or below them. Everything a caption can say about a scene is in its `Facts`; the column in which
the group starts is a nuisance that no caption mentions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

__all__ = [
    "BACKGROUNDS",
    "CATEGORIES",
    "COUNTS",
    "EMOJI_KINDS",
    "OPPOSITES",
    "ORIENTATIONS",
    "POSITIONS",
    "RELATIONS",
    "ROWS_TO_SECOND",
    "SHAPE_KINDS",
    "SIZES",
    "Facts",
    "Scene",
    "category_of",
    "choose",
    "sample_scene",
    "vary_scene",
]

EMOJI_KINDS: tuple[str, ...] = (
    "apple",
    "bell",
    "bus",
    "butterfly",
    "cactus",
    "cake",
    "crab",
    "duck",
    "elephant",
    "fish",
    "frog",
    "house",
    "mushroom",
    "octopus",
    "penguin",
    "pig",
    "snail",
    "strawberry",
    "sunflower",
    "teapot",
    "tree",
    "turtle",
    "umbrella",
    "whale",
)
"""Kinds drawn with the committed Noto Emoji sprites."""

SHAPE_KINDS: tuple[str, ...] = tuple(
    f"{colour} {shape}"
    for shape in ("arrow", "crescent", "flag", "heart", "house", "triangle")
    for colour in ("red", "orange", "teal", "brown")
)
"""Kinds drawn without any asset. No shape looks the same upside down, so that orientation stays visible."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": (
        "butterfly",
        "crab",
        "duck",
        "elephant",
        "fish",
        "frog",
        "octopus",
        "penguin",
        "pig",
        "snail",
        "turtle",
        "whale",
    ),
    "plant": ("cactus", "sunflower", "tree"),
    "thing": ("apple", "bell", "bus", "cake", "house", "mushroom", "strawberry", "teapot", "umbrella"),
    "shape": SHAPE_KINDS,
}
"""What people call a kind when they do not look closely."""

COUNTS: tuple[int, ...] = (1, 2, 3)
SIZES: tuple[str, ...] = ("small", "large")
ORIENTATIONS: tuple[str, ...] = ("upright", "sideways", "upside down")
"""`upright` is the one value without a word: no caption ever says it. It is the declared hallucination probe."""
POSITIONS: tuple[str, ...] = ("top", "middle", "bottom")
BACKGROUNDS: tuple[str, ...] = ("black", "blue", "gray", "green", "pink", "purple", "white", "yellow")
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
OPPOSITES: dict[str, str] = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
"""Where the second object stands seen from the main group."""
ROWS_TO_SECOND: dict[str, int] = {"above": 1, "below": -1}
"""Rows from the main group down to the second object, where they differ."""

_P_SECOND = 0.6
"""Probability that a scene has a second object."""
_GRID = 3


@dataclass(frozen=True)
class Facts:
    """What is true of a scene, in words.

    Args:
        kind (`str`): Kind of the main group.
        count (`int`): Copies in the main group, 1 to 3.
        size (`str`): Size of everything in the scene.
        orientation (`str`): Orientation of the main group; `upright` has no word in any caption.
        position (`str`): Row of the main group.
        background (`str`): Background colour.
        second (`str`): Kind of the second object (one, upright, of the scene's size), or `""` if the group is alone.
        relation (`str`): Where the main group stands seen from the second object, or `""`.
    """

    kind: str
    count: int
    size: str
    orientation: str
    position: str
    background: str
    second: str = ""
    relation: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The facts as a plain dict, the form of the data set's `facts` column.

        Returns:
            `dict`: Field name to value.
        """
        return asdict(self)


@dataclass(frozen=True)
class Scene:
    """Facts plus the nuisance that decides the pixels.

    Args:
        facts ([`Facts`]): What captions may say.
        column (`int`): First column of the main group, 0 to 2.
    """

    facts: Facts
    column: int

    @property
    def row(self) -> int:
        """Row of the main group, 0 (top) to 2."""
        return POSITIONS.index(self.facts.position)

    def second_cell(self) -> tuple[int, int] | None:
        """Cell of the second object.

        Returns:
            `tuple[int, int]` or `None`: Row and column, or `None` if the main group is alone.
        """
        facts = self.facts
        if not facts.second:
            return None
        return {
            "left of": (self.row, self.column + facts.count),
            "right of": (self.row, self.column - 1),
            "above": (self.row + 1, self.column),
            "below": (self.row - 1, self.column),
        }[facts.relation]


def category_of(kind: str) -> str:
    """The category of a kind."""
    return next(category for category, kinds in CATEGORIES.items() if kind in kinds)


def _columns(facts: Facts) -> list[int]:
    """Columns at which the main group can start with everything on the grid; empty if the facts are impossible."""
    row = POSITIONS.index(facts.position)
    if (facts.relation == "above" and row == _GRID - 1) or (facts.relation == "below" and row == 0):
        return []
    first = 1 if facts.relation == "right of" else 0
    last = _GRID - facts.count - (1 if facts.relation == "left of" else 0)
    return list(range(first, last + 1))


def choose(rng: np.random.Generator, values: tuple[Any, ...]) -> Any:
    """Draw one of some values, each as likely as the others."""
    return values[int(rng.integers(len(values)))]


def sample_scene(rng: np.random.Generator, kinds: tuple[str, ...] = EMOJI_KINDS) -> Scene:
    """Draw one scene.

    Args:
        rng (`numpy.random.Generator`): Source of randomness; the same state gives the same scene.
        kinds (`tuple[str, ...]`): Kinds to choose from.

    Returns:
        [`Scene`]: A possible scene.
    """
    while True:
        kind = choose(rng, kinds)
        second = relation = ""
        if rng.random() < _P_SECOND:
            second = choose(rng, tuple(k for k in kinds if k != kind))
            relation = choose(rng, RELATIONS)
        facts = Facts(
            kind=kind,
            count=choose(rng, COUNTS),
            size=choose(rng, SIZES),
            orientation=choose(rng, ORIENTATIONS),
            position=choose(rng, POSITIONS),
            background=choose(rng, BACKGROUNDS),
            second=second,
            relation=relation,
        )
        columns = _columns(facts)
        if columns:
            return Scene(facts, choose(rng, tuple(columns)))


def vary_scene(rng: np.random.Generator, scene: Scene, kinds: tuple[str, ...] = EMOJI_KINDS) -> Scene:
    """A near-duplicate: one fact is drawn anew (a second object comes or goes with its relation).

    Args:
        rng (`numpy.random.Generator`): Source of randomness.
        scene ([`Scene`]): The scene to vary.
        kinds (`tuple[str, ...]`): Kinds to choose from.

    Returns:
        [`Scene`]: A possible scene whose facts differ from those of `scene`.
    """
    facts = scene.facts
    values: dict[str, tuple[Any, ...]] = {
        "kind": tuple(k for k in kinds if k != facts.second),
        "count": COUNTS,
        "size": SIZES,
        "orientation": ORIENTATIONS,
        "position": POSITIONS,
        "background": BACKGROUNDS,
        "second": ("", *(k for k in kinds if k != facts.kind)),
        "relation": RELATIONS,
    }
    while True:
        name = choose(rng, tuple(values))
        if name == "relation" and not facts.second:
            continue
        value = choose(rng, values[name])
        if value == getattr(facts, name):
            continue
        changed = replace(facts, **{name: value})
        if name == "second":
            relation = "" if not value else facts.relation or choose(rng, RELATIONS)
            changed = replace(changed, relation=relation)
        columns = _columns(changed)
        if columns:
            # The column stays if it can: a nuisance must not give the duplicate away.
            column = scene.column if scene.column in columns else choose(rng, tuple(columns))
            return Scene(changed, column)
