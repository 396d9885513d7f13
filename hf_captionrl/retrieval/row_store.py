"""A file of equally shaped rows, addressed by key, that tolerates kills, concurrent writers and damaged bytes.

A store is a folder with three files:

- `meta.json`: description of the rows (identity, dtype, shape) with a checksum; written once, atomically.
- `data.bin`: the rows. Row `i` starts at byte `i * row_bytes`, so the file can be mapped as an array.
- `index.bin`: record `i` (24 bytes) contains the key of row `i`, and the checksums of the row and of the record.

Only the process that has the lock writes, and a row is valid as soon as its record is complete. A writer that is killed
leaves at most rows without a record, which the next writer overwrites. Readers take no lock.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from hf_captionrl.io import json_digest
from hf_captionrl.retrieval.hash_index import HashIndex

__all__ = ["RowStore", "StoreMismatchError", "drop_rows"]

_VERSION = 1
_RECORD = struct.Struct("<16sII")  # key digest, checksum of the row, checksum of this record and its position
_DROPPED = bytes(_RECORD.size)  # the record of a dropped row
_FIELDS = np.dtype([("digest", "<u8", 2), ("row_sum", "<u4"), ("record_sum", "<u4")])  # of _RECORD
_RECENT = 4096
_DTYPES = ("float16", "float32", "uint8")


class StoreMismatchError(ValueError):
    """The folder contains rows of another model, revision, dtype or shape."""


def _write_all(descriptor: int, data: memoryview | bytearray | bytes, offset: int) -> None:
    """`os.pwrite` until everything is written, because a nearly full disk may accept only a part."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _record_sum(digest: bytes, row_sum: int, position: int) -> int:
    return zlib.crc32(struct.pack("<16sIQ", digest, row_sum, position))


class RowStore:
    """Append-only array on disk whose rows are found by the digest of a key.

    A folder with another `identity` is refused; `append` raises `TimeoutError` after `lock_timeout_s` behind another
    writer.
    """

    def __init__(self, directory: str | os.PathLike, identity: dict[str, Any], *, lock_timeout_s: float = 300.0):
        self.directory = Path(directory)
        self.identity = identity
        self.lock_timeout_s = lock_timeout_s
        self._warned = False
        self._reset()
        self.refresh()

    def _reset(self) -> None:
        self.dtype: np.dtype | None = None
        self.shape: tuple[int, ...] | None = None  # of one row
        self._records: np.ndarray = np.empty(0, _FIELDS)  # read so far, valid or not
        self._is_valid: np.ndarray = np.empty(0, bool)
        self._index: HashIndex | None = None  # of the first `_indexed` records
        self._indexed = 0
        self._recent: dict[bytes, int] = {}  # positions of the valid records after them
        self._damaged: list[int] = []  # records with a wrong checksum, to be dropped by the next writer
        self._map: np.ndarray | None = None

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_valid))

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes; 0 while the store is empty."""
        if self.shape is None or self.dtype is None:
            return 0
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def refresh(self) -> None:
        """Read the records that this or another process has added since the last call."""
        if self.shape is None and not self._load_meta():
            return
        try:
            with open(self.directory / "index.bin", "rb") as file:
                if os.fstat(file.fileno()).st_size // _RECORD.size < len(self._records):
                    raise FileNotFoundError  # another process emptied the store
                file.seek(len(self._records) * _RECORD.size)
                raw = file.read()
            held = os.path.getsize(self.directory / "data.bin") // self.row_bytes
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            self._reset()
            return
        damaged, lost = 0, 0
        number, count = len(raw) // _RECORD.size, len(self._records)
        if not number:
            return
        complete = memoryview(raw)[: number * _RECORD.size]  # a killed writer may leave an incomplete record
        is_valid: np.ndarray = np.zeros(number, bool)
        for position, fields in enumerate(_RECORD.iter_unpack(complete), start=count):
            digest, row_sum, record_sum = fields
            if _record_sum(digest, row_sum, position) != record_sum:
                if fields != _RECORD.unpack(_DROPPED):
                    damaged += 1
                    self._damaged.append(position)
            elif position >= held:
                lost += 1
                self._damaged.append(position)
            else:
                is_valid[position - count] = True
        self._records = np.concatenate([self._records, np.frombuffer(complete, _FIELDS)])
        self._is_valid = np.concatenate([self._is_valid, is_valid])
        self._map = None
        del raw, complete
        self._extend_index(count)
        if damaged or lost:
            warnings.warn(
                f"The feature store {self.directory} is damaged: {damaged} index records are wrong and {lost} rows "
                "are missing. They are dropped and computed again.",
                stacklevel=2,
            )

    def _load_meta(self) -> bool:
        try:
            text = (self.directory / "meta.json").read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        except UnicodeDecodeError:
            text = ""
        try:
            meta = json.loads(text)
            checksum = meta.pop("checksum")
            good = checksum == _meta_checksum(meta) and meta["dtype"] in _DTYPES
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            if not self._warned:
                warnings.warn(
                    f"{self.directory / 'meta.json'} is damaged, so the features in this folder cannot be read. They "
                    "are computed again.",
                    stacklevel=2,
                )
            self._warned = True
            return False
        if meta["identity"] != self.identity:
            raise StoreMismatchError(
                f"{self.directory} contains features of {meta['identity']}, but {self.identity} was requested. Features "
                "of different models or revisions are never mixed. Use another cache directory, or delete this folder."
            )
        self.dtype, self.shape = np.dtype(meta["dtype"]), tuple(meta["shape"])
        return True

    def _extend_index(self, begin: int) -> None:
        """Index the records from `begin` on: in a dictionary at first, and sorted with all others once there are many."""
        if len(self._records) - self._indexed > max(_RECENT, self._indexed // 16):
            self._index, self._indexed, self._recent = HashIndex(self._records["digest"][:, 0]), len(self._records), {}
            return
        digests = self._records["digest"]
        for new in np.flatnonzero(self._is_valid[begin:]).tolist():
            self._recent[digests[begin + new].tobytes()] = begin + new

    def positions(self, digests: np.ndarray) -> np.ndarray:
        """int64 row numbers `(N,)` of digests `(N, 2)`, -1 if the key is unknown."""
        known = self._records["digest"]
        found: np.ndarray = np.full(len(digests), -1, np.int64)
        if self._index is not None:

            def is_same(asked: np.ndarray, rows: np.ndarray) -> np.ndarray:
                return (digests[asked] == known[rows]).all(axis=1) & self._is_valid[rows]

            found = self._index.find(digests[:, 0], is_same)
        if self._recent:
            for i in np.flatnonzero(found < 0).tolist():
                position = self._recent.get(digests[i].tobytes(), -1)
                found[i] = position if position >= 0 and self._is_valid[position] else -1
        return found

    def sums(self, positions: np.ndarray) -> np.ndarray:
        """Stored CRC-32 checksums `(N,)` of rows, uint32."""
        return self._records["row_sum"][positions]

    def array(self) -> np.ndarray:
        """All rows that have a record, mapped read-only, `(rows, *shape)`; later rows need another call."""
        if self.shape is None or self.dtype is None:
            raise ValueError(f"{self.directory} has no features yet. Use get_or_compute.")
        if self._map is None:
            rows = min(len(self._records), os.path.getsize(self.directory / "data.bin") // self.row_bytes)
            if rows == 0:
                return np.empty((0, *self.shape), self.dtype)
            self._map = np.memmap(self.directory / "data.bin", self.dtype, mode="r", shape=(rows, *self.shape))
        return self._map

    # ---------------------------------------------------------------- writing

    def append(self, digests: np.ndarray, rows: np.ndarray) -> None:
        """Add `(N, *shape)` float16, float32 or uint8 rows under digests `(N, 2)`.

        Existing keys, of this or another process, are not changed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / "lock", timeout=self.lock_timeout_s):
            self.refresh()
            self._prepare(rows.dtype, rows.shape[1:])
            if self._damaged:
                _overwrite(self.directory, self._damaged)
                self._damaged = []
            fresh: dict[bytes, int] = {}
            for i in np.flatnonzero(self.positions(digests) < 0).tolist():
                fresh.setdefault(digests[i].tobytes(), i)
            if not fresh:
                return
            block = np.ascontiguousarray(rows[list(fresh.values())])
            start = len(self._records)
            records = bytearray()
            for i, digest in enumerate(fresh):
                row_sum = zlib.crc32(block[i].data)
                records += _RECORD.pack(digest, row_sum, _record_sum(digest, row_sum, start + i))
            # Rows are written before the records that refer to them.
            self._write("data.bin", block.data, start * self.row_bytes)
            self._write("index.bin", records, start * _RECORD.size, truncate=True)
            self.refresh()

    def drop(self, positions: Sequence[int]) -> None:
        """Drop damaged rows; their keys are unknown afterwards."""
        self._is_valid[list(positions)] = False
        drop_rows(self.directory, sorted(set(positions)), lock_timeout_s=self.lock_timeout_s)

    def _write(self, name: str, data: memoryview | bytearray | bytes, offset: int, *, truncate: bool = False) -> None:
        descriptor = os.open(self.directory / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if truncate:  # removes an incomplete record of a killed writer
                os.ftruncate(descriptor, offset)
            _write_all(descriptor, data, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _prepare(self, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """Write `meta.json` for the first row, or compare the row with it. The caller has the lock."""
        if self.shape is None and not self._load_meta():
            if dtype.name not in _DTYPES or 0 in shape:
                raise StoreMismatchError(
                    f"Rows are {dtype.name} {shape}, but must be {' or '.join(_DTYPES)} and not empty."
                )
            # Rows without readable meta are lost. Remove the index first: rows without an index are ignored.
            for name in ("index.bin", "data.bin"):
                (self.directory / name).unlink(missing_ok=True)
            self._reset()
            meta = {"version": _VERSION, "identity": self.identity, "dtype": dtype.name, "shape": list(shape)}
            meta["checksum"] = _meta_checksum(meta)
            temporary = self.directory / "meta.json.tmp"  # a fixed name, because only the process with the lock writes
            temporary.unlink(missing_ok=True)
            self._write(temporary.name, json.dumps(meta, indent=1, sort_keys=True).encode("utf-8"), 0)
            os.replace(temporary, self.directory / "meta.json")
            self.dtype, self.shape = dtype, tuple(shape)
        if (self.dtype, self.shape) != (dtype, tuple(shape)):
            raise StoreMismatchError(
                f"{self.directory} contains {self.dtype} rows of shape {self.shape}, not {dtype} rows of shape "
                f"{tuple(shape)}. Use another `what`, or delete the folder if the model's code changed."
            )


def drop_rows(directory: str | os.PathLike, positions: Sequence[int], *, lock_timeout_s: float = 300.0) -> None:
    """Drop rows of a store for all processes that open it later."""
    with FileLock(Path(directory) / "lock", timeout=lock_timeout_s):
        _overwrite(Path(directory), positions)


def _overwrite(directory: Path, positions: Sequence[int]) -> None:
    descriptor = os.open(directory / "index.bin", os.O_RDWR)
    try:
        for position in positions:
            _write_all(descriptor, _DROPPED, position * _RECORD.size)
    finally:
        os.close(descriptor)


def _meta_checksum(meta: dict[str, Any]) -> str:
    return json_digest(meta)
