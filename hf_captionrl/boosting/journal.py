"""The journal: one line per answer, appended when the answer arrives, so that no answer is lost.

Each line reaches the operating system immediately, so it survives `kill -9`; flushes to the disk, against a loss of power, come
in batches. Readers skip an incomplete last line of a killed run, and the next writer removes it. Each shard writes its own
journal and reads those of all shards, so the number of shards can change between runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.io import LineFile, to_plain

__all__ = ["JournalWriter", "journal_name", "journals", "read_journal", "read_journals"]

_FSYNC_EVERY = 64
_PATTERN = "journal-*.jsonl"


def journal_name(shard: int, num_shards: int) -> str:
    """File name of a shard's journal."""
    return f"journal-{shard:05d}-of-{num_shards:05d}.jsonl"


def journals(folder: str | os.PathLike[str]) -> list[Path]:
    """All journals of a folder, sorted by name."""
    return sorted(Path(folder).glob(_PATTERN))


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


def read_journals(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All entries of all journals of a folder."""
    return [entry for path in journals(folder) for entry in read_journal(path)]


class JournalWriter(LineFile):
    """Appends entries to the journal of one shard, which it locks; a context manager. `torn`: bytes removed from its end."""

    busy = "Wait until it has finished, or use another shard or output."

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
