"""The journal: every answer on a line of its own, appended the moment it arrives, so that nothing paid for is lost.

Like a file of captions it grows line by line, so it is not written whole (see `hf_captionrl.io`). A line is handed to the
system at once, which `kill -9` cannot undo; flushes to the disk itself, for a loss of power, come in batches. What a killed
run left of a last line is cut off by the next writer, and passed over by readers. Each shard has a journal of its own, and
reads those of all others: the number of shards may change from run to run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.io import LineFile, to_plain

__all__ = ["JournalWriter", "journal_name", "journals", "read_journal"]

_FSYNC_EVERY = 64
_PATTERN = "journal-*.jsonl"


def journal_name(shard: int, num_shards: int) -> str:
    """File name of a shard's journal."""
    return f"journal-{shard:05d}-of-{num_shards:05d}.jsonl"


def journals(folder: str | os.PathLike[str]) -> list[Path]:
    """All journals of a folder, in the order of their names."""
    return sorted(Path(folder).glob(_PATTERN))


def _lines(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Entries of whole lines; the part after the last line break is being written, or was torn by a kill."""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is no JSON ({error}): {line[:60]!r}. Only a last line can be torn by a kill, so "
                f"something else wrote here. Remove that line; its answer is asked for again."
            ) from None
        if not isinstance(entry, dict) or not {"image_id", "stage"} <= set(entry):
            raise ValueError(f"{path}, line {number}, is no entry of a journal: {line[:60]!r}. Remove that line.")
        yield entry


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every entry of a journal, also of one that another process is writing."""
    path = Path(path)
    return list(_lines(path.read_bytes(), path))


class JournalWriter(LineFile):
    """Appends entries to the journal of one shard; to be used as a context.

    Args:
        path: The journal; made if missing, with its folder.

    Attributes:
        torn: Bytes of a torn last line that were cut off.
    """

    busy = "Let it finish, or choose another shard or output."

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._waiting = 0
        super().__init__(path)

    def _begin(self, data: bytes) -> None:
        for _ in _lines(data, self.path):
            pass  # a broken line is reported before anything is asked or written
        whole = data.rfind(b"\n") + 1
        self.torn = len(data) - whole
        self.truncate(whole)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one entry; when this returns, a kill of the process cannot lose it."""
        # ASCII escapes keep half surrogates of a hostile answer from breaking the encoding.
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
