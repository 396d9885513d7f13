"""Formulas of the site: LaTeX in the pages, MathML in the HTML. A hook of mkdocs, named in `mkdocs.yml`.

The pages write formulas as GitHub reads them: blocks fenced as ```` ```math ````, and ``$`x`$`` within a line. MathML needs neither a
script nor a font from elsewhere, so the site shows formulas offline.
"""

from __future__ import annotations

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_LOG = logging.getLogger("mkdocs.hooks.formulas")
_SPACED = re.compile(r"<mi>(?:log|exp)</mi>(?!<mo stretchy=\"false\">&#x00028;)")
BLOCK = re.compile(r"^```math[ ]*\n(.*?)\n```[ ]*$", re.M | re.S)
INLINE = r"\$`([^`]+)`\$"


def mathml(latex: str, *, block: bool = False) -> str:
    """A formula as MathML."""
    try:
        made = convert(latex.strip(), display="block" if block else "inline")
    except Exception as error:
        raise ValueError(f"The formula {latex!r} is incomplete. Close its braces.") from error
    if unknown := re.search(r"\\\w+|&(?!#?\w+;)", made):
        raise ValueError(
            f"The formula {latex!r} contains {unknown[0]!r}. Use commands of latex2mathml, one formula each."
        )
    return _SPACED.sub(r'\g<0><mspace width="0.17em"/>', made)


def _shown(latex: str, *, block: bool = False) -> str:
    """A formula as MathML, or as text with a warning, which stops a strict build."""
    try:
        return mathml(latex, block=block)
    except ValueError as error:
        _LOG.warning("%s", error)
        return f"<code>{html.escape(latex)}</code>"


class _Blocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        def stored(found: re.Match[str]) -> str:
            made = f'<div class="formula">{_shown(found[1], block=True)}</div>'
            return f"\n{self.md.htmlStash.store(made)}\n"

        return BLOCK.sub(stored, "\n".join(lines)).split("\n")


class _Inline(InlineProcessor):
    def handleMatch(  # type: ignore[override]
        self, m: re.Match[str], data: str
    ) -> tuple[str, int, int]:
        return self.md.htmlStash.store(_shown(m[1])), m.start(0), m.end(0)


class MathExtension(Extension):
    """Formulas before fenced code and code spans are read."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register both forms of a formula."""
        md.preprocessors.register(_Blocks(md), "formula-blocks", 27)  # above fenced code (25), below line ends (30)
        md.inlinePatterns.register(_Inline(INLINE, md), "formula-inline", 195)  # above code spans (190)


def on_config(config: Any) -> Any:
    """Let mkdocs read formulas; it calls this once per build."""
    config.markdown_extensions.append(MathExtension())
    return config
