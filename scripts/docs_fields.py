"""What the site's API reference needs beside docstrings: an extension of griffe, named in `mkdocs.yml`.

The fields of the configs carry their help in `metadata={"help": ...}`, where the command line reads it. Here it becomes the
field's docstring, and its default the field's value. Nothing is imported: griffe reads sources.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_REFERENCE = re.compile(r"\[(`[^`\]]+`)\](?![\[(])")
_EXAMPLE = re.compile(r"^Example:$", re.M)
_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises|Examples):$)", re.M)
_TYPE = re.compile(r"^( {4}[\w*, ]+) \((.*?)\)(?=:)", re.M)


def _text(node: ast.expr) -> str | None:
    """A literal string, also one of several pieces."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if isinstance(value, str) else None


def field_parts(source: str) -> tuple[str | None, str | None]:
    """The help and the default of `field(default=..., metadata={"help": ...})` or `option(default, help=...)`.

    Returns the help and the source of the default; None for what is not there.
    """
    node = ast.parse(source, mode="eval").body
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in ("field", "option"):
        return None, None
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name == "option":
        help_text = _text(keywords["help"]) if "help" in keywords else None
        return help_text, ast.unparse(node.args[0]) if node.args else None
    default = keywords.get("default", keywords.get("default_factory"))
    text = None
    if isinstance(metadata := keywords.get("metadata"), ast.Dict):
        entries = {_text(key): value for key, value in zip(metadata.keys, metadata.values, strict=True) if key}
        text = _text(entries["help"]) if "help" in entries else None
    return text, None if default is None else ast.unparse(default)


def google_style(text: str) -> str:
    """A docstring of this project as griffe's Google style reads it."""
    text = _EXAMPLE.sub("Examples:", _REFERENCE.sub(r"\1", text))
    text = _TYPE.sub(lambda found: f"{found[1]} ({re.sub('[`*]', '', found[2])})", text)
    return _SECTION.sub("\n\n", text)


class FieldHelp(griffe.Extension):
    """Help texts of dataclass fields as docstrings, and docstrings as griffe's Google style reads them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the field's help and default."""
        if attr.parent is None or not attr.parent.is_class or attr.value is None:
            return
        text, default = field_parts(str(attr.value))
        if text is not None and attr.docstring is None:
            attr.docstring = griffe.Docstring(text, parent=attr, lineno=attr.lineno)
        if default is not None:
            attr.value = default

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = google_style(obj.docstring.value)
