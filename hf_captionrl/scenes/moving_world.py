"""The rules of the moving world: one sprite that moves over some cells of the grid, or rests.

Everything that a caption can say about a clip is in its `MovingFacts`. A clip to the left is a clip to the right played
backwards, so only the order of the frames distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_captionrl.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    EMOJI_KINDS,
    FACT_VALUES,
    ORIENTATIONS,
    PATTERNS,
    POSITIONS,
    SIZES,
    Facts,
    choose,
    draw_kind,
    has_possible_colours,
    marked,
    preferences,
    sample_look_alikes_of,
    usual,
)

DIRECTIONS: tuple[str, ...] = ("left", "right", "up", "down")
STILL = "still"
"""Motion of a sprite that rests."""
SPEEDS: tuple[str, ...] = ("slow", "fast")
"""Slow is one cell per clip, fast is two."""

_P_STILL = 0.2
"""Probability that nothing moves."""
_STEP = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0), STILL: (0, 0)}
_CELLS = {"slow": 1, "fast": 2, "": 0}
ADVERBS = {"slow": "slowly", "fast": "fast"}
"""Adverbs by speed."""

MOTION_PHRASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("verb", ""): ("moving", "going", "sliding", "heading", "running", "moves", "goes", "runs", "in motion"),
    ("direction", "left"): ("left", "to the left", "leftwards", "leftward"),
    ("direction", "right"): ("right", "to the right", "rightwards", "rightward"),
    ("direction", "up"): ("up", "upwards", "upward"),
    ("direction", "down"): ("down", "downwards", "downward"),
    ("speed", "slow"): ("slowly", "slow"),
    ("speed", "fast"): ("fast", "quickly", "quick", "rapidly"),
    ("motion", STILL): ("at rest", "resting", "still", "standing still", "not moving", "motionless"),
}
"""Phrases about motion by `(type of token, value)`; a direction needs a verb before it."""


@dataclass(frozen=True)
class MovingFacts(Facts):
    """What is true of a clip, in words. It shows one thing (`count` 1, no `second`).

    `position` is the row of the thing; it is `""` if the thing moves up or down.
    """

    motion: str = STILL  # one of `DIRECTIONS`, or `STILL`
    speed: str = ""  # one of `SPEEDS`, or `""` if nothing moves


@dataclass(frozen=True)
class Clip:
    """Facts plus the nuisance that decides the pixels: places, light, blur, noise and clutter."""

    facts: MovingFacts
    row: int  # first row of the thing, 0 to 2
    column: int  # its first column, 0 to 2
    nuisance: int = 0  # seed

    def cell(self, moment: float) -> tuple[float, float]:
        """Row and column of the thing, which moves at constant speed, after a share of the clip in [0, 1]."""
        down, right = _STEP[self.facts.motion]
        way = _CELLS[self.facts.speed] * moment
        return self.row + down * way, self.column + right * way


def _starts(facts: MovingFacts) -> list[tuple[int, int]]:
    """Cells at which the thing can start so that it ends on the grid."""
    down, right = (step * _CELLS[facts.speed] for step in _STEP[facts.motion])
    rows = [POSITIONS.index(facts.position)] if facts.position else range(3)
    return [(r, c) for r in rows for c in range(3) if 0 <= r + down <= 2 and 0 <= c + right <= 2]


def _is_possible(facts: MovingFacts) -> bool:
    return has_possible_colours(facts) and bool(_starts(facts))


def _place(rng: np.random.Generator, facts: MovingFacts) -> Clip:
    row, column = choose(rng, tuple(_starts(facts)))
    return Clip(facts, row, column, int(rng.integers(2**31)))


def sample_clip(
    rng: np.random.Generator, kinds: tuple[str, ...] = EMOJI_KINDS, *, against_preferences: bool = False
) -> Clip:
    """Draw one possible clip. The same state of `rng` gives the same clip; `kinds` begin with the most frequent.

    With `against_preferences` background and position are never those that the kind prefers.
    """
    while True:
        kind = draw_kind(rng, kinds)
        preferred = preferences(kind, kinds)
        motion = STILL if rng.random() < _P_STILL else choose(rng, DIRECTIONS)
        facts = MovingFacts(
            kind=kind,
            count=1,
            size=choose(rng, SIZES),
            orientation=marked(rng, "orientation", ORIENTATIONS),
            position=""
            if motion in ("up", "down")
            else usual(rng, preferred.position, POSITIONS, against_preferences),
            background=usual(rng, preferred.background, BACKGROUNDS, against_preferences),
            colour=marked(rng, "colour", COLOURS),
            pattern=marked(rng, "pattern", PATTERNS),
            motion=motion,
            speed="" if motion == STILL else choose(rng, SPEEDS),
        )
        if _is_possible(facts):
            return _place(rng, facts)


_CLIQUE_WEIGHTS = {"motion": 4, "orientation": 2, "size": 2, "pattern": 2, "colour": 2, "position": 2, "background": 1}


def sample_clips_alike(
    rng: np.random.Generator, size: int, kinds: tuple[str, ...] = EMOJI_KINDS, *, against_preferences: bool = False
) -> list[Clip]:
    """Clips that differ pairwise in one or two facts; speed and position, which depend on the motion, do not count."""

    def draw() -> tuple[MovingFacts, dict[str, tuple[Any, ...]]]:
        facts = sample_clip(rng, kinds, against_preferences=against_preferences).facts
        values = FACT_VALUES | {"motion": (*DIRECTIONS, STILL)}
        return facts, values if facts.position else {n: known for n, known in values.items() if n != "position"}

    def change(facts: MovingFacts, changes: dict[str, Any]) -> MovingFacts | None:
        changed = replace(facts, **changes)
        if "motion" in changes:
            # Speed and position stay the same where possible, so that only the motion differs.
            still, vertical = changed.motion == STILL, changed.motion in ("up", "down")
            changed = replace(
                changed,
                speed="" if still else facts.speed or SPEEDS[0],
                position="" if vertical else facts.position or POSITIONS[1],
            )
        return changed if _is_possible(changed) else None

    return [_place(rng, facts) for facts in sample_look_alikes_of(rng, size, draw, change, _CLIQUE_WEIGHTS)]


class MotionReader:
    """Judges the claims of a caption about the motion, word by word.

    `claim` is called for each claim with its attribute, value and words, and whether it is true.
    """

    def __init__(self, facts: MovingFacts, claim: Callable[[str, str, str, bool], None]) -> None:
        self.facts = facts
        self.claim = claim
        self.verb = ""  # waits for its direction
        self.unknown: list[str] = []

    def read(self, kind: str, value: str, text: str) -> bool:
        """Take a token of the caption."""
        if kind == "speed":  # may stand between verb and direction
            self.claim("speed", value, text, value == self.facts.speed)
            return True
        if kind == "direction":
            if self.verb:
                self.claim("motion", value, f"{self.verb} {text}", value == self.facts.motion)
                self.verb = ""
            else:
                self.unknown.append(text)
            return True
        self.close()
        if kind == "verb":
            self.verb = text
        elif kind == "motion":
            self.claim("motion", value, text, value == self.facts.motion)
        return kind in ("verb", "motion")

    def close(self) -> None:
        """Judge a verb without a direction: the claim that something moves is true or false, but recalls no fact."""
        if self.verb:
            self.claim("moves", "moving", self.verb, self.facts.motion != STILL)
            self.verb = ""
