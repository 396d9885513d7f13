"""A stage: what each process does with a shard of rows."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Stage", "seed_of_batch"]


def seed_of_batch(seed: int, image_id: str) -> int:
    """Seed of the samples of one batch. It is the same in every process and does not depend on skipped batches.

    Args:
        seed: Seed of the command.
        image_id: Id of the first image of the batch.

    Returns:
        A seed for `torch.manual_seed`, at most 56 bits.
    """
    text = f"{seed}/{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Stage(ABC):
    """A function of a shard of rows, with models and data that are loaded once per process.

    A stage is pickled and sent to every process before `load`, so `__init__` holds only settings. Every process reads its
    rows from the source itself: on several machines, paths must name the same data on each.

    The result of a shard must not depend on the process or on earlier shards. Seeds come from the rows.

    Attributes:
        needs_gpu (`bool`): Whether the stage computes on a GPU if there is one. By default, each GPU then has one process; a
            stage without need has as many Ray actors as the cluster has CPUs.
    """

    needs_gpu: bool = True

    @abstractmethod
    def load(self) -> None:
        """Load models and data. Called once per process, before the first shard."""

    def made_by(self) -> dict[str, Any]:
        """Facts that are known after `load` and affect the result, such as a fingerprint of the weights; equal in all shards.

        Returns:
            `dict[str, Any]`: Values that JSON can represent.
        """
        return {}

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Columns of the result.

        Returns:
            `pyarrow.Schema`: Schema of every shard.
        """

    @abstractmethod
    def __call__(self, rows: range) -> list[dict[str, Any]]:
        """Process one shard.

        Args:
            rows (`range`): Numbers of the rows in the source.

        Returns:
            `list[dict[str, Any]]`: Rows of the result, in the order of the source.
        """
