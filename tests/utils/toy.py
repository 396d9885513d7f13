"""Parts without models, whose workers can be killed in the middle, and clusters for Ray."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import run_parts


class Squares:
    """Squares and a random number per row; `kill_at` kills its process once, in the middle of that part."""

    def __init__(self, folder, *, kill_at=None, times=1, fail_at=None, weights="a"):
        self.folder, self.kill_at, self.times = Path(folder), kill_at, times
        self.fail_at, self.weights, self.loaded = fail_at, weights, False

    def load(self):
        self.loaded = True
        (self.folder / f"loaded-{os.getpid()}").touch()
        return {"weights": self.weights}

    def __call__(self, rows):
        assert self.loaded
        generator = random.Random(rows.start)
        found = []
        for row in rows:
            if row == self.fail_at:
                raise ValueError(f"Row {row} is bad. Remove it.")
            if row == self.kill_at and len(list(self.folder.glob("killed-*"))) < self.times:
                (self.folder / f"killed-{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            found.append({"row": row, "square": row * row, "random": generator.random()})
        return pa.Table.from_pylist(found)


class Slow(Squares):
    """Takes a second for the first part."""

    def __call__(self, rows):
        time.sleep(rows.start == 0)
        return super().__call__(rows)


class Waits(Squares):
    """Waits in one part until it is killed."""

    def __call__(self, rows):
        if rows.start == 10:
            (self.folder / f"waiting-{os.getpid()}").touch()
            signal.pause()
        return super().__call__(rows)


def run(folder, make_part, engine=None, settings=None, num_rows=23, rows_per_part=5, **more):
    """Write the parts of 23 rows."""
    settings = settings or {"model": "m"}
    more |= {"settings": settings, "rows_per_shard": rows_per_part}
    return run_parts(folder, num_rows, make_part, engine or EngineOptions(), **more)


def expected(rows=23, rows_per_part=5):
    """The rows, by a plain loop."""
    found = []
    for row in range(rows):
        if row % rows_per_part == 0:
            generator = random.Random(row)
        found.append({"row": row, "square": row * row, "random": generator.random()})
    return found


def pids(folder, kind):
    """Processes that loaded the stage, or were killed."""
    return {int(path.name.rpartition("-")[2]) for path in Path(folder).glob(f"{kind}-*")}


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    """Ray listens on 127.0.0.1 only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Otherwise Ray replaces 127.0.0.1 by the address of the network card.
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        yield


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes of one CPU each, on 127.0.0.1."""
    import ray
    from ray.cluster_utils import Cluster

    with on_this_machine():
        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.1"})
        try:
            found.add_node(**node, node_ip_address="127.0.0.1")
            yield found.address
        finally:
            ray.shutdown()
            found.shutdown()
