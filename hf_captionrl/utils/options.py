"""Options of commands and configurations, declared once as fields of a dataclass; light to import, because `--help` needs them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import typing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

# `utils.option_parser` reads these dataclasses for commands and recipes. The annotation of a field is the type of the option and the range
# of its values. A command's options are listed before inherited ones; each base class is a group.

T = TypeVar("T")
LARGEST = 2**32 - 1
"""The largest number of any option, which is the largest seed."""


@dataclass(frozen=True)
class Range:
    """Numbers that a field accepts; part of its annotation, so that TrlParser, `captionrl` and Python programs share it.

    `steps: Annotated[int, Range(1)] = ...`, or one of the names below. `check_values` compares every field with it.
    """

    at_least: float = -LARGEST
    above: float = -math.inf
    at_most: float = LARGEST
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.at_least <= number <= self.at_most and self.above < number < self.below

    def __str__(self) -> str:
        low = f"above {self.above:.10g}" if self.above >= self.at_least else f"at least {self.at_least:.10g}"
        high = f"below {self.below:.10g}" if self.below <= self.at_most else f"at most {self.at_most:.10g}"
        return f"{low} and {high}"


Number = Annotated[float, Range()]
Positive = Annotated[int, Range(at_least=1)]
NotNegative = Annotated[int, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, below=1)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]


@functools.cache
def _rules(cls: Any) -> dict[str, tuple[Range | None, tuple[Any, ...]]]:
    """Range and choices of each field that has one."""

    def rule(hint: Any) -> tuple[Range | None, tuple[Any, ...]]:
        if typing.get_origin(hint) is Literal:
            return None, typing.get_args(hint)
        ranges = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Range)]
        inner = [rule(part) for part in typing.get_args(hint) if typing.get_origin(hint) is not dict]
        return next((r for r in [*((numbers, ()) for numbers in ranges), *inner] if any(r)), (None, ()))

    return {name: rule(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}


def check_values(options: Any) -> None:
    """Refuse values outside of the ranges and choices that the annotations of a dataclass declare. None is accepted."""
    for name, (numbers, choices) in _rules(type(options)).items():  # type: ignore[arg-type]
        value = getattr(options, name, None)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if numbers and isinstance(one, (int, float)) and one not in numbers:
                raise ValueError(f"{name} is {one}, but must be {numbers}.")
            if choices and one is not None and one not in choices:
                raise ValueError(f"{name} is {one!r}, but must be one of {', '.join(map(repr, choices))}.")


def documented(default: Any, help: str, **more: Any) -> Any:
    """A field with a help text, and `aliases`, as the arguments of training have; HfArgumentParser reads them."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


def option(default: Any = dataclasses.MISSING, *, help: str, **shown: Any) -> Any:
    """A field of an options dataclass; required without a default.

    `shown` are `metavar`, `nargs`, `aliases` and `choices` of argparse, `group` (a heading), and `positional`.
    """
    metadata = {"help": help, **shown}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), kw_only=True, metadata=metadata)
    return dataclasses.field(default=default, kw_only=True, metadata=metadata)


@dataclass
class CommandOptions:
    """Output."""

    heading: ClassVar[str] = "output"
    examples: ClassVar[str] = ""

    json: bool = option(False, help="print only the result, as one JSON object; everything else goes to stderr")
    traceback: bool = option(False, help="show the traceback of an error")


@dataclass
class SeedOptions:
    """Randomness."""

    seed: NotNegative = option(0, help="seed of all random choices")


@dataclass
class DeviceOptions:
    """Where models run."""

    device: str | None = option(
        None, metavar="NAME", help="device of the model: cpu, cuda, cuda:1, ... (default: a GPU if there is one)"
    )


@dataclass
class CacheOptions:
    """Where features are kept."""

    cache_dir: str | None = option(None, metavar="DIR", help="folder of the feature cache")


@dataclass
class WritingOptions:
    """How many captions are written at once, and their length."""

    heading: ClassVar[str] = "captioner"

    batch_size: Positive = option(16, help="images captioned at once")
    max_new_tokens: Positive = option(40, help="longest caption in tokens")


def options_from(cls: type[T], arguments: argparse.Namespace) -> T:
    """The options dataclass that parsed arguments fill."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    options = cls(**{name: value for name, value in vars(arguments).items() if name in names})
    check_values(options)
    return options


@dataclass
class EngineOptions(CommandOptions):
    """How shards are processed."""

    heading: ClassVar[str] = "engine"

    engine: Literal["processes", "ray"] | None = option(
        None, help="'processes' of this machine, or actors of a 'ray' cluster; both write a folder of Parquet shards"
    )
    processes: Positive | None = option(
        None,
        help="number of processes, or of actors of the cluster (default: one per GPU; without GPUs, one process, or for Ray one "
        "actor per machine)",
    )
    address: str | None = option(
        None,
        metavar="ADDRESS",
        help="address of the Ray cluster; 'auto': the one of this machine (default: start one)",
    )
    rows_per_shard: Positive | None = option(None, help="rows per Parquet file (default: 64 batches)")

    @property
    def uses_shards(self) -> bool:
        """Whether the command writes a folder of shards."""
        return self.engine is not None or self.processes is not None
