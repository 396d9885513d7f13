"""Options of commands and configurations, declared once as fields of a dataclass; light to import, because `--help` needs them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

# @dataclass
# class CaptionOptions(DatasetOptions):
#     '''Caption every image of a folder or data set.'''
#
#     model: str = option(metavar="MODEL", positional=True, help="a folder, a name on the Hub, or scenes:blip-mle")
#     batch_size: Positive = option(16, help="images captioned at once")
#
# The annotation of a field is the type of the option and the range of its values, and the help text shows its default. A plain
# field with a help text, as the arguments of training have, is an option too. A command's options are listed before inherited ones;
# each base class is a group. The function of a command takes the dataclass, so Python programs use the same names.

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

    def rule(annotation: Any) -> tuple[Range | None, tuple[Any, ...]]:
        if typing.get_origin(annotation) is Literal:
            return None, typing.get_args(annotation)
        found = next((part for part in getattr(annotation, "__metadata__", ()) if isinstance(part, Range)), None)
        inner = [rule(part) for part in typing.get_args(annotation) if typing.get_origin(annotation) is not dict]
        return next((r for r in [(found, ()), *inner] if r[0] or r[1]), (None, ()))

    rules = {name: rule(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}
    return {name: found for name, found in rules.items() if found[0] or found[1]}


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

    `shown` are `metavar`, `nargs`, `aliases`, `choices` (if the type is not a `Literal`), `group` (a heading), `positional`,
    `repeated` (a list is given one value at a time: `--model A --model B`), and `shown_default`, which replaces the default at
    the end of the help. A positional option with `aliases` may be given by name, too.
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


def _unwrapped(annotation: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """An annotation as (type of one value, whether there are several, choices)."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _unwrapped(arguments[0])
    if origin in (Union, types.UnionType):
        return _unwrapped(next(a for a in arguments if a is not type(None)))
    if origin is list:
        kind, _, choices = _unwrapped(arguments[0])
        return kind, True, choices
    if origin is Literal:
        return type(arguments[0]), False, arguments
    return annotation, False, ()


_METAVARS = {int: "N", float: "X"}


def _help(field: dataclasses.Field[Any], default: Any) -> str:
    shown = field.metadata.get("shown_default")
    if shown is None:
        empty = default is dataclasses.MISSING or default is None or isinstance(default, bool) or default in ([], "")
        values = default if isinstance(default, list) else [default]
        shown = "" if empty else " ".join(map(str, values))
    text = field.metadata["help"].replace("%", "%%")
    if text.endswith("."):  # an argument of training, whose help is a sentence
        text = text[0].lower() + text[1:-1]
    return f"{text} (default: {shown})".strip().replace("  ", " ") if shown else text


def add_options(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    *,
    heading: str | None = None,
    shows: Callable[[type[Any]], bool] = lambda owner: True,
) -> None:
    """Add the fields of an options dataclass to a parser, its fields before inherited ones.

    Fields without a heading of their own stand under `heading`; only those of classes that `shows` accepts are added.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    groups: dict[str, Any] = {}
    seen: set[str] = set()
    for owner in cls.__mro__:
        for name in vars(owner).get("__annotations__", {}):
            field = cls.__dataclass_fields__.get(name)
            if name in seen or field is None or "help" not in field.metadata or not field.init:
                continue
            seen.add(name)
            if not shows(owner):
                continue
            title = (
                field.metadata.get("group") or (vars(owner).get("heading") if owner is not cls else None) or heading
            )
            if title and title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_option(groups[title] if title else parser, field, hints[name])


def _add_option(group: Any, field: dataclasses.Field[Any], annotation: Any) -> None:
    kind, is_list, choices = _unwrapped(annotation)
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    settings: dict[str, Any] = {"help": _help(field, default)}
    required = default is dataclasses.MISSING
    if not required:
        settings["default"] = default
    if kind is bool:
        group.add_argument(
            f"--{field.name}", action=argparse.BooleanOptionalAction if default else "store_true", **settings
        )
        return
    given = field.metadata
    metavar, allowed = given.get("metavar", _METAVARS.get(kind)), given.get("choices") or choices or None
    settings |= {"type": kind, "metavar": metavar, "choices": allowed}
    if given.get("repeated"):
        group.add_argument(f"--{field.name}", action="append", required=required, **settings)
        return
    nargs = given.get("nargs") or ("+" if is_list else None)
    if given.get("positional"):
        if nargs is None and not required:
            nargs = "?"
        if aliases := given.get("aliases"):  # also by name
            either = group.add_mutually_exclusive_group(required=required)
            either.add_argument(*aliases, dest=field.name, **settings, nargs=nargs if is_list else None)
            group, nargs, settings = either, nargs or "?", settings | {"default": argparse.SUPPRESS}
        group.add_argument(field.name, nargs=nargs, **settings)
        return
    names = (f"--{field.name}", *given.get("aliases", ()))
    group.add_argument(*names, dest=field.name, nargs=nargs, required=required, **settings)


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
        help="number of processes, or of actors of the cluster (default: one per GPU; without GPUs, or if the work needs none, "
        "one process, or for Ray one actor per machine or per CPU)",
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

    def check_engine(self) -> None:
        """Refuse options that have no effect."""
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"--address {self.address!r} has an effect only with Ray. Use --engine ray.")
        if self.rows_per_shard is not None and not self.uses_shards:
            raise ValueError(
                f"--rows_per_shard {self.rows_per_shard} has an effect only with shards. Use --processes or --engine."
            )
