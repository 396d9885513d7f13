"""Caches features on disk, keyed by image, model and revision.

Legend: N keys.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from hf_captionrl.utils.io import json_digest

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from hf_captionrl.retrieval.scorer import Scorer


# --- Keys of cached features: hashes of the content of images and models ---------------------------------------------


def image_hash(image: Image.Image) -> str:
    """Hash of the decoded pixels, independent of the file name.

    Args:
        image: A PIL image, hashed as RGB.

    Returns:
        `str`: 32 hex digits, BLAKE2b over width, height and RGB bytes.
    """
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    digest = hashlib.blake2b(f"RGB {rgb.width}x{rgb.height}\n".encode(), digest_size=16)
    digest.update(rgb.tobytes())
    return digest.hexdigest()


# Fields of a config that do not affect the model's outputs.
_VOLATILE = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "architectures"}
    | {"_attn_implementation_autoset", "attn_implementation", "_attn_implementation"}
)


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _stable(v) for k, v in value.items() if k not in _VOLATILE}
    return [_stable(v) for v in value] if isinstance(value, (list, tuple)) else value


def model_fingerprint(model: torch.nn.Module, *parts: str) -> str:
    """Hash of a model's config and weights, used as its revision if there is no commit hash.

    A local folder and the model loaded from it have the same fingerprint. Changing one weight changes it.

    Args:
        model: Any module; `model.config` is hashed too, if it exists.
        *parts: More texts that affect the features, such as the JSON of the image processor.

    Returns:
        `str`: 32 hex digits. Hashing runs at about 0.7 GB/s on one core.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = getattr(model, "config", None)
    texts = [type(model).__name__, *parts]
    if config is not None and hasattr(config, "to_dict"):
        texts.append(json.dumps(_stable(config.to_dict()), sort_keys=True, default=str))
    digest.update(json.dumps(texts).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_tensor_bytes(tensor))
    return digest.hexdigest()


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    # As bytes, because NumPy has no bfloat16.
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


# --- Digests of keys, and an index of hashes in 16 bytes per row -----------------------------------------------------
# Legend: N rows, M hashes that are looked up.

_AT_ONCE = 4096


def key_digest(key: str) -> bytes:
    """16 bytes that represent a key: BLAKE2b of its UTF-8 encoding."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def key_digests(keys: Collection[str]) -> np.ndarray:
    """Digests of N keys, uint64 `(N, 2)`."""
    found: np.ndarray = np.empty((len(keys), 2), "<u8")
    given = iter(keys)
    for start in range(0, len(keys), _AT_ONCE):
        part = b"".join(map(key_digest, islice(given, _AT_ONCE)))
        found[start : start + _AT_ONCE] = np.frombuffer(part, "<u8").reshape(-1, 2)
    return found


def key_hashes(keys: Collection[str]) -> np.ndarray:
    """First halves of the digests of N keys, uint64 `(N,)`."""
    found: np.ndarray = np.empty(len(keys), "<u8")
    given = iter(keys)
    for start in range(0, len(keys), _AT_ONCE):
        found[start : start + _AT_ONCE] = key_digests(list(islice(given, _AT_ONCE)))[:, 0]
    return found


class HashIndex:
    """Rows by 64-bit hash; the caller compares the values that the hashes represent.

    `hashes` `(N,)` are uint64.
    """

    def __init__(self, hashes: np.ndarray) -> None:
        self.order = np.argsort(hashes, kind="stable")  # (N,) rows; those with equal hashes ascend
        self.sorted = hashes[self.order]  # (N,)

    def find(self, hashes: np.ndarray, is_same: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """For each of M hashes, the first row that represents the same value, `(M,)`; -1 if there is none.

        `hashes` `(M,)` are uint64; `is_same` gets positions in them and rows.
        """
        found: np.ndarray = np.full(len(hashes), -1, np.int64)
        asked: np.ndarray = np.arange(len(hashes))
        place: np.ndarray = np.asarray(np.searchsorted(self.sorted, hashes))
        while True:
            inside = place < len(self.sorted)
            inside[inside] = self.sorted[place[inside]] == hashes[asked[inside]]
            asked, place = asked[inside], place[inside]
            if not len(asked):
                return found
            rows = self.order[place]
            same = is_same(asked, rows)
            found[asked[same]] = rows[same]
            asked, place = asked[~same], place[~same] + 1


# --- Rows by id in 16 bytes per row: sorted 64-bit hashes, and a comparison of the ids themselves --------------------
# Legend: N ids, M names that are looked up.


class RowLookup(Set[str]):
    """The set of the ids of a column, and their rows. The index is made on first use."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.rows([name])[0] >= 0)

    @classmethod
    def _from_iterable(cls, names: Iterable[Any]) -> set[Any]:  # type: ignore[override]
        return set(names)  # the result of `&`, `-`, ...

    @cached_property
    def _index(self) -> HashIndex:
        return HashIndex(key_hashes(self.ids))

    def _at(self, rows: np.ndarray) -> np.ndarray:
        """Ids of some rows, an array of objects."""
        listed = rows.tolist()
        names = [self.ids[row] for row in listed] if isinstance(self.ids, list | tuple) else self.ids[listed]  # type: ignore[call-overload]
        return np.array(names, dtype=object)

    def rows(self, names: Sequence[str]) -> np.ndarray:
        """First row of each name, int64 `(M,)`; -1 for unknown names."""
        found: np.ndarray = np.empty(len(names), np.int64)
        given = iter(names)
        for start in range(0, len(names), _AT_ONCE):
            part = np.array(list(islice(given, _AT_ONCE)), dtype=object)
            found[start : start + len(part)] = self._find(part)
        return found

    def _find(self, names: np.ndarray) -> np.ndarray:
        def is_same(asked: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return names[asked] == self._at(rows)

        return self._index.find(key_hashes(names), is_same)

    def missing(self, names: Sequence[str]) -> list[str]:
        """The names that are not ids, in their order."""
        return [name for name, row in zip(names, self.rows(names), strict=True) if row < 0]

    def first_rows(self) -> np.ndarray:
        """For each row the first row with the same id, int64 `(N,)`."""
        order, ordered = self._index.order, self._index.sorted
        first = np.arange(len(order))
        is_repeat: np.ndarray = np.zeros(len(order), bool)
        is_repeat[1:] = ordered[1:] == ordered[:-1]
        if not is_repeat.any():
            return first
        begin = np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(order))))  # of each run of equal hashes
        repeats = np.flatnonzero(is_repeat)
        others: dict[int, dict[str, int]] = {}  # ids whose hash is that of another id
        for start in range(0, len(repeats), _AT_ONCE):
            places = repeats[start : start + _AT_ONCE]
            rows, heads = order[places], order[begin[places]]
            names = self._at(rows)
            same = names == self._at(heads)
            first[rows[same]] = heads[same]
            for row, head, name in zip(rows[~same], heads[~same], names[~same], strict=True):
                first[row] = others.setdefault(int(head), {}).setdefault(name, int(row))
        return first


# --- A file of equally shaped rows, addressed by key, that tolerates kills, concurrent writers and damaged bytes -----
# A store is a folder with three files:
#
# - `meta.json`: description of the rows (identity, dtype, shape) with a checksum; written once, atomically.
# - `data.bin`: the rows. Row `i` starts at byte `i * row_bytes`, so the file can be mapped as an array.
# - `index.bin`: record `i` (24 bytes) contains the key of row `i`, and the checksums of the row and of the record.
#
# Only the process that has the lock writes, and a row is valid as soon as its record is complete. A writer that is killed
# leaves at most rows without a record, which the next writer overwrites. Readers take no lock.

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


# --- Cached features as an array that reads from disk when it is indexed ---------------------------------------------


class FeatureView:
    """Rows of a cache in the order of the requested keys, read from disk when they are indexed.

    `view[3]` is one row mapped from disk (read-only, no copy), `view[[5, 1]]` or `view[mask]` gathers rows into a new
    array, `view[2:9]` is a view, `np.asarray(view)` reads everything, and `view.tensor(...)` returns a torch tensor.
    Pickles (for data loader workers) contain the file name, not the content.

    Args:
        keys: The N keys, for messages.
        rows (`np.ndarray` of shape `(N,)`): Row numbers in `mapped`; the negative number `-2 - i` is row `i` of `extra`.
        mapped (`np.ndarray` of shape `(rows, ...)` or `None`): Rows on disk.
        extra (`np.ndarray` of shape `(rows, ...)` or `None`): Rows that are only in memory.
        unchecked (`np.ndarray` of shape `(N,)`, uint32, or `None`): Checksums to verify when a row is read.

    Raises:
        ValueError: If there are no rows, neither on disk nor in memory.
    """

    def __init__(
        self,
        keys: Sequence[str],
        rows: np.ndarray,
        mapped: np.ndarray | None,
        extra: np.ndarray | None = None,
        unchecked: np.ndarray | None = None,
    ):
        self.keys, self.rows, self.mapped, self.extra = keys, rows, mapped, extra
        self._sums = unchecked
        source = mapped if mapped is not None else extra
        if source is None:
            raise ValueError("A view needs rows on disk or in memory. Use FeatureCache.get or get_or_compute.")
        self.dtype: np.dtype = source.dtype
        self.shape: tuple[int, ...] = (len(rows), *source.shape[1:])

    ndim = property(lambda self: len(self.shape), doc="Number of dimensions.")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise IndexError(
                f"The index is {index!r}, but only the first axis can be indexed. Use view[rows][..., columns]."
            )
        if isinstance(index, slice):
            keys = self.keys[index]
            sums = None if self._sums is None else self._sums[index]
            return FeatureView(keys, self.rows[index], self.mapped, self.extra, sums)
        index = np.asarray(index)
        if index.dtype == bool:
            index = np.flatnonzero(index)
        elif index.size == 0:  # NumPy converts an empty list to floats
            index = index.astype(np.intp)
        rows = self.rows[index]
        self._check(index)
        if index.ndim == 0:
            return self.mapped[rows] if rows >= 0 else self.extra[-2 - rows]  # type: ignore[index]
        if self.extra is None or self.mapped is None:
            return self.mapped[rows] if self.mapped is not None else self.extra[-2 - rows]  # type: ignore[index]
        out = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        out[rows >= 0] = self.mapped[rows[rows >= 0]]
        out[rows < 0] = self.extra[-2 - rows[rows < 0]]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        first = int(self.rows[0]) if len(self) else 0
        if self.mapped is not None and np.array_equal(self.rows, np.arange(first, first + len(self))) and first >= 0:
            self._check(np.arange(len(self)))
            everything = self.mapped[first : first + len(self)]  # in the order of the file, so no copy is needed
        else:
            everything = self[np.arange(len(self))]
        if dtype is None or np.dtype(dtype) == self.dtype:
            return np.array(everything) if copy else np.asarray(everything)
        return everything.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        # For torch.as_tensor(view), which would otherwise read the rows one by one.
        return self.tensor().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # CPU

    def tensor(self, index: Any = None) -> torch.Tensor:
        """Rows as a new writable tensor.

        Args:
            index: Integer, list, array, mask or slice; by default all rows.

        Returns:
            `torch.Tensor`: A copy on the CPU, in the stored dtype.
        """
        import torch

        part = self if index is None else self[index]
        return torch.from_numpy(np.array(part))

    def _check(self, index: np.ndarray) -> None:
        """Verify checksums of rows that have not been verified yet."""
        if self._sums is None or self.mapped is None:
            return
        for i in np.atleast_1d(index).tolist():
            row = int(self.rows[i])
            if row >= 0 and zlib.crc32(self.mapped[row].data) != int(self._sums[i]):
                if isinstance(self.mapped, np.memmap) and self.mapped.filename:
                    with contextlib.suppress(OSError):  # on a read-only disk, only raise the error below
                        drop_rows(Path(self.mapped.filename).parent, [row])
                raise OSError(
                    errno.EIO,
                    f"The cached features of {self.keys[i]!r} (row {row}) are damaged (wrong checksum). They were "
                    "dropped from the cache. Run again to compute them.",
                )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.mapped, np.memmap):
            state["mapped"] = (str(self.mapped.filename), self.mapped.dtype.str, self.mapped.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["mapped"], tuple):
            filename, dtype, shape = state["mapped"]
            state["mapped"] = np.memmap(filename, dtype, mode="r", shape=shape)
        self.__dict__.update(state)


# --- Caches features on disk, keyed by image, model and revision -----------------------------------------------------

# Limits of what `get_or_compute` keeps in memory before writing: a kill loses at most this much.
_FLUSH_BYTES = 8 << 20
_FLUSH_SECONDS = 5.0


def default_cache_dir() -> Path:
    """Default directory of cached features.

    Returns:
        `Path`: `$CAPTIONRL_CACHE`, else `captionrl/features` in the Hugging Face home (`$HF_HOME`).
    """
    if path := os.environ.get("CAPTIONRL_CACHE"):
        return Path(path).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "captionrl" / "features"


class FeatureCache:
    """Memory-mapped features on disk, of one model at one revision.

    Several processes may use a cache at the same time, and each may be killed at any moment: written rows stay valid.
    Damaged rows are detected by their checksums, reported, dropped and computed again. If the disk cannot be written,
    features are kept in memory and a warning is issued.

    Example:

    ```python
    >>> cache = FeatureCache.for_scorer(scorer)
    >>> keys = [image_hash(image) for image in images]
    >>> features = cache.get_or_compute(keys, lambda rows: scorer.image_features([images[i] for i in rows]))
    >>> features.shape
    (5000, 512)
    ```

    Args:
        directory: Root of all caches; by default `default_cache_dir()`.
        model_id: Model id, or a complete signature `model@revision|...`.
        revision: Commit or fingerprint, with everything else that affects the values, such as the dtype of the weights;
            only needed if `model_id` does not contain it.
        what: Kind of features, such as `"image"` or `"vision_tower"`.
        namespace: Data set of the keys if they are ids and not content hashes (two data sets may have an id "1").
        dtype: Storage type, `"float16"`, `"float32"` or `"uint8"` (pixels); by default that of the features (bfloat16
            becomes float32).
        verify_bytes: Requests up to this size are verified before they are returned, and damaged rows are computed
            again. Larger requests are verified row by row when they are read; a damaged row is dropped and raises
            `OSError`.

    Raises:
        ValueError: If `dtype` is unknown, or model or revision is missing.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None = None,
        *,
        model_id: str,
        revision: str = "",
        what: str = "image",
        namespace: str = "",
        dtype: str | None = None,
        verify_bytes: int = 4 << 30,
    ):
        if dtype not in (None, "float16", "float32", "uint8"):
            raise ValueError(f"dtype is {dtype!r}. Use 'float16', 'float32', 'uint8' or None (as computed).")
        self.root = Path(directory) if directory is not None else default_cache_dir()
        model, _, signed = model_id.partition("@")
        revision = "|".join(part for part in (signed, revision) if part)
        if not model or not revision:
            raise ValueError(
                f"model_id is {model_id!r} and revision is {revision!r}, but both are needed to distinguish features of "
                "different training runs. Pass revision=model_fingerprint(model)."
            )
        self.identity = {"model": model, "revision": revision, "what": what, "namespace": namespace, "dtype": dtype}
        self.verify_bytes = verify_bytes
        name = json_digest(self.identity)
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{what}-{model}").strip("._")[:60]
        self.directory = self.root / f"{readable}-{name}"
        self._store = RowStore(self.directory, self.identity)
        self._is_checked: np.ndarray = np.empty(0, bool)  # of the rows of the store
        self._memory: dict[bytes, np.ndarray] = {}
        self._in_memory = False

    @classmethod
    def for_scorer(
        cls, scorer: Scorer, directory: str | os.PathLike | None = None, *, what: str = "image", namespace: str = ""
    ) -> FeatureCache:
        """Cache for the features of a scorer.

        Args:
            scorer: The scorer. Its `cache_revision` (weights, image processor, dtype) is the revision, or its
                `signature` if it has none.
            directory: Root of all caches; by default `default_cache_dir()`.
            what: Kind of features.
            namespace: Data set of the keys if they are ids and not content hashes.

        Returns:
            `FeatureCache`: Empty, or filled by an earlier run.
        """
        model = getattr(scorer, "model_id", type(scorer).__name__)
        revision = getattr(scorer, "cache_revision", None) or scorer.signature
        return cls(directory, model_id=model, revision=revision, what=what, namespace=namespace)

    def __len__(self) -> int:
        return len(self._store) + len(self._memory)

    def __contains__(self, key: str) -> bool:
        return not self._missing(key_digests([key])).any()

    def _missing(self, digests: np.ndarray) -> np.ndarray:
        """Whether each of the digests `(N, 2)` is unknown, `(N,)`."""
        found = self._store.positions(digests) < 0
        if self._memory:
            for i in np.flatnonzero(found).tolist():
                found[i] = digests[i].tobytes() not in self._memory
        return found

    def __repr__(self) -> str:
        return f"FeatureCache({self.identity['what']!r} of {self._name}, {len(self)} rows in {self.directory})"

    @property
    def _name(self) -> str:
        return f"{self.identity['model']}@{self.identity['revision']}"

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Positions of keys that are not cached, not even by other processes in the meantime.

        Args:
            keys: N keys.

        Returns:
            `list[int]`: Positions in `keys`, ascending.
        """
        self._store.refresh()
        return np.flatnonzero(self._missing(key_digests(keys))).tolist()

    def get(self, keys: Sequence[str]) -> FeatureView:
        """Features that are already cached.

        Args:
            keys: N keys.

        Returns:
            `FeatureView` of shape `(N, ...)`: In the order of `keys`.

        Raises:
            KeyError: If a key is not cached for this revision of the model.
        """
        keys = _check_keys(keys)
        self._store.refresh()
        digests = key_digests(keys)
        self._drop_damaged(digests)
        return self._view(keys, digests)

    def put(self, keys: Sequence[str], features: Any) -> None:
        """Store features. Keys that are already cached are not changed.

        Args:
            keys: N keys.
            features (`torch.Tensor` or array of shape `(N, ...)`): One row per key.

        Raises:
            ValueError: If the numbers of keys and rows differ, or a row is not finite.
        """
        keys = _check_keys(keys)
        rows = self._rows(keys, features)
        digests = key_digests(keys)
        if not self._in_memory:
            try:
                self._store.append(digests, rows)
                return
            except OSError as error:
                self._in_memory = True
                warnings.warn(
                    f"Features cannot be cached in {self.directory} ({error}). They are kept in memory and lost when "
                    "this process ends. Free some space, or set CAPTIONRL_CACHE to a writable folder.",
                    stacklevel=3,
                )
        for i in np.flatnonzero(self._store.positions(digests) < 0).tolist():
            self._memory.setdefault(digests[i].tobytes(), rows[i])

    def get_or_compute(
        self,
        keys: Sequence[str],
        compute: Callable[[list[int]], Any],
        *,
        batch_size: int = 32,
        progress: bool | str = False,
    ) -> FeatureView:
        """Features of all keys; missing features are computed and stored.

        Processes of one job (`RANK`, `WORLD_SIZE`) start at different positions and skip features that others have
        stored, so that together they compute each image about once.

        Args:
            keys: N keys, such as `image_hash(image)`; duplicates are computed once.
            compute: Function from a list of positions in `keys` to their features, a tensor or array with one row per
                position.
            batch_size: Positions per call.
            progress: Whether to show a progress bar; a string is its label.

        Returns:
            `FeatureView` of shape `(N, ...)`: In the order of `keys`.

        Raises:
            ValueError: If `keys` is empty, `compute` returns a wrong number of rows, or a row is not finite.
        """
        keys = _check_keys(keys)
        if not keys:
            raise ValueError("keys is empty. Pass at least one image.")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}. Use at least 1.")
        self._store.refresh()
        digests = key_digests(keys)
        self._drop_damaged(digests)
        self._store.refresh()
        todo = np.flatnonzero(self._missing(digests))
        order = np.lexsort(digests[todo].T)  # stable: equal keys are adjacent, and the first one is first
        is_first: np.ndarray = np.append(True, (np.diff(digests[todo[order]], axis=0) != 0).any(axis=1))[: len(order)]
        todo = todo[np.sort(order[is_first])]
        start = len(todo) * int(os.environ.get("RANK", "0")) // max(int(os.environ.get("WORLD_SIZE", "1")), 1)
        if len(todo):
            self._compute(keys, digests, np.roll(todo, -start), compute, batch_size, progress)
        return self._view(keys, digests)

    def _compute(
        self,
        keys: Sequence[str],
        digests: np.ndarray,
        todo: np.ndarray,
        compute: Callable,
        batch_size: int,
        progress: bool | str,
    ) -> None:
        pending: list[tuple[list[str], Any]] = []
        size, written_at = 0, time.monotonic()
        with progress_bar(len(todo), progress, f"{self.identity['what']} features") as bar:
            for offset in range(0, len(todo), batch_size):
                part = todo[offset : offset + batch_size]
                if bar is not None:
                    bar.update(len(part))
                if not self._in_memory:
                    self._store.refresh()
                    part = part[self._missing(digests[part])]
                if len(part):
                    names = [keys[i] for i in part.tolist()]
                    rows = self._rows(names, compute(part.tolist()))
                    pending.append((names, rows))
                    size += rows.nbytes
                last = offset + batch_size >= len(todo)
                if pending and (last or size >= _FLUSH_BYTES or time.monotonic() - written_at >= _FLUSH_SECONDS):
                    self.put([key for names, _ in pending for key in names], np.concatenate([r for _, r in pending]))
                    pending, size, written_at = [], 0, time.monotonic()

    def _rows(self, keys: Sequence[str], features: Any) -> np.ndarray:
        """Features as an array of the stored type with one row per key; refuses rows that are not finite."""
        # A torch tensor; torch is not imported, because readers of a cache do not need it.
        if hasattr(features, "detach"):
            features = features.detach().cpu()
            exact = str(features.dtype) in ("torch.float16", "torch.uint8")
            features = (features if exact else features.float()).numpy()
        rows = np.asarray(features)
        if rows.ndim < 2 or len(rows) != len(keys):
            raise ValueError(
                f"features have shape {rows.shape} for {len(keys)} keys, but must have one row per key and at least two "
                "dimensions. Return the features of exactly the requested positions."
            )
        stored = self.identity["dtype"] or ("float16" if rows.dtype == np.float16 else "float32")
        if stored == "uint8":
            if rows.dtype != np.uint8:
                raise ValueError(f"Rows are {rows.dtype}, and this cache holds uint8. Return pixels before rescaling.")
            return rows
        with np.errstate(over="ignore"):
            rows = rows.astype(stored, copy=False)
        finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
        if not finite.all():
            key = keys[int(np.argmin(finite))]
            raise ValueError(
                f"The features of {key!r} are not finite in {stored} ({int((~finite).sum())} of {len(rows)} rows). "
                "Compute and store them in float32, or check this image."
            )
        return rows

    def _drop_damaged(self, digests: np.ndarray) -> None:
        """Verify the checksums of requested rows that were not verified before; drop damaged rows."""
        positions = self._store.positions(digests)
        positions = np.unique(positions[positions >= 0])
        if len(positions) * self._store.row_bytes > self.verify_bytes:
            return
        if not len(positions):
            return
        grown = max(0, int(positions[-1]) + 1 - len(self._is_checked))
        self._is_checked = np.append(self._is_checked, np.zeros(grown, bool))
        fresh = positions[~self._is_checked[positions]]
        if not len(fresh):
            return
        array, sums = self._store.array(), self._store.sums(fresh)
        bad = [int(i) for i, total in zip(fresh, sums, strict=True) if zlib.crc32(array[i].data) != total]
        self._is_checked[fresh] = True
        self._is_checked[bad] = False
        if bad:
            warnings.warn(
                f"{len(bad)} of {len(positions)} cached features in {self.directory} are damaged (wrong checksum). "
                "They are dropped and computed again.",
                stacklevel=4,
            )
            with contextlib.suppress(OSError):  # on a read-only disk, `put` falls back to memory with a warning
                self._store.drop(bad)

    def _view(self, keys: Sequence[str], digests: np.ndarray) -> FeatureView:
        self._store.refresh()
        rows = self._store.positions(digests)
        extra = None
        if self._memory:
            numbers = {digest: -2 - i for i, digest in enumerate(self._memory)}
            for i in np.flatnonzero(rows == -1):
                rows[i] = numbers.get(digests[i].tobytes(), -1)
            extra = np.stack(list(self._memory.values()))
        unknown = [keys[i] for i in np.flatnonzero(rows == -1).tolist()]
        if unknown:
            raise KeyError(self._unknown(unknown, len(keys)))
        mapped = self._store.array() if len(self._store) or extra is None else None
        large = mapped is not None and len(np.unique(rows)) * self._store.row_bytes > self.verify_bytes
        sums: np.ndarray | None = None
        if large:
            sums = np.zeros(len(rows), np.uint32)
            sums[rows >= 0] = self._store.sums(rows[rows >= 0])
        return FeatureView(keys, rows, mapped, extra, sums)

    def _unknown(self, unknown: list[str], total: int) -> str:
        text = (
            f"{unknown[0]!r} is not among the {self.identity['what']!r} features of {self._name} ({len(unknown)} of "
            f"{total} keys are missing). Compute them with get_or_compute."
        )
        others = []
        for path in self.root.glob("*/meta.json"):
            try:
                other = json.loads(path.read_text(encoding="utf-8"))["identity"]
            except (OSError, ValueError, KeyError):
                continue
            if other["model"] == self.identity["model"] and other["revision"] != self.identity["revision"]:
                others.append(other["revision"])
        if others:
            text += f" Other revisions of this model are cached ({', '.join(sorted(others)[:3])}), but revisions are never mixed."
        return text


def progress_bar(
    total: int, progress: bool | str, label: str, *, delay: float = 0.0
) -> contextlib.AbstractContextManager[Any]:
    """A progress bar over images, shown after some seconds, or None; a string is its label."""
    if not progress:
        # Not a disabled tqdm: it takes a lock that forked processes share, and a process that is killed while it has
        # the lock blocks all others.
        return contextlib.nullcontext()
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=progress if isinstance(progress, str) else label, unit="img", delay=delay)


def _check_keys(keys: Sequence[str]) -> Sequence[str]:
    if isinstance(keys, str):
        raise ValueError(f"keys is the string {keys!r}, but must be a list of strings. Write [{keys!r}].")
    keys = keys if isinstance(keys, Sequence) else list(keys)
    for i, key in enumerate(keys):
        if not isinstance(key, str) or not key:
            raise ValueError(f"keys[{i}] is {key!r}, not a non-empty string. Use image_hash(image) or str(id).")
    return keys
