"""Help texts wrapped at the terminal's width."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap

__all__ = ["filled"]

_LIST_ITEM = re.compile(r" +(?!captionrl )[\w./+-]+ {2,}(?=\S)")


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
