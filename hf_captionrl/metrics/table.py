"""Tables of captioners side by side: one line per number, one column per captioner; printed, and as Markdown, CSV and LaTeX.

A row is a mapping with `name` and one number per column. A number `<key>` may have `<key>_ci`, its 95 % interval `[low, high]`,
and None may have `<key>_reason`, one sentence that says why. Fractions are in [0, 1], never percent. `note` is a sentence on the
row, shown below the table. In comparisons, `<key>_mark` marks a significant difference from the first captioner.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_captionrl.metrics.columns import Column
from hf_captionrl.utils.io import (
    atomic_write_text,
    csv_cell,
    escape_markdown,
    installed_versions,
    plain_config,
    write_json,
)

Row = Mapping[str, Any]
"""Numbers of one captioner, or of the references."""

REFERENCES = "references"  # row name of the human captions


@dataclass(frozen=True)
class Section:
    """One paper's table: the columns in the order in which they are shown, and a row per captioner, as in every section."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]


def check_rows(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Refuse rows whose numbers would be shown wrong: names that clash, missing keys, percent, numbers that are none."""
    names = [row.get("name") for row in rows]
    if not rows or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"The rows are called {names}. Use at least one row, and different names.")
    for row in rows:
        for column in columns:
            if column.key not in row:
                raise ValueError(f"Row {row['name']!r} has no {column.key}. Write None where nothing was measured.")
            value = row[column.key]
            bounds = () if value is None else (value, *(row.get(f"{column.key}_ci") or ()))
            for number in map(float, bounds):
                if not math.isfinite(number) or (column.is_fraction and not 0.0 <= number <= 1.0):
                    where = f"{column.key} of {row['name']!r} is {number}"
                    raise ValueError(f"{where}. Use finite numbers, and fractions in [0, 1], never percent.")


def without_repeats(sections: Sequence[Section]) -> list[Section]:
    """The sections with each column where it stands first; sections without another column are left out."""
    seen: set[tuple[str, str]] = set()
    shown = []
    for section in sections:
        columns = [column for column in section.columns if (column.key, column.header) not in seen]
        seen |= {(column.key, column.header) for column in columns}
        shown += [replace(section, columns=columns)] if columns else []
    return shown


# --- Cells and notes -------------------------------------------------------------------------------------------------


def format_cell(row: Row, column: Column) -> str:
    """Text of one cell.

    `0.658 ±0.021` if the interval is symmetric after rounding, else `0.658 [0.630, 0.681]`; `not run: reason` for None with a
    reason, `–` for None without.
    """
    value, interval, reason = row.get(column.key), row.get(f"{column.key}_ci"), row.get(f"{column.key}_reason")
    if value is None:
        return f"not run: {reason}" if reason else "–"
    shown = f"{float(value):.{column.digits}f}"
    if interval is None:
        return shown
    low, high = (float(bound) for bound in interval)
    below, above = (f"{abs(distance):.{column.digits}f}" for distance in (float(value) - low, high - float(value)))
    if below == above and low <= float(value) <= high:
        return f"{shown} ±{above}"
    return f"{shown} [{low:.{column.digits}f}, {high:.{column.digits}f}]"


def _cell(row: Row, column: Column) -> str:
    if row[column.key] is None and row.get(f"{column.key}_reason"):
        return "not run"
    return " ".join([format_cell(row, column), *filter(None, [row.get(f"{column.key}_mark")])])


def _notes(sections: Sequence[Section]) -> list[str]:
    """Notes on rows, a line per reason why numbers are missing, and the legend."""
    rows, places = sections[0].rows, dict[str, dict[str, list[str]]]()
    for section in sections:
        for column in section.columns:
            for row in section.rows:
                reason = " ".join(str(row.get(f"{column.key}_reason") or "").split()).rstrip(".")
                if row[column.key] is None and reason:
                    names = places.setdefault(reason, {}).setdefault(column.title, [])
                    names += [] if row["name"] in names else [row["name"]]
    lines = [f"{row['name']}: {row['note']}" for row in rows if row.get("note")]
    for by, scorer in (("", "scorer"), ("reward_", "reward scorer")):
        for row in rows:
            if share := row.get(f"{by}captions_truncated"):
                lines.append(f"{row['name']}: the {scorer} truncates {share:.3f} of the captions")
    for reason, columns in places.items():
        where = [f"{c} ({', '.join(names)})" if len(names) < len(rows) else c for c, names in columns.items()]
        lines.append(f"not run: {reason}: {', '.join(where)}")
    keys = {key for section in sections for row in section.rows for key, value in row.items() if value is not None}
    legend = "↑ higher is better, ↓ lower is better. Fractions are in [0, 1]."
    if any("rd100" in column.key for section in sections for column in section.columns):
        legend += " RD100: among 100 images, 99 of them random."
    if any(key.endswith("_ci") for key in keys):
        legend += " ± or [low, high]: 95 % interval over images."
    if any(key.endswith(("_p_value", "_mark")) for key in keys):
        legend += " * p < 0.05, ** p < 0.01 compared with the first column: paired randomisation test, not corrected"
        legend += " for the number of tests."
    return [*lines, legend]


def _cells(section: Section) -> pd.DataFrame:
    """A line per number, a column per captioner."""
    check_rows(section.rows, section.columns)
    cells = [[_cell(row, column) for row in section.rows] for column in section.columns]
    names = pd.Index([row["name"] for row in section.rows], dtype=object)
    return pd.DataFrame(cells, [column.title for column in section.columns], names, dtype=object)


# --- Printed, and as Markdown, LaTeX and CSV -------------------------------------------------------------------------

_NAME_WIDTH = 12  # longer names are folded, unless numbers are wider


def print_comparison(sections: Sequence[Section], *, title: str | None = None, file: IO[str] | None = None) -> None:
    """Print the sections below each other, with aligned columns; as several tables if a line is too narrow."""
    tables = [_cells(section) for section in sections]
    widths = {n: max(_NAME_WIDTH, *(table[n].str.len().max() for table in tables)) for n in tables[0].columns}
    console = Console(file=file, highlight=False, width=shutil.get_terminal_size((120, 0)).columns)
    if hasattr(console.file, "reconfigure"):
        console.file.reconfigure(errors="replace")  # a terminal without arrows
    label = max(len(name) for table in tables for name in table.index)
    label = min(label, max(_NAME_WIDTH, console.width // 3))
    if title:
        console.print(Text(title, style="bold"))
    names = [*widths]
    while names:
        number, width = 0, label + 2  # the edges, and two blanks before each column
        while number < len(names) and (number == 0 or width + widths[names[number]] + 2 <= console.width):
            width += widths[names[number]] + 2
            number += 1
        shown, names = names[:number], names[number:]
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        grid.add_column("", max_width=label)
        for name in shown:  # Text and not str, so that [brackets] are not markup
            heading = Text(name, overflow="fold")
            grid.add_column(heading, justify="right", vertical="bottom", max_width=widths[name], overflow="fold")
        for section, table in zip(sections, tables, strict=True):
            if section.title:
                grid.add_row(Text(section.title, style="bold"))
            for line, key in enumerate(table.index, start=1):
                cells = [Text(cell, style="dim" if cell == "not run" else "") for cell in table[shown].iloc[line - 1]]
                grid.add_row(Text(key), *cells, end_section=line == len(table))
        console.print(grid)
    for note in _notes(sections):
        console.print(Text(note, style="dim"))


def print_table(
    rows: Sequence[Row], *, columns: Sequence[Column], title: str | None = None, file: IO[str] | None = None
) -> None:
    """Print the rows of one table."""
    print_comparison([Section("", columns, rows)], title=title, file=file)


def comparison_markdown(sections: Sequence[Section], *, title: str = "Comparison", seed: int | None = None) -> str:
    """The sections as Markdown tables with their legend; empty titles are left out."""
    text = f"# {escape_markdown(title)}\n" if title else ""
    for section in sections:
        table = _cells(section)
        lines = [["", *table.columns], *([name, *cells] for name, *cells in table.itertuples())]
        head, *body = ["| " + " | ".join(map(escape_markdown, line)) + " |\n" for line in lines]
        text += f"\n## {escape_markdown(section.title)}\n" if section.title else ""
        text += f"\n{head}|:--|{'--:|' * len(table.columns)}\n{''.join(body)}"
    *notes, legend = _notes(sections)
    notes = [*map(escape_markdown, notes), legend.replace("*", "\\*"), *([] if seed is None else [f"Seed {seed}."])]
    return (text + "".join(f"\n{note}\n" for note in notes)).lstrip("\n")


def results_markdown(
    rows: Sequence[Row], *, columns: Sequence[Column], title: str = "Results", seed: int | None = None
) -> str:
    """The rows as a Markdown table with its legend; an empty title is left out."""
    return comparison_markdown([Section("", columns, rows)], title=title, seed=seed)


def comparison_latex(sections: Sequence[Section]) -> str:
    """The sections as LaTeX tables of the package booktabs; reasons and legend are comments."""
    text = "% \\usepackage{booktabs}\n"
    for section in sections:
        table = _cells(section)
        text += f"\n% {section.title}\n" + table.to_latex(escape=True, column_format="l" + "r" * len(table.columns))
    text += "".join(f"% {note}\n" for note in _notes(sections))
    for symbol, command in zip(
        "↑↓±–≥≤", (r"$\uparrow$", r"$\downarrow$", r"$\pm$", "--", r"$\geq$", r"$\leq$"), strict=True
    ):
        text = text.replace(symbol, command)
    return text


def comparison_csv(sections: Sequence[Section]) -> str:
    """The sections as CSV, a line per number: its interval, and its difference from the first captioner with the p-value."""
    lines = []
    for section in sections:
        for column in section.columns:
            key, about = column.key, {"table": section.title, "metric": " ".join(column.header.split())}
            for row in section.rows:
                low, high = row.get(f"{key}_ci") or (None, None)
                line = about | {"key": key, "better": column.better, "captioner": csv_cell(row["name"])}
                more = {name: row.get(f"{key}_{name}") for name in ("difference", "p_value", "reason")}
                lines.append(line | {"value": row[key], "low": low, "high": high} | more)
    return pd.DataFrame(lines, dtype=object).to_csv(index=False)


def write_results(
    output_dir: str | os.PathLike[str],
    rows: Sequence[Row],
    *,
    columns: Sequence[Column],
    seed: int,
    config: Any,
    title: str = "Results",
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write `results.json` (rows, seed, configuration, versions) and `results.md` (the table), atomically; returns the first.

    Values of the configuration (a dataclass, a mapping, or a mapping of these) whose name contains token, secret or password
    are left out, and empty entries of `more`, which are further entries of the JSON file.
    """
    value = {
        "rows": [dict(row) for row in rows],
        "seed": int(seed),
        "config": plain_config(config),
        "versions": installed_versions(),
    }
    value |= {key: entry for key, entry in (more or {}).items() if entry}
    text = results_markdown(rows, title=title, columns=columns, seed=int(seed))
    atomic_write_text(Path(output_dir) / "results.md", text)
    return write_json(Path(output_dir) / "results.json", value)
