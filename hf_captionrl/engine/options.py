"""Options of commands that run on shards; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hf_captionrl.options import CommandOptions, option, positive

__all__ = ["EngineOptions"]


@dataclass
class EngineOptions(CommandOptions):
    """How shards are processed."""

    heading: ClassVar[str] = "engine"

    engine: Literal["processes", "ray"] | None = option(
        None, help="'processes' of this machine, or actors of a 'ray' cluster; both write a folder of Parquet shards"
    )
    processes: int | None = option(
        None,
        parse=positive,
        metavar="N",
        help="number of processes, or of actors of the cluster (default: one per GPU; without GPUs, or if the work needs none, "
        "one process, or for Ray one actor per machine or per CPU)",
    )
    address: str | None = option(
        None,
        metavar="ADDRESS",
        help="address of the Ray cluster; 'auto': the one of this machine (default: start one)",
    )
    rows_per_shard: int | None = option(
        None, parse=positive, metavar="N", help="rows per Parquet file (default: 64 batches)"
    )

    @property
    def uses_shards(self) -> bool:
        """Whether the command writes a folder of shards."""
        return self.engine is not None or self.processes is not None

    def check_engine(self) -> None:
        """Refuse options that have no effect.

        Raises:
            ValueError: If an option has no effect.
        """
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"--address {self.address!r} has an effect only with Ray. Use --engine ray.")
        if self.rows_per_shard is not None and not self.uses_shards:
            raise ValueError(
                f"--rows_per_shard {self.rows_per_shard} has an effect only with shards. Use --processes or --engine."
            )
