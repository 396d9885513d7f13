"""The commands of `captionrl`: what each is called, where its options are declared, and which function runs it."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_captionrl.options import add_options, options_from

__all__ = ["Command", "add_commands"]


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name (`str`): As typed.
        help (`str`): One line in the list of commands.
        options (`str`): `"module:Class"`, a subclass of `CommandOptions` whose docstring describes the command and whose
            `examples` end its help text; imported when the command is used.
        function (`str`): `"module:function"`, called with the options; a module that is left out is that of `options`.
        resumes (`bool`): Whether the same command continues an interrupted run.
        subcommands (`tuple[Command, ...]`): In place of options and function.
        description (`str`): Of a command with subcommands.
    """

    name: str
    help: str
    options: str = ""
    function: str = ""
    resumes: bool = False
    subcommands: tuple[Command, ...] = ()
    description: str = ""


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"hf_captionrl.{module}"), name)


def add_commands(subparsers: Any, commands: Iterable[Command], chosen: str | None = None) -> None:
    """Add commands to a parser."""
    for command in commands:
        parser = subparsers.add_parser(
            command.name, help=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if chosen is not None and command.name != chosen:
            continue
        if command.subcommands:
            parser.description = _filled(command.description)
            parser.set_defaults(traceback=False)
            nested = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
            add_commands(nested, command.subcommands)
            examples = [(inner.epilog or "").removeprefix("examples:\n") for inner in nested.choices.values()]
            parser.epilog = "examples:\n" + "\n".join(filter(None, examples))
            continue
        cls = _load(command.options)
        parser.description = _filled(cls.__doc__ or "")
        parser.epilog = textwrap.dedent(cls.examples).strip() or None
        add_options(parser, cls)
        function = (
            command.function if ":" in command.function else f"{command.options.partition(':')[0]}:{command.function}"
        )
        parser.set_defaults(run=_runner(cls, function), resumes=command.resumes)


def _runner(cls: type[Any], function: str) -> Any:
    def run(arguments: argparse.Namespace) -> None:
        _load(function)(options_from(cls, arguments))

    return run


def _filled(text: str) -> str:
    """A docstring as paragraphs of the terminal's width; indented paragraphs stay as they are."""
    first, _, rest = text.strip().partition("\n")
    paragraphs = f"{first}\n{textwrap.dedent(rest)}".split("\n\n")
    width = argparse.HelpFormatter("")._width
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)
