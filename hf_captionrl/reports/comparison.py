"""Captioners side by side: one line per number, one column per captioner, one section per paper.

Rows are those of [`hf_captionrl.reports.table`]. They may also contain `<key>_mark`, which marks a significant difference
from the first captioner.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_captionrl.reports.table import Column, Row, check_rows, encodable, escape_markdown, format_cell

__all__ = ["Section", "comparison_markdown", "print_comparison"]

# Wide enough for a number with its interval; longer reasons are wrapped.
_CELL_WIDTH = 30
# Longer reasons are shortened here and printed in full below the table.
_REASON_WIDTH = 60

_LEGEND = (
    "↑ higher is better, ↓ lower is better. Fractions are in [0, 1]. ± or [low, high]: 95 % interval over images. "
    "* p < 0.05, ** p < 0.01 compared with the first column: paired randomisation test, not corrected for the number of tests."
)


@dataclass(frozen=True)
class Section:
    """One paper's table.

    Args:
        title: Heading.
        columns: Its columns, in the order in which they are shown.
        rows: One per captioner, with the same names in every section.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]


def _check(sections: Sequence[Section]) -> list[str]:
    """Names of the captioners."""
    if not sections:
        raise ValueError("There are no sections. Pass at least one paper's table.")
    for section in sections:
        check_rows(section.rows, section.columns)
    names = [row["name"] for row in sections[0].rows]
    for section in sections[1:]:
        if [row["name"] for row in section.rows] != names:
            raise ValueError(
                f"{section.title!r} compares {[row['name'] for row in section.rows]}, but {sections[0].title!r} "
                f"{names}. Pass the same captioners in the same order."
            )
    return names


def _cell(row: Row, column: Column) -> str:
    reason = row.get(f"{column.key}_reason")
    if row[column.key] is None and reason:
        return f"not run: {textwrap.shorten(reason, _REASON_WIDTH, placeholder=' ...')}"
    mark = row.get(f"{column.key}_mark")
    return format_cell(row, column) + (f" {mark}" if mark else "")


def _long_reasons(sections: Sequence[Section]) -> list[str]:
    """Reasons that the cells shorten, each once."""
    found = [
        f"{column.title}: not run: {reason}"
        for section in sections
        for column in section.columns
        for row in section.rows
        if row[column.key] is None
        and len(reason := " ".join((row.get(f"{column.key}_reason") or "").split())) > _REASON_WIDTH
    ]
    return list(dict.fromkeys(found))


def print_comparison(sections: Sequence[Section], *, file: IO[str] | None = None) -> None:
    """Print the sections below each other, with aligned columns.

    Args:
        sections: The papers' tables.
        file: Where to print; the standard output by default.

    Raises:
        ValueError: If there is no section, a row is malformed, or captioners differ between sections.
    """
    names = _check(sections)
    console = Console(file=file, highlight=False)

    def shown(text: str) -> str:
        return encodable(text, console)

    label_width = max(len(column.title) for section in sections for column in section.columns)
    # Text and not str, so that [brackets] in names and reasons are not markup.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", min_width=label_width, vertical="top", no_wrap=True)
    for name in names:
        table.add_column(Text(shown(name), overflow="fold"), justify="right", max_width=_CELL_WIDTH, vertical="top")
    for section in sections:
        table.add_row(Text(shown(section.title), style="bold"), *([""] * len(names)))
        for number, column in enumerate(section.columns, start=1):
            cells = [Text(shown(_cell(row, column)), overflow="fold") for row in section.rows]
            table.add_row(Text(shown(column.title)), *cells, end_section=number == len(section.columns))
    # Piped output has no width: use the table's width instead of wrapping at 80 characters.
    if not console.is_terminal:
        console.width = max(console.width, label_width + (_CELL_WIDTH + 3) * len(names))
    console.print(table)
    for note in (*_long_reasons(sections), _LEGEND):
        console.print(Text(shown(note), style="dim"))


def comparison_markdown(sections: Sequence[Section], *, title: str = "Comparison") -> str:
    """The sections as Markdown tables with their legend.

    Args:
        sections: The papers' tables.
        title: Heading.

    Returns:
        `str`: Markdown, ending in a line break.

    Raises:
        ValueError: If there is no section, a row is malformed, or captioners differ between sections.
    """
    names = _check(sections)
    out = io.StringIO()
    out.write(f"# {escape_markdown(title)}\n")
    for section in sections:
        out.write(f"\n## {escape_markdown(section.title)}\n\n")
        out.write("| |" + "".join(f" {escape_markdown(name)} |" for name in names) + "\n")
        out.write("|:--|" + "--:|" * len(names) + "\n")
        for column in section.columns:
            cells = (escape_markdown(_cell(row, column)) for row in section.rows)
            out.write(f"| {escape_markdown(column.title)} |" + "".join(f" {cell} |" for cell in cells) + "\n")
    for note in (*_long_reasons(sections), _LEGEND):
        out.write(f"\n{escape_markdown(note)}\n")
    return out.getvalue()
