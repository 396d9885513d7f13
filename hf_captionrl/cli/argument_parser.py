"""A command of `captionrl`: its name, where its options are declared, and which function runs it."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_captionrl.options import add_options, options_from

__all__ = ["Command", "add_commands", "filled"]


_LIST_ITEM = re.compile(r" +(?!captionrl )[\w./+-]+ {2,}(?=\S)")


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name (`str`): As typed.
        help (`str`): One line in the list of commands.
        options (`str`): `"module:Class"`, a subclass of `CommandOptions`. Its docstring describes the command, its `examples`
            end the help text. It is imported when the command is used.
        function (`str`): `"function"` of the same module, or `"module:function"`; called with the options.
        is_resumable (`bool`): Whether the same command continues an interrupted run.
        subcommands (`tuple[Command, ...]`): Instead of options and function.
        description (`str`): Of a command with subcommands.
        examples (`str`): Of a command with subcommands.
    """

    name: str
    help: str
    options: str = ""
    function: str = ""
    is_resumable: bool = False
    subcommands: tuple[Command, ...] = ()
    description: str = ""
    examples: str = ""


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
            parser.description = filled(command.description)
            parser.epilog = filled(command.examples) or None
            parser.set_defaults(traceback=False)
            nested = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
            add_commands(nested, command.subcommands)
            examples = [(inner.epilog or "").removeprefix("examples:\n") for inner in nested.choices.values()]
            parser.epilog = parser.epilog or "examples:\n" + "\n".join(filter(None, examples))
            continue
        cls = _load(command.options)
        parser.description = filled(cls.__doc__ or "")
        parser.epilog = filled(cls.examples) or None
        add_options(parser, cls)
        function = (
            command.function if ":" in command.function else f"{command.options.partition(':')[0]}:{command.function}"
        )
        parser.set_defaults(run=_runner(cls, function), is_resumable=command.is_resumable)


def _runner(cls: type[Any], function: str) -> Any:
    def run(arguments: argparse.Namespace) -> None:
        _load(function)(options_from(cls, arguments))

    return run


def filled(text: str) -> str:
    """A text wrapped at the terminal's width. Examples stay as they are; list items (`name    text`) keep their indent."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    width = argparse.HelpFormatter("")._width
    return "\n\n".join(_filled_paragraph(paragraph, width) for paragraph in paragraphs)


def _filled_paragraph(paragraph: str, width: int) -> str:
    lines = paragraph.splitlines()
    if not any(line.startswith(" ") for line in lines):
        return textwrap.fill(paragraph, width)
    wrapped = []
    for line in lines:
        item = _LIST_ITEM.match(line)
        is_example = line.startswith(" ") and item is None
        indent = " " * item.end() if item else ""
        wrapped.append(line if is_example else textwrap.fill(line, width, subsequent_indent=indent))
    return "\n".join(wrapped)
