"""Parses the arguments of a recipe; errors are one sentence that names the argument, the rule and the remedy."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_captionrl.experiments.arguments import ModelArguments, RunArguments, enable_determinism
from hf_captionrl.experiments.rows import load_row, read_yaml

__all__ = ["parse_arguments"]

_SOURCES = ("--config=", "--row=")
_EPILOG = """\
--config FILE reads arguments from a YAML file, --row NAME reads those of a row of recipes/configs/rows, such as
ndlb/table5/row8; the command line overrides both. --traceback shows where an error happened.
"""


def parse_arguments(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None,
    *,
    default_config: Path | None = None,
) -> tuple[Any, ...]:
    """Parse a recipe's arguments: defaults, then `--config file.yaml` or `--row name`, then the command line.

    Args:
        dataclass_types: The dataclasses to fill.
        argv: Arguments without the program's name; None for `sys.argv`.
        default_config: `recipes/configs/<recipe>/<name>.yaml`, used if the command line names no configuration, row,
            model or data set.

    Returns:
        One filled dataclass for each type.

    Raises:
        FileNotFoundError: If the YAML file does not exist.
        ValueError: If an argument is unknown, has a value of the wrong type or contradicts another one.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for a in arguments for part in (a.split("=", 1) if a.startswith(_SOURCES) else [a])]
    # With another model or other data, the defaults are the paper's settings, not those of the tiny model.
    own = ("--config", "--row", "--model_name_or_path", "--dataset_name", "--data_dir", "--image_root")
    given = {a.split("=")[0].replace("-", "_").replace("__", "--", 1) for a in arguments if a.startswith("--")}
    path, row = _take(arguments, "--config", "FILE.yaml"), _take(arguments, "--row", "ndlb/table5/row8")
    types = (*dataclass_types, RunArguments)
    parser = _make_parser(types)
    if path is not None and row is not None:
        raise ValueError(
            f"--config is {path!r} and --row is {row!r}. Use one of them; the command line overrides either."
        )
    if row is not None:
        _apply_config(parser, types, row, _row_settings(row, default_config))
    elif path is not None:
        _apply_config(parser, types, Path(path).name, _read_config(path))
    elif default_config is not None and not given & set(own):
        _apply_config(parser, types, default_config.name, read_yaml(default_config))
    if "--gradient_accumulation_steps" in given and "--total_train_batch_size" not in given:
        # The command line overrides the batch of a preset.
        parser.set_defaults(total_train_batch_size=None)
    *parsed, run = _parse(parser, arguments)
    for config in parsed if run.total_train_batch_size is not None else ():
        if hasattr(config, "gradient_accumulation_steps"):
            set_total_batch(config, run.total_train_batch_size)
    if run.deterministic:
        enable_determinism()
    models = [arguments for arguments in parsed if isinstance(arguments, ModelArguments)]
    for config in parsed if models else ():
        # Recipes load the model and pass it to the trainer.
        if getattr(config, "field_support", None) is not None and config.model_init_kwargs:
            models[0].model_init_kwargs, config.model_init_kwargs = config.model_init_kwargs, None
    return tuple(parsed)


def set_total_batch(config: Any, total: int) -> None:
    """Split a batch of one optimizer step among processes and micro-batches.

    Args:
        config: Training arguments. `per_device_train_batch_size` is the most that a device holds at once; it and
            `gradient_accumulation_steps` are changed.
        total: Images or captions per optimizer step on all processes together.

    Raises:
        ValueError: If the processes cannot share the batch equally, or `gradient_accumulation_steps` is set as well.
    """
    if config.gradient_accumulation_steps != 1:
        raise ValueError(
            f"total_train_batch_size is {total}, which sets gradient_accumulation_steps "
            f"({config.gradient_accumulation_steps}). Leave one of them out."
        )
    processes = config.world_size * max(1, config.n_gpu)
    if total < 1 or total % processes:
        raise ValueError(
            f"total_train_batch_size ({total}) must be a positive multiple of the number of processes ({processes}). Use "
            "another number of processes, such as 1."
        )
    share = total // processes
    steps = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= config.per_device_train_batch_size)
    config.per_device_train_batch_size, config.gradient_accumulation_steps = share // steps, steps


def _take(arguments: list[str], option: str, example: str) -> str | None:
    """Remove an option from the arguments; its last value, or None."""
    value = None
    while option in arguments:
        position = arguments.index(option)
        if position + 1 == len(arguments):
            raise ValueError(f"{option} has no value. Use {option} {example}.")
        value = arguments[position + 1]
        del arguments[position : position + 2]
    return value


def _row_settings(name: str, default_config: Path | None) -> dict[str, Any]:
    if default_config is None:
        raise ValueError(f"--row is {name!r}, but this program has no rows. Use --config.")
    row = load_row(default_config.parents[1], name)
    if row.recipe != default_config.parent.name:
        raise ValueError(f"The row {name} belongs to another recipe. Use recipes/{row.recipe}.py.")
    return row.settings


def _make_parser(types: Sequence[type]) -> Any:
    from trl import TrlParser

    class Parser(TrlParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            # argparse would print the usage first, which is a hundred lines long.
            raise ValueError(f"{message[:1].upper()}{message[1:]}. Use --help for the list of arguments.")

    return Parser(types, epilog=_EPILOG)


def _parse(parser: Any, arguments: list[str]) -> tuple[Any, ...]:
    _, remaining = parser.parse_known_args(arguments)
    if remaining:
        name = remaining[0].split("=")[0]
        raise ValueError(f"Unknown argument {name!r}.{_suggestion(parser, name.lstrip('-'), '--')}")
    try:
        return tuple(parser.parse_args_into_dataclasses(arguments))
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{error.doc[:80]!r} is not valid JSON ({error.msg}). Write such an argument as --model_init_kwargs \'{{"dtype": "float32"}}\'.'
        ) from error


def _suggestion(parser: Any, name: str, prefix: str = "") -> str:
    known = [action.dest for action in parser._actions]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f" Use {prefix + near[0]!r}, or --help for the list." if near else " Use --help for the list of arguments."


def _apply_config(parser: Any, types: Sequence[type], name: str, config: dict[str, Any]) -> None:
    """Use the values of a YAML file or of a row as defaults of the parser."""
    variables = config.pop("env", {})
    if not isinstance(variables, Mapping):
        raise ValueError(f"'env' in {name} is {variables!r}. Use a mapping from environment variables to values.")
    os.environ.update({str(variable): str(value) for variable, value in variables.items()})
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:  # keep the first action of a name: `--no_flag` follows `--flag`
        actions.setdefault(action.dest, action)
    hints = {key: hint for kind in types for key, hint in typing.get_type_hints(kind).items()}
    for key, value in config.items():
        if key not in hints or key not in actions:
            raise ValueError(f"{name} holds the unknown argument {key!r}.{_suggestion(parser, str(key))}")
        config[key] = _checked(name, actions[key], hints[key], value)
    parser.set_defaults_with_config(**config)


def _read_config(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no configuration file {path!r}. Use --config with the path of a YAML file.")
    return read_yaml(Path(path))


def _checked(name: str, action: argparse.Action, hint: Any, value: Any) -> Any:
    """A value of a YAML file, converted as the parser converts command line arguments."""
    kind = _kind(hint)
    if value is None:
        if kind in (int, float, bool) and type(None) not in typing.get_args(hint):
            raise ValueError(
                f"{action.dest} in {name} is empty. Use a value of type {kind.__name__}, or leave it out."
            )
        return None
    if action.nargs in ("+", "*"):
        if not isinstance(value, list):
            raise ValueError(f"{action.dest} in {name} is {value!r}. Use a list, such as [{value!r}].")
        return [_scalar(name, action, kind, item) for item in value]
    if isinstance(value, list | dict):
        found = type(value).__name__
        if found not in str(hint) and "Any" not in str(hint):
            raise ValueError(f"{action.dest} in {name} is a {found}. Use a single value of type {kind.__name__}.")
        return value
    return _scalar(name, action, kind, value)


def _scalar(name: str, action: argparse.Action, kind: type, value: Any) -> Any:
    from transformers.hf_argparser import string_to_bool

    try:
        if kind in (int, float):
            if isinstance(value, bool):
                raise ValueError
            return kind(str(value))
        if kind is bool:
            string_to_bool(str(value))
        elif action.choices is not None and str(value) not in map(str, action.choices):
            raise ValueError
    except (ValueError, argparse.ArgumentTypeError):
        rule = f"one of {list(map(str, action.choices))}" if action.choices else f"a value of type {kind.__name__}"
        raise ValueError(f"{action.dest} in {name} is {value!r}. Use {rule}.") from None
    # Other values stay as YAML reads them: some arguments accept both `false` and text.
    return value


def _kind(hint: Any) -> type:
    """The type of an argument or of its list items; `str` if several are possible."""
    if typing.get_origin(hint) is list:
        return _kind(typing.get_args(hint)[0])
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in (int, float, bool) else str
