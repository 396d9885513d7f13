"""Parses the arguments of a recipe; every mistake is one sentence that names the argument, the rule and the remedy."""

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

import yaml

from hf_captionrl.experiments.arguments import ModelArguments, RunArguments, enable_determinism

__all__ = ["parse_arguments"]

_EPILOG = """\
--config FILE reads arguments from a YAML file; the command line overrides it. --traceback shows where an error happened.
"""


def parse_arguments(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None,
    *,
    default_config: str | os.PathLike[str] | None = None,
) -> tuple[Any, ...]:
    """Parse a recipe's arguments: defaults, then `--config file.yaml`, then the command line.

    Args:
        dataclass_types: The dataclasses to fill.
        argv: Arguments without the program's name; None for `sys.argv`.
        default_config: YAML file used where the command line names no config, model or data set of its own.

    Returns:
        One filled dataclass for each type.

    Raises:
        FileNotFoundError: If there is no such YAML file.
        ValueError: If an argument is unknown, has a value of the wrong type or contradicts another one.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    # Whoever brings a model or data of his own gets the paper's settings, not those of a tiny model.
    own = ("--config", "--model_name_or_path", "--dataset_name", "--data_dir", "--image_root")
    given = {a.split("=")[0].replace("-", "_").replace("__", "--", 1) for a in arguments if a.startswith("--")}
    if default_config is not None and not given & set(own):
        arguments = ["--config", os.fspath(default_config), *arguments]
    types = (*dataclass_types, RunArguments)
    parser = _make_parser(types)
    path = None
    while "--config" in arguments:
        position = arguments.index("--config")
        if position + 1 == len(arguments):
            raise ValueError("--config names no file. Use --config FILE.yaml.")
        path = arguments[position + 1]
        del arguments[position : position + 2]
    if path is not None:
        _apply_config(parser, types, path)
    *parsed, run = _parse(parser, arguments)
    if run.deterministic:
        enable_determinism()
    models = [arguments for arguments in parsed if isinstance(arguments, ModelArguments)]
    for config in parsed if models else ():
        # Recipes load the model themselves, and pass a loaded one to the trainer.
        if getattr(config, "field_support", None) is not None and config.model_init_kwargs:
            models[0].model_init_kwargs, config.model_init_kwargs = config.model_init_kwargs, None
    return tuple(parsed)


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


def _apply_config(parser: Any, types: Sequence[type], path: str) -> None:
    """Make the values of a YAML file the defaults of the parser."""
    config = _read_config(path)
    name = Path(path).name
    variables = config.pop("env", {})
    if not isinstance(variables, Mapping):
        raise ValueError(f"'env' in {name} is {variables!r}. Use a mapping from environment variables to values.")
    os.environ.update({str(variable): str(value) for variable, value in variables.items()})
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:  # the first of a name: after `--flag` comes `--no_flag`
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
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path!r} is not valid YAML ({' '.join(str(error).split())}). Correct it.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path!r} holds a {type(config).__name__}. Use a mapping: one `argument: value` per line.")
    return config


def _checked(name: str, action: argparse.Action, hint: Any, value: Any) -> Any:
    """A value of a YAML file as the parser would have made it of the command line."""
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
    # Other values stay what YAML made of them: `false` is a value of some arguments that also take text.
    return value


def _kind(hint: Any) -> type:
    """The one type of an argument or of the items of its list; `str` where several are possible."""
    if typing.get_origin(hint) is list:
        return _kind(typing.get_args(hint)[0])
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in (int, float, bool) else str
