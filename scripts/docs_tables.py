"""Tables of the guides: a few columns of the full tables, which are on docs/full_tables.md.

A full table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. A guide shows columns of it between
`<!-- begin NAME: Heading; Heading -->` and the same with `end`. `python scripts/reproduce.py --pages` writes both, and `make check`
compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.common import replace_section
from scripts.reproduction.runs import with_rows

DOCS = Path(__file__).resolve().parents[1] / "docs"
FULL = "full_tables.md"

_COPIED = re.compile(r"<!-- begin (results/\w+\.md) -->")
_WHOLE = re.compile(r"^<!-- begin ([\w/.]+) -->\n(.*?)\n<!-- end \1 -->", re.M | re.S)
_CHOSEN = re.compile(r"<!-- begin (([\w/.]+): (.+?)) -->")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def select_columns(table: str, headings: Sequence[str]) -> str:
    """A table with the columns that name its rows, which have no heading, and some others."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    known = _cells(lines[0])
    if missing := [heading for heading in headings if not heading or heading not in known]:
        raise ValueError(f"The table has no column {missing[0]!r}. Use one of: {', '.join(filter(None, known))}.")
    unnamed = next((column for column, heading in enumerate(known) if heading), len(known))
    kept = [*range(unnamed), *(known.index(heading) for heading in headings)]
    rows = [[cells[column] for column in kept] for cells in map(_cells, lines)]
    return "\n".join(
        f"| {' | '.join(row)} |" if number != 1 else f"|{'|'.join(row)}|" for number, row in enumerate(rows)
    )


def _notes(table: str) -> str:
    """What follows the rows of a full table: which mean, over which seeds, made by which command."""
    return "\n".join(line for line in table.splitlines() if not line.startswith("|")).strip()


def _anchor(full: str, name: str) -> str:
    """The heading above a full table, as a link names it."""
    heading = re.findall(r"^## (.+)$", full.split(f"<!-- begin {name} -->")[0], re.M)[-1]
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _guide(text: str, full: str, tables: Mapping[str, str]) -> str:
    for name, source, headings in _CHOSEN.findall(text):
        shown = select_columns(tables[source], headings.split("; "))
        link = f"[All columns]({FULL}#{_anchor(full, source)})."
        text = replace_section(text, name, f"{shown}\n\n{' '.join([_notes(tables[source]), link]).strip()}\n")
    return text


def pages(docs: Path = DOCS) -> dict[str, str]:
    """Every page that shows tables of docs/results, or columns of the full tables. Markdown by file name."""
    made = {}
    for path in sorted(docs.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for name in _COPIED.findall(text):
            text = replace_section(text, name, with_rows((docs / name).read_text(encoding="utf-8")))
            made[path.name] = text
    full = made[FULL]
    tables = dict(_WHOLE.findall(full))
    for path in sorted(docs.glob("*.md")):
        text = made.get(path.name, path.read_text(encoding="utf-8"))
        if _CHOSEN.search(text):
            made[path.name] = _guide(text, full, tables)
    return made
