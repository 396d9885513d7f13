"""A stage without models, whose workers can be killed in the middle, and clusters for Ray."""

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

from hf_captionrl.utils.parts import Stage


class Squares(Stage):
    """Squares and a random number per row; `kill_at` kills its process once, in the middle of that shard."""

    def __init__(self, folder, *, kill_at=None, times=1, fail_at=None, weights="a"):
        self.folder, self.kill_at, self.times = Path(folder), kill_at, times
        self.fail_at, self.weights, self.loaded = fail_at, weights, False

    def load(self):
        self.loaded = True
        (self.folder / f"loaded-{os.getpid()}").touch()

    def made_by(self):
        return {"weights": self.weights}

    def schema(self):
        return pa.schema([("row", pa.int64()), ("square", pa.int64()), ("random", pa.float64())])

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
        return found


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


def expected(rows, rows_per_shard):
    """The rows, by a plain loop."""
    found = []
    for row in range(rows):
        if row % rows_per_shard == 0:
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
