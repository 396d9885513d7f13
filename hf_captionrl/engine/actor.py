"""The work of one process: it loads a stage once and writes its shards one after the other."""

from __future__ import annotations

import builtins
import json
import os
import traceback
from typing import Any

from hf_captionrl.engine.shards import ShardFolder
from hf_captionrl.engine.stages import Stage

__all__ = ["MAX_DEATHS", "Actor", "deaths_error", "pack_error", "raise_packed", "share_cores"]

MAX_DEATHS = 3
"""The run stops after this many deaths of workers without a finished shard in between."""


class Actor:
    """Runs a stage, which is loaded when the first shard is written."""

    def __init__(self, stage: Stage, shards: ShardFolder) -> None:
        self.stage, self.shards = stage, shards
        self._made_by: dict[str, Any] | None = None

    def attempt(self, shard: int) -> str:
        """Write one shard; return the packed error, or an empty text. Packed errors are the same in all kinds of workers."""
        try:
            self.work(shard)
        except Exception as error:
            return pack_error(error)
        return ""

    def work(self, shard: int) -> None:
        """Write one shard."""
        if self._made_by is None:
            self.stage.load()
            made_by = self.stage.made_by()
            self.shards.check_made_by(made_by)
            self._made_by = made_by
        self.shards.write(shard, self.stage(self.shards.rows(shard)), self.stage.schema(), self._made_by)


def share_cores(processes: int) -> None:
    """Tell the thread pools of this process that it is one of several on its machine, as torchrun does."""
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)


def deaths_error(deaths: int, left: int, number: int) -> RuntimeError:
    """The error of a run whose `number` workers die without finishing any of the `left` shards."""
    return RuntimeError(
        f"A worker died {deaths} times without finishing a shard ({left} are left), perhaps because memory ran "
        f"out. Use fewer --processes than {number}, or a smaller --batch_size; the same command resumes."
    )


def pack_error(error: Exception) -> str:
    """An error as text, with the traceback of this process."""
    # Only Unicode errors cannot be constructed from a message.
    kinds = (each for each in type(error).__mro__ if each.__module__ == "builtins" and "Unicode" not in each.__name__)
    kind = next(each.__name__ for each in kinds)
    name = "" if kind == type(error).__name__ else f"{type(error).__name__}: "
    return json.dumps([kind, f"{name}{error}", "".join(traceback.format_exception(error))])


def raise_packed(text: str) -> None:
    """Raise the error of a worker, if there is one, as its built-in class or as the built-in class that it inherits from."""
    if text:
        kind, message, trace = json.loads(text)
        error = getattr(builtins, kind)(message)
        error.add_note(trace)
        raise error
