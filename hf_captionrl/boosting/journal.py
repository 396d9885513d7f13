"""The journal: one line per answer, appended when the answer arrives, so that no answer is lost.

Each line reaches the operating system immediately, so it survives `kill -9`; flushes to the disk, against a loss of power, come
in batches. Readers skip an incomplete last line of a killed run, and the next writer removes it. A journal is
named after the rows that its shard covers. A shard reads every journal of its rows, so the size of shards can change between runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.io import LineFile, to_plain

__all__ = ["JournalWriter", "journal_name", "journals", "read_journal", "read_journals"]

_FSYNC_EVERY = 64
_PATTERN = "journal-*.jsonl"
_NAME = re.compile(r"journal-(\d{9,})-(\d{9,})\.jsonl")


def journal_name(rows: range) -> str:
    """File name of the journal of some rows."""
    return f"journal-{rows.start:09d}-{rows.stop:09d}.jsonl"


def journals(folder: str | os.PathLike[str], rows: range | None = None) -> list[Path]:
    """Journals of a folder that cover some of the rows, sorted by name; None: all."""
    found = sorted(Path(folder).glob(_PATTERN))
    return found if rows is None else [path for path in found if _overlaps(path, rows)]


def _overlaps(path: Path, rows: range) -> bool:
    match = _NAME.fullmatch(path.name)
    # A journal with another name may be about any row.
    return match is None or (int(match[1]) < rows.stop and rows.start < int(match[2]))


def _lines(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Entries of complete lines; text after the last line break is being written, or is left from a kill."""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is not JSON ({error}): {line[:60]!r}. A kill can damage only the last line, so "
                "another program changed the file. Remove that line; its question is asked again."
            ) from None
        if not isinstance(entry, dict) or not {"image_id", "stage"} <= set(entry):
            raise ValueError(f"{path}, line {number}, is not an entry of a journal: {line[:60]!r}. Remove that line.")
        yield entry


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All entries of a journal, also while another process writes it."""
    path = Path(path)
    return list(_lines(path.read_bytes(), path))


def read_journals(folder: str | os.PathLike[str], rows: range | None = None) -> list[dict[str, Any]]:
    """All entries of the journals that cover some of the rows; None: of all journals."""
    return [entry for path in journals(folder, rows) for entry in read_journal(path)]


class JournalWriter(LineFile):
    """Appends entries to the journal of one shard, which it locks; a context manager. `torn`: bytes removed from its end."""

    busy = "Wait until it has finished, or use another --output."

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._waiting = 0
        super().__init__(path)

    def _begin(self, data: bytes) -> None:
        for _ in _lines(data, self.path):
            pass  # fails on a broken line before anything is asked or written
        whole = data.rfind(b"\n") + 1
        self.torn = len(data) - whole
        self.truncate(whole)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one entry; it survives a kill of the process when this returns."""
        # ASCII escapes: a lone surrogate in an answer cannot be encoded as UTF-8.
        self.append_bytes((json.dumps(to_plain(entry)) + "\n").encode("ascii"), flush=False)
        self._waiting += 1
        if self._waiting >= _FSYNC_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            super().flush()
            self._waiting = 0

    def close(self) -> None:
        try:
            self.flush()
        finally:
            super().close()
