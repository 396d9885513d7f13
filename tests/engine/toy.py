"""A stage without models, whose workers can be killed in the middle."""

import os
import random
import signal
from pathlib import Path

import pyarrow as pa

from hf_captionrl.utils.parts import Stage


class Squares(Stage):
    """Squares and a random number per row; `kill_at` kills its process once, in the middle of that shard."""

    def __init__(self, folder, *, kill_at=None, times=1, fail_at=None, weights="a"):
        self.folder, self.kill_at, self.times, self.fail_at, self.weights = (
            Path(folder),
            kill_at,
            times,
            fail_at,
            weights,
        )
        self.loaded = False

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


class NotesGpus(Squares):
    """Notes the GPUs that its process sees."""

    def __init__(self, folder, needs_gpu):
        super().__init__(folder)
        self.needs_gpu = needs_gpu

    def load(self):
        super().load()
        (self.folder / f"gpus-{os.environ.get('CUDA_VISIBLE_DEVICES') or 'none'}").touch()


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
