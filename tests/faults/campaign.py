"""The fault campaign: what an area is, how it is run, and what areas share.

Every area is a generator of `Trial`s: one for each fault, with what was lost and what was done twice. An area makes as
many faults as it is told and draws their moments from the seed.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.warm_process import WarmProcess

IN_TIME = 30.0
"""Seconds that `accelerate launch`, and many a scheduler, leaves between SIGTERM and SIGKILL."""


@dataclass
class Trial:
    """What one fault did."""

    survived: bool  # whether what came after it was as if it had not happened, or as was promised
    lost: int = 0  # rows, steps or files that were there before the fault and not after
    repeated: int = 0  # rows, steps or files that were made twice
    note: str = ""  # what went wrong


Area = Callable[[WarmProcess, Path, random.Random, int], Iterator[Trial]]
AREAS: dict[str, Area] = {}


def area(name: str) -> Callable[[Area], Area]:
    def register(function: Area) -> Area:
        AREAS[name] = function
        return function

    return register


def steps_of(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def damage(path: Path, rng: random.Random) -> str:
    """Truncate or remove a file; what was done."""
    if rng.random() < 0.5:
        os.truncate(path, rng.randrange(path.stat().st_size))
        return f"{path.name} truncated"
    path.unlink()
    return f"{path.name} removed"


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def run_area(warm_process: WarmProcess, name: str, kills: int, seed: int) -> dict:
    """Counts of the faults of an area, whose moments are drawn from the seed."""
    with tempfile.TemporaryDirectory() as folder:
        # The name in the seed: an area's moments do not depend on which others run.
        trials = list(AREAS[name](warm_process, Path(folder), random.Random(f"{seed}/{name}"), kills))
    return {
        "faults": len(trials),
        "survived": sum(trial.survived for trial in trials),
        "lost": sum(trial.lost for trial in trials),
        "repeated": sum(trial.repeated for trial in trials),
        "notes": [trial.note for trial in trials if not trial.survived],
    }
