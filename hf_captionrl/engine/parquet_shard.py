"""One Parquet shard whose damage is noticed.

Checksums cover every byte that readers use: those of Parquet's pages, and a digest of the footer, which Parquet lacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.io import atomic_write_bytes, to_plain

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DamagedShardError", "read_footer", "read_shard", "write_shard"]

_MADE_BY = b"made_by"
_DIGEST = re.compile(rb"footer ([0-9a-f]{32})")
_NO_DIGEST = b"footer " + b"0" * 32
_END = 8  # bytes after the footer: its length and Parquet's magic number


class DamagedShardError(ValueError):
    """A shard whose bytes are not those that were written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}). Remove the file and use the same command again.")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the Parquet reader become a [`DamagedShardError`]; those of the file system have a number, and stay."""
    try:
        yield
    except DamagedShardError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedShardError(path, f"{type(error).__name__}: {error}") from error


def _footer_bytes(end: bytes) -> int:
    """Bytes of the footer, from the last 8 bytes of a file, with these."""
    return int.from_bytes(end[:4], "little") + _END


def _hex_digest(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=16).hexdigest().encode()


def _check_footer(path: Path) -> None:
    """Compare the footer with its digest, which was computed with zeros in its place."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        number = _footer_bytes(file.read())
        if not _END < number <= size:
            raise DamagedShardError(path, "it is truncated")
        file.seek(size - number)
        footer = file.read()
    found = _DIGEST.search(footer)  # None: a shard of an earlier version
    if found is not None and _hex_digest(footer.replace(found[0], _NO_DIGEST)) != found[1]:
        raise DamagedShardError(path, "wrong checksum of the footer")


def write_shard(
    path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema, made_by: Mapping[str, Any] | None
) -> None:
    """Write a shard atomically, with [`Stage.made_by`]."""
    import pyarrow as pa
    import pyarrow.parquet

    described = schema.with_metadata({_MADE_BY: json.dumps(to_plain(dict(made_by or {}))), b"digest": _NO_DIGEST})
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(list(rows), schema=described)
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    data = buffer.getvalue()
    start = len(data) - _footer_bytes(data[-_END:])
    footer = data[start:].replace(_NO_DIGEST, b"footer " + _hex_digest(data[start:]))
    atomic_write_bytes(path, data[:start] + footer)


def read_footer(path: Path) -> tuple[int, dict[str, Any]]:
    """Number of rows of a shard, and the [`Stage.made_by`] that it contains."""
    import pyarrow.parquet

    with _naming(path):
        _check_footer(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.metadata.num_rows, json.loads((file.schema_arrow.metadata or {}).get(_MADE_BY, b"{}"))


def read_shard(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """Read one shard and verify its checksums.

    Args:
        path (`str` or `Path`): The file.
        columns (`Sequence[str]`, *optional*): Only these.

    Returns:
        `pyarrow.Table`: Its rows.

    Raises:
        ValueError: If the file is truncated or damaged, or lacks a column.
    """
    import pyarrow.parquet

    path = Path(path)
    with _naming(path):
        _check_footer(path)
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    with file:
        names = file.schema_arrow.names
        wanted = names if columns is None else list(columns)
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(
                f"{path} lacks the column(s) {missing}; it has {names}. Use the output of another command."
            )
        with _naming(path):
            return file.read(wanted).select(wanted)
