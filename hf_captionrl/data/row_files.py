"""Reads JSON lines, CSV and Parquet. A file is either read completely or refused; no row is dropped silently."""

from __future__ import annotations

import csv
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = [
    "CAPTION_COLUMNS",
    "Row",
    "is_json_lines",
    "parse_json",
    "read_csv",
    "read_json_lines",
    "read_rows",
    "read_text",
]

logger = logging.getLogger(__name__)

Row = dict[str, Any]

CAPTION_COLUMNS = ("captions", "caption", "text", "sentences", "sentence", "raw")
"""Usual names of the caption column, in the order of the search."""


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error


def parse_json(text: str, where: str) -> Any:
    """A value of JSON."""

    def unique(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"{where} has the key {key!r} twice. Write several captions as a list: [..., ...].")
        return row

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error}). Correct or remove it.") from error


def is_json_lines(text: str) -> bool:
    """Whether a text that begins with `{` holds one object per line."""
    first, _, rest = text.strip().partition("\n")
    try:
        json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        return False
    return bool(rest.strip())


def read_json_lines(path: Path) -> list[Row]:
    """The objects of a file of JSON lines."""
    rows = []
    # Not splitlines(), which also splits at U+2028 inside a caption.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            row = parse_json(line, f"Line {number} of {path}")
            if not isinstance(row, dict):
                raise ValueError(
                    f'Line {number} of {path} holds a {type(row).__name__}, not an object. Write {{"file_name": ...}}.'
                )
            rows.append(row)
    return rows


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file, whose first line names the columns.

    Several columns with the same name for captions (`caption`, `text`, ...) become a list of captions, without empty cells
    if any is filled.
    """
    rows: list[Row] = []
    finished = 0  # lines of the records that were read completely
    with path.open(encoding="utf-8-sig", newline="") as file:
        # If not strict, an unclosed quote would extend the field to the next quote or the end of the file.
        lines = csv.reader(file, strict=True)
        try:
            names = [name.strip() for name in next(lines, [])]
            repeated = _repeated_columns(names, path)
            finished = lines.line_num
            for values in lines:
                if values and len(values) != len(names):
                    cure = 'Put captions with commas into quotes: a.jpg,"a dog, running".'
                    raise ValueError(
                        f"Line {lines.line_num} of {path} has {len(values)} fields, and the first line {len(names)}. "
                        f"{cure if len(values) > len(names) else 'Write a comma for each empty field too.'}"
                    )
                if values:
                    _warn_of_rows_inside(values, names, f"Line {lines.line_num} of {path}")
                    rows.append(_csv_row(names, values, repeated, f"Line {lines.line_num} of {path}"))
                finished = lines.line_num
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error
        except csv.Error as error:
            begins = f"The row that begins in line {finished + 1} of {path}"
            if "unexpected end" in str(error):
                raise ValueError(f"{begins} has a quote that is never closed. Close it, or remove it.") from error
            if "expected after" in str(error):
                raise ValueError(
                    f"{begins} has text after a closing quote: a quote before it is not closed, or a quote inside a "
                    f'field is not doubled. Close it, or write two: "a ""big"" dog".'
                ) from error
            raise ValueError(f"{begins} is not valid CSV ({error}). Correct it.") from error
    return rows


def _repeated_columns(names: list[str], path: Path) -> frozenset[str]:
    """Names of caption columns that occur several times."""
    repeated = frozenset(name for name, number in Counter(names).items() if number > 1 and name)
    refused = sorted(repeated - set(CAPTION_COLUMNS))
    if refused:
        raise ValueError(
            f"The first line of {path} names the column {refused[0]!r} {names.count(refused[0])} times, and only one "
            f"could be read. Use different names; only several columns 'caption' are read as several captions."
        )
    return repeated


def _warn_of_rows_inside(values: list[str], names: list[str], where: str) -> None:
    """Warn if a quote is closed in a later row, which joins the rows between: valid CSV, but usually an error."""
    for value in values:
        inner = [line for line in value.splitlines()[1:] if line.count(",") == len(names) - 1]
        if inner and len(names) > 1:
            logger.warning(
                "%s ends a text of several lines, of which %r looks like a row. Check its quotes.", where, inner[0]
            )


def _csv_row(names: list[str], values: list[str], repeated: frozenset[str], where: str) -> Row:
    row: Row = {name: [] if name in repeated else None for name in names if name}
    for number, (name, value) in enumerate(zip(names, values, strict=True), start=1):
        if name in repeated:
            row[name].append(value)
        elif name:
            row[name] = value
        elif value.strip():
            raise ValueError(
                f"{where} has {value!r:.60} in column {number}, which has no name in the first line. Name it."
            )
    for name in repeated:
        # For images with fewer captions than others. A row without captions keeps its empty cells, so that the check finds it.
        row[name] = [text for text in row[name] if text.strip()] or row[name]
    return row


def read_rows(path: Path) -> list[Row]:
    """The rows of a file by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return read_csv(path)
    if suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        if len(set(table.column_names)) < len(table.column_names):
            raise ValueError(f"{path} has two columns with the same name: {table.column_names}. Use different names.")
        return table.to_pylist()
    return read_json_lines(path)
