"""What one process does: loads a stage once, and writes one shard after the other."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from hf_captionrl.engine.shards import ShardFolder
from hf_captionrl.engine.stages import Stage

__all__ = ["Actor", "raise_packed"]


class Actor:
    """A stage that is loaded for its first shard."""

    def __init__(self, stage: Stage, shards: ShardFolder) -> None:
        self.stage, self.shards = stage, shards
        self._made_by: dict[str, Any] | None = None

    def attempt(self, shard: int) -> bytes:
        """Write one shard; returns the packed error, or nothing. An error must not depend on how it is transported."""
        try:
            self.work(shard)
        except Exception as error:
            return _packed(error)
        return b""

    def work(self, shard: int) -> None:
        """Write one shard."""
        if self._made_by is None:
            self.stage.load()
            made_by = self.stage.made_by()
            self.shards.check_made_by(made_by)
            self._made_by = made_by
        self.shards.write(shard, self.stage(self.shards.rows(shard)), self.stage.schema(), self._made_by)


def _packed(error: Exception) -> bytes:
    """An error that another process can raise again, with the traceback of this one as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an error of this process # nosec B301
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def raise_packed(data: bytes) -> None:
    """Raise the error of a worker, if there is one."""
    if data:
        raise pickle.loads(data)  # by a worker of this run # nosec B301
