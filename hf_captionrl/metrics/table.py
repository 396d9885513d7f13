"""The results table of all recipes, captioners side by side, and what results.json says of a run.

A row is a mapping with `name` and one number per column. A number `<key>` may have `<key>_ci`, its 95 % interval `[low, high]`,
and None may have `<key>_reason`, one sentence that says why. Fractions are in [0, 1], never percent. `note` is a sentence on the
row, shown below the table. In comparisons, `<key>_mark` marks a significant difference from the first captioner.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
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

# --- The results table, printed and written as JSON and Markdown -----------------------------------------------------

Row = Mapping[str, Any]
"""Numbers of one captioner, or of the references."""

REFERENCES = "references"
"""Row name of the human captions, which are separated from the captioners."""

_LEGEND = (
    "↑ higher is better, ↓ lower is better; length has no better direction. Fractions are in [0, 1]. "
    "Lexical diversity: different words, in thousands. Pool: among all test images; RD100: among 100, 99 of them "
    "random. Hallucination: share of claims that are wrong."
)


def check_rows(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Refuse rows whose numbers would be shown wrong: names that clash, missing keys, percent, intervals that are none."""
    if not rows:
        raise ValueError("There are no rows. Evaluate at least one captioner before writing a table.")
    names: set[str] = set()
    for index, row in enumerate(rows):
        name = row.get("name")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"Row {index} has the name {name!r}; every row needs a non-empty name.")
        if name in names:
            raise ValueError(f"Two rows are called {name!r}; names must differ. Rename one of them.")
        names.add(name)
        missing = [column.key for column in columns if column.key not in row]
        if missing:
            raise ValueError(f"Row {name!r} has no {', '.join(missing)}. Write None where nothing was measured.")
        for column in columns:
            key, value, interval = column.key, row[column.key], row.get(f"{column.key}_ci")
            if value is None:
                reason = row.get(f"{key}_reason")
                if reason is not None and not str(reason).strip():
                    raise ValueError(f"{key}_reason of {name!r} is blank. Say the reason, or leave it out.")
                continue
            for number in (value, *(interval if interval is not None else ())):
                is_number = hasattr(number, "__float__") and not isinstance(number, bool)
                if not is_number or not math.isfinite(float(number)):
                    raise ValueError(f"{key} of {name!r} is {number!r}; it must be a finite number, or None.")
                if column.is_fraction and not 0.0 <= float(number) <= 1.0:
                    raise ValueError(f"{key} of {name!r} is {number}; fractions are in [0, 1], never percent.")
            if interval is not None and (len(interval) != 2 or float(interval[0]) > float(interval[1])):
                raise ValueError(f"{key}_ci of {name!r} is {interval!r}; an interval is [low, high] with low <= high.")


def format_cell(row: Row, column: Column, *, separator: str = " ") -> str:
    """Text of one cell; `separator` stands between a number and its interval.

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
        return f"{shown}{separator}±{above}"
    return f"{shown}{separator}[{low:.{column.digits}f}, {high:.{column.digits}f}]"


def print_table(
    rows: Sequence[Row], *, columns: Sequence[Column], title: str | None = None, file: IO[str] | None = None
) -> None:
    """Print the rows as one table, or as several tables if the terminal is too narrow."""
    _print(_rich_table, rows, columns, _notes(rows, columns), file, title)


def _print(
    build: Callable[..., Table],
    given: Sequence[Any],
    parts: Sequence[Any],
    notes: Iterable[str],
    file: IO[str] | None,
    title: str | None = None,
) -> None:
    """Print as few tables of some parts (columns) as the width allows, and notes below them."""
    console = Console(file=file, highlight=False)

    def width(chosen: Sequence[Any]) -> int:
        # Measured with a wide limit: on a narrow console rich would report the limited width.
        return Measurement.get(
            console, console.options.update(max_width=10_000), build(given, chosen, console)
        ).maximum

    divided: list[list[Any]] = [[*parts[:1]]]
    for part in parts[1:]:
        if console.is_terminal and width([*divided[-1], part]) > console.width:
            divided.append([])
        divided[-1].append(part)
    # Piped output has no width: use the table's width instead of wrapping at 80 characters.
    if not console.is_terminal:
        console.width = max(console.width, width(parts))
    if title:
        console.print(Text(title, style="bold"))
    for chosen in divided:
        console.print(build(given, chosen, console))
    for note in notes:
        console.print(Text(encodable(note, console), style="dim"))


def _table(vertical: Literal["top", "bottom"], headings: Iterable[Text]) -> Table:
    """An empty table with a column of names; Text and not str, so that [brackets] in names and reasons are not markup."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True, vertical="top")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, vertical=vertical)
    return table


def _notes(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Notes on rows, why numbers are missing, and the legend."""
    of_rows = [f"{row['name']}: {row['note']}" for row in rows if row.get("note")]
    has_intervals = any(row.get(f"{column.key}_ci") is not None for row in rows for column in columns)
    legend = _LEGEND + (" ± or [low, high]: 95 % interval." if has_intervals else "")
    return [*of_rows, *_reasons([Section("", columns, rows)]), legend]


def _rich_table(rows: Sequence[Row], columns: Sequence[Column], console: Console) -> Table:
    headings = []
    for column in columns:
        heading = Text(encodable(column.header, console), justify="right")
        if column.arrow:
            space = "" if column.header.endswith("\n") else " "
            heading.append(encodable(space + column.arrow, console), style="cyan")
        headings.append(heading)
    table = _table("top", headings)
    for index, row in enumerate(rows):
        cells = []
        for column in columns:
            if row[column.key] is None and row.get(f"{column.key}_reason"):
                cells.append(Text("not run", style="dim"))
                continue
            value, _, interval = format_cell(row, column, separator="\n").partition("\n")
            cell = Text(encodable(value, console), justify="right")
            if interval:
                cell.append(encodable(f"\n{interval}", console), style="dim")
            cells.append(cell)
        last_captioner = index + 1 < len(rows) and rows[index + 1]["name"] == REFERENCES
        table.add_row(Text(encodable(row["name"], console)), *cells, end_section=last_captioner)
    return table


def encodable(text: str, console: Console) -> str:
    """Text with ASCII replacements for characters that a terminal cannot encode."""
    if console.encoding.lower().startswith("utf"):
        return text
    for character, stand_in in {"↑": "^", "↓": "v", "±": "+-", "–": "-", "≥": ">=", "≤": "<="}.items():
        text = text.replace(character, stand_in)
    return text.encode(console.encoding, errors="backslashreplace").decode(console.encoding)


def results_markdown(
    rows: Sequence[Row], *, columns: Sequence[Column], title: str = "Results", seed: int | None = None
) -> str:
    """The rows as a Markdown table with its legend; an empty title is left out."""
    check_rows(rows, columns)
    lines = [(row["name"], [_cell(row, column) for column in columns]) for row in rows]
    *notes, legend = _notes(rows, columns)
    notes = [*map(escape_markdown, notes), legend, *([] if seed is None else [f"Seed {seed}."])]
    heading = f"# {escape_markdown(title)}\n\n" if title else ""
    return heading + _markdown_table([column.title for column in columns], lines) + "".join(f"\n{n}\n" for n in notes)


def _markdown_table(heads: Sequence[str], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    table = [[""] + [f" {head}" for head in heads]] + [[f" {escape_markdown(c)}" for c in (n, *cs)] for n, cs in lines]
    rows = ["|" + " |".join(row) + " |\n" for row in table]
    return rows[0] + "|:--|" + "--:|" * len(heads) + "\n" + "".join(rows[1:])


def write_results(
    output_dir: str | os.PathLike[str],
    rows: Sequence[Row],
    *,
    columns: Sequence[Column],
    seed: int,
    config: Any,
    name: str = "results",
    title: str = "Results",
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write `<name>.json` (rows, seed, configuration, versions) and `<name>.md` (the table), atomically; returns the first.

    Values of the configuration (a dataclass, a mapping, or a mapping of these) whose name contains token, secret or password
    are left out, and empty entries of `more`, which are further entries of the JSON file.
    """
    if not name or Path(name).name != name:
        raise ValueError(f"name is {name!r}; it must be a file name without folders. Put the folder into output_dir.")
    value = {
        "rows": [dict(row) for row in rows],
        "seed": int(seed),
        "config": plain_config(config),
        "versions": installed_versions(),
    }
    value |= {key: entry for key, entry in (more or {}).items() if entry}
    folder = Path(output_dir)
    atomic_write_text(folder / f"{name}.md", results_markdown(rows, title=title, columns=columns, seed=int(seed)))
    return write_json(folder / f"{name}.json", value)


# --- Captioners side by side: one line per number, one column per captioner, one section per paper -------------------

# Longer names are divided, unless numbers are wider.
_NAME_WIDTH = 12

_COMPARISON_LEGEND = (
    "↑ higher is better, ↓ lower is better. Fractions are in [0, 1]. ± or [low, high]: 95 % interval over images. "
    "* p < 0.05, ** p < 0.01 compared with the first column: paired randomisation test, not corrected for the number of tests."
)


@dataclass(frozen=True)
class Section:
    """One paper's table: the columns in the order in which they are shown, and a row per captioner, as in every section."""

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
        if (others := [row["name"] for row in section.rows]) != names:
            raise ValueError(f"{section.title!r} compares {others}, not {names}. Pass the same captioners.")
    return names


def without_repeats(sections: Sequence[Section]) -> list[Section]:
    """The sections with each column where it stands first; sections without another column are left out."""
    seen: set[tuple[str, str]] = set()
    found = []
    for section in sections:
        columns = [column for column in section.columns if (column.key, column.header) not in seen]
        seen |= {(column.key, column.header) for column in columns}
        found += [replace(section, columns=columns)] if columns else []
    return found


def _cell(row: Row, column: Column) -> str:
    if row[column.key] is None and row.get(f"{column.key}_reason"):
        return "not run"
    mark = row.get(f"{column.key}_mark")
    return format_cell(row, column) + (f" {mark}" if mark else "")


def _reasons(sections: Sequence[Section]) -> list[str]:
    """Why numbers are missing: a line per reason, with the columns, and the rows if it is not all of them."""
    notes: dict[str, dict[str, list[str]]] = {}  # rows by reason and column
    for section in sections:
        for column in section.columns:
            for row in section.rows:
                reason = " ".join(str(row.get(f"{column.key}_reason") or "").split())
                if row[column.key] is None and reason:
                    names = notes.setdefault(reason, {}).setdefault(column.title, [])
                    names += [] if row["name"] in names else [row["name"]]
    lines = []
    for reason, columns in notes.items():
        where: dict[str, list[str]] = {}
        for title, names in columns.items():
            where.setdefault("" if len(names) == len(sections[0].rows) else f" ({', '.join(names)})", []).append(title)
        places = "; ".join(f"{', '.join(titles)}{names}" for names, titles in where.items())
        lines.append(f"not run: {reason.rstrip('.')}: {places}")
    return lines


def _comparison(sections: Sequence[Section], names: Sequence[str], console: Console) -> Table:
    """A table of some captioners."""

    def shown(text: str) -> str:
        return encodable(text, console)

    label_width = max(len(column.title) for section in sections for column in section.columns)
    cells = [
        [[shown(_cell(row, column)) for row in section.rows if row["name"] in names] for column in section.columns]
        for section in sections
    ]
    widths = [max(_NAME_WIDTH, *map(len, column)) for column in zip(*itertools.chain(*cells), strict=True)]
    table = _table("bottom", [Text(_folded(shown(n), width)) for n, width in zip(names, widths, strict=True)])
    for section, lines in zip(sections, cells, strict=True):
        title = "\n".join(textwrap.wrap(shown(section.title), label_width, break_long_words=False))
        table.add_row(Text(title, style="bold"), *([""] * len(names)))
        for number, (column, line) in enumerate(zip(section.columns, lines, strict=True), start=1):
            texts = [Text(cell, style="dim" if cell == "not run" else "") for cell in line]
            table.add_row(Text(shown(column.title)), *texts, end_section=number == len(section.columns))
    return table


def _folded(name: str, width: int) -> str:
    """A name in lines of a width, divided only after spaces and `/`, `_`, `-` and `.`."""
    lines = [""]
    for part in re.findall(r"[^\s/_.-]*[\s/_.-]+|[^\s/_.-]+", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def print_comparison(sections: Sequence[Section], *, file: IO[str] | None = None) -> None:
    """Print the sections below each other, with aligned columns; as several tables if the terminal is too narrow."""
    _print(_comparison, sections, _check(sections), (*_reasons(sections), _COMPARISON_LEGEND), file)


def comparison_markdown(sections: Sequence[Section], *, title: str = "Comparison") -> str:
    """The sections as Markdown tables with their legend."""
    names = _check(sections)
    heads, text = [escape_markdown(name) for name in names], f"# {escape_markdown(title)}\n"
    for section in sections:
        lines = [(column.title, [_cell(row, column) for row in section.rows]) for column in section.columns]
        text += f"\n## {escape_markdown(section.title)}\n\n" + _markdown_table(heads, lines)
    return text + "".join(f"\n{escape_markdown(note)}\n" for note in (*_reasons(sections), _COMPARISON_LEGEND))


def comparison_csv(sections: Sequence[Section]) -> str:
    """The sections as CSV, a line per number: its interval, and its difference from the first captioner with the p-value."""
    _check(sections)
    buffer = io.StringIO(newline="")
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow("table metric key better captioner value low high difference p_value reason".split())
    for section in sections:
        for column in section.columns:
            metric = [section.title, " ".join(column.header.split()), column.key, column.better or ""]
            for row in section.rows:
                key = column.key
                low, high = row.get(f"{key}_ci") or (None, None)
                more = [row.get(f"{key}_{name}") for name in ("difference", "p_value", "reason")]
                lines.writerow([*metric, csv_cell(row["name"]), row[key], low, high, *more])
    return buffer.getvalue()


_LATEX: dict[str, str | int | None] = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "–": "--",
    "≥": r"$\geq$", "≤": r"$\leq$",
}  # fmt: skip


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(str.maketrans(_LATEX))


def comparison_latex(sections: Sequence[Section]) -> str:
    """The sections as LaTeX tables of the package booktabs; reasons and legend are comments."""
    names = _check(sections)
    text = "% \\usepackage{booktabs}\n"
    for section in sections:
        text += f"\n% {_latex(section.title)}\n\\begin{{tabular}}{{l{'r' * len(names)}}}\n\\toprule\n"
        text += "".join(f" & {_latex(name)}" for name in names) + " \\\\\n\\midrule\n"
        for column in section.columns:
            cells = "".join(f" & {_latex(_cell(row, column))}" for row in section.rows)
            text += f"{_latex(column.title)}{cells} \\\\\n"
        text += "\\bottomrule\n\\end{tabular}\n"
    return text + "".join(f"% {_latex(note)}\n" for note in (*_reasons(sections), _COMPARISON_LEGEND))
