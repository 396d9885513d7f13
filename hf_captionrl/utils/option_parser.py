"""The parser of commands and recipes, over the dataclasses of `utils.options` and the configurations of trainers."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, Literal

from trl import TrlParser

from hf_captionrl.utils.options import CommandOptions


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions folded to the width, and the default after each help text that does not name it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs and lines of lists folded to the width, and commands so that they can still be copied."""
        folded, paragraph = list[str](), list[str]()
        whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * 6}
        for line in [*text.splitlines(), ""]:
            if line and not line.startswith(" "):
                paragraph.append(line)
                continue
            parts = textwrap.wrap(line, width - 2, **whole)
            folded += textwrap.wrap(" ".join(paragraph), width)
            folded.append((" \\\n" if line.startswith(("  captionrl ", " " * 6)) else "\n").join(parts))
            paragraph = []
        return "\n".join(folded[:-1])

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = str(action.help or ""), action.default
        is_silent = isinstance(default, bool) or default in (None, "", [], argparse.SUPPRESS) or "(default" in text
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default).replace("%", "%%")
        return text if is_silent else f"{text} (default: {shown})"


class OptionParser(TrlParser):  # type: ignore[misc]
    """`TrlParser` with positional arguments, flags that take no value in commands, and a group for each base class.

    The fields of a class stand before inherited ones. Options of transformers and TRL are last, and shown only with `shows_foreign`.
    """

    def __init__(self, dataclass_types: Sequence[type] = (), *, shows_foreign: bool = False, **settings: Any) -> None:
        self._foreign: list[Any] = []
        # TrlParser's own constructor refuses the name `config`, which `captionrl convert` has.
        super(TrlParser, self).__init__(dataclass_types, formatter_class=HelpFormatter, **settings)
        group = self.add_argument_group("transformers and TRL") if self._foreign else self
        for field in self._foreign:
            if not shows_foreign:
                field.metadata = {**field.metadata, "help": argparse.SUPPRESS}
            self._add_option(group, field, is_command=False)

    def _add_dataclass_arguments(self, cls: type[Any]) -> None:
        is_command = issubclass(cls, CommandOptions)
        heading = "training" if cls.__name__.endswith("Config") else cls.__name__.removesuffix("Arguments").lower()
        hints = typing.get_type_hints(cls)
        owners = {name: owner for owner in reversed(cls.__mro__) for name in vars(owner).get("__annotations__", ())}
        order = dict.fromkeys(name for owner in cls.__mro__ for name in vars(owner).get("__annotations__", ()))
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        groups: dict[str, Any] = {}
        for name in [name for name in order if name in fields]:
            field: Any = copy.copy(fields[name])
            owner, field.type, field.metadata = owners[name], hints[name], dict(field.metadata)
            title = vars(owner).get("heading", "") if owner is not cls else ""
            title = field.metadata.pop("group", title) or ("" if is_command else heading)
            if owner.__module__.partition(".")[0] in ("transformers", "trl"):
                self._foreign.append(field)
                continue
            field.metadata["help"] = field.metadata.get("help", "").replace("%", "%%")
            if title and title not in groups:
                groups[title] = self.add_argument_group(title)
            self._add_option(groups.get(title, self), field, is_command)

    def _add_option(self, group: Any, field: Any, is_command: bool) -> None:
        is_optional = type(None) in typing.get_args(field.type)
        kind: Any = typing.get_args(field.type)[0] if is_optional else field.type
        is_list = typing.get_origin(kind) is list
        one: Any = typing.get_args(kind)[0] if is_list else kind
        start = len(self._actions)
        if typing.get_origin(one) is Literal and (is_list or "positional" in field.metadata):
            field.type, field.metadata["choices"], one = list[str], typing.get_args(one), str
        if field.metadata.pop("positional", False):
            nargs = field.metadata.pop("nargs", "+" if is_list else None)
            group.add_argument(field.name, type=one, nargs=nargs, **field.metadata)
        elif is_command and field.type is bool:
            action = argparse.BooleanOptionalAction if field.default else "store_true"
            group.add_argument(f"--{field.name}", action=action, default=field.default, help=field.metadata["help"])
        else:
            if is_command and is_list and is_optional:
                field.metadata["action"] = "extend"  # `--model A --model B` is `--model A B`
            self._parse_dataclass_field(group, field)
        for added in self._actions[start:]:  # `--a-b` is accepted, too, and not shown
            added.option_strings = [name for name in added.option_strings if "-" not in name[2:]]
            if added.nargs == "+" and not is_command:
                added.nargs = "*"  # `--name` without values empties the list of a preset
