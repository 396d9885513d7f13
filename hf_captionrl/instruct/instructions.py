"""Instructions with answers, in Alpaca's format, as prompts and completions."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.io import read_jsonl

__all__ = ["format_prompt", "load_instructions", "to_prompts"]

logger = logging.getLogger(__name__)

_COLUMNS = ("instruction", "output")
_FILES = {".json", ".jsonl", ".ndjson", ".parquet"}


def format_prompt(instruction: str, input: str = "") -> str:
    """The prompt that the answer continues. It ends in a line break, where no tokenizer merges prompt and answer."""
    middle = f"Input: {input.strip()}\n" if input.strip() else ""
    return f"Instruction: {instruction.strip()}\n{middle}Answer:\n"


def _read_file(path: Path) -> datasets.Dataset:
    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON ({error}). Use a list of objects, or JSON Lines.") from None
    else:
        rows = [row for _, row in read_jsonl(path)]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path.name} contains items that are not objects. Use objects with instruction, input and output."
        )
    return datasets.Dataset.from_list(rows)


def to_prompts(rows: datasets.Dataset, *, max_bad_fraction: float = 0.05) -> datasets.Dataset:
    """Alpaca's columns as trl's prompt and completion."""
    missing = [column for column in _COLUMNS if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"The instructions have no column {missing[0]!r}; there are {rows.column_names}. Alpaca's format is "
            "instruction, input (may be missing) and output."
        )

    def text(row: dict[str, Any], column: str) -> str:
        value = row.get(column)
        return value.strip() if isinstance(value, str) else ""

    found = [
        {"prompt": format_prompt(text(row, "instruction"), text(row, "input")), "completion": text(row, "output")}
        for row in rows
        if text(row, "instruction") and text(row, "output")
    ]
    bad = len(rows) - len(found)
    if bad > max_bad_fraction * len(rows) or not found:
        raise ValueError(
            f"{bad} of {len(rows)} rows have a blank instruction or output, more than max_bad_fraction="
            f"{max_bad_fraction:g} allows. Check the file, or raise the limit."
        )
    if bad:
        logger.warning("%d of %d rows have a blank instruction or output and are left out.", bad, len(rows))
    return datasets.Dataset.from_list(found)


def load_instructions(
    name: str | os.PathLike[str],
    *,
    config: str | None = None,
    revision: str | None = None,
    split: str = "train",
    max_rows: int | None = None,
    max_bad_fraction: float = 0.05,
    exclude: Sequence[str] = (),
) -> datasets.Dataset:
    """Load instructions from a JSON, JSON Lines or Parquet file, or from the Hub."""
    path = Path(name)
    if path.suffix in _FILES:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path.name!r}. Give a file that exists, or a name on the Hub.")
        rows = _read_file(path)
    else:
        rows = datasets.load_dataset(str(name), config, revision=revision, split=split)
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    prompts = to_prompts(rows, max_bad_fraction=max_bad_fraction)
    unwanted = set(exclude)
    return prompts.filter(lambda row: row["prompt"] not in unwanted) if unwanted else prompts
