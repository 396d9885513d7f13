"""Features on disk, keyed by the content of images, model and revision; and rows of a data set by id.

Legend: N keys or ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import sqlite3
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.io import json_digest

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from hf_captionrl.retrieval.scorer import Scorer


# --- Keys of cached features: hashes of the content of images and models ---------------------------------------------


def image_hash(image: Image.Image) -> str:
    """Hash of the decoded pixels, independent of the file name: 32 hex digits, BLAKE2b over width, height and RGB bytes."""
    rgb = to_rgb(image)
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
    """Hash of a model's config and weights, and of `parts`; 32 hex digits, used as its revision if there is no commit hash.

    A local folder and the model loaded from it have the same. Hashing runs at about 0.7 GB/s on one core.
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    config = getattr(model, "config", None)
    texts = [type(model).__name__, *parts]
    if config is not None and hasattr(config, "to_dict"):
        texts.append(json.dumps(_stable(config.to_dict()), sort_keys=True, default=str))
    digest.update(json.dumps(texts).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


_AT_ONCE = 4096


def key_digests(keys: Collection[str]) -> np.ndarray:
    """16 bytes that represent each key, BLAKE2b of its UTF-8 encoding: an array `(N,)` of bytes."""
    found: np.ndarray = np.empty(len(keys), "S16")
    given = iter(keys)
    for start in range(0, len(keys), _AT_ONCE):
        texts = (key.encode("utf-8", "surrogatepass") for key in islice(given, _AT_ONCE))
        part = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in texts)
        found[start : start + _AT_ONCE] = np.frombuffer(part, "S16")
    return found


# --- Rows of a data set by id in 16 bytes per row: sorted 64-bit hashes, and a comparison of the ids themselves ------


def key_hashes(keys: Collection[str]) -> np.ndarray:
    """First halves of the digests of N keys, uint64 `(N,)`."""
    found: np.ndarray = np.empty(len(keys), "<u8")
    given = iter(keys)
    for start in range(0, len(keys), _AT_ONCE):
        found[start : start + _AT_ONCE] = key_digests(list(islice(given, _AT_ONCE))).view("<u8")[::2]
    return found


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
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows in the order of their hashes, and the sorted hashes; rows with equal hashes ascend."""
        hashes = key_hashes(self.ids)
        order = np.argsort(hashes, kind="stable")
        return order, hashes[order]

    def _at(self, rows: np.ndarray) -> np.ndarray:
        """Ids of some rows, an array of objects."""
        listed = rows.tolist()
        names = [self.ids[row] for row in listed] if isinstance(self.ids, list | tuple) else self.ids[listed]  # type: ignore[call-overload]
        return np.array(names, dtype=object)

    def rows(self, names: Sequence[str]) -> np.ndarray:
        """First row of each name, int64 `(M,)`; -1 for unknown names."""
        found: np.ndarray = np.full(len(names), -1, np.int64)
        order, ordered = self._index
        given = iter(names)
        for start in range(0, len(names), _AT_ONCE):
            part = np.array(list(islice(given, _AT_ONCE)), dtype=object)
            hashes = key_hashes(part)
            asked: np.ndarray = np.arange(len(part))
            place: np.ndarray = np.asarray(np.searchsorted(ordered, hashes))
            while len(asked):  # once, unless different ids have equal hashes
                inside = place < len(ordered)
                inside[inside] = ordered[place[inside]] == hashes[asked[inside]]
                asked, place = asked[inside], place[inside]
                rows = order[place]
                same = part[asked] == self._at(rows)
                found[start + asked[same]] = rows[same]
                asked, place = asked[~same], place[~same] + 1
        return found

    def missing(self, names: Sequence[str]) -> list[str]:
        """The names that are not ids, in their order."""
        return [name for name, row in zip(names, self.rows(names), strict=True) if row < 0]

    def first_rows(self) -> np.ndarray:
        """For each row the first row with the same id, int64 `(N,)`."""
        order, ordered = self._index
        first = np.arange(len(order))
        again: np.ndarray = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1  # whose hash is that of the place before
        rows = order[np.union1d(again - 1, again)]
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            first[part] = self.rows(self._at(part).tolist())
        return first


# --- Rows of equal shape in one file, and the digests of their keys in SQLite ----------------------------------------
# index.sqlite       identity, dtype and shape of the rows, and a blob of digests for each write, in the order of the rows
# rows-<random>.bin  row i begins at byte i * row_bytes, so that the whole file is mapped as one array
#
# Every write is a transaction of the index, which ends after the rows are on the disk. A killed writer leaves at most bytes
# behind the last row, which the next writer overwrites. Rows that have a key are never overwritten: a new index names a new
# file. If the file of rows lacks some, or begins with another row than the one that was written, the index is not used, and
# the next writer starts again.
# An SQLite table with one record per key needs no memory and no time to open, but 5 to 8 times the CPU time to write and 6
# times to look up all keys (reproduction/results/feature_store.json).

_TABLES = (
    "CREATE TABLE IF NOT EXISTS row_file (identity TEXT, dtype TEXT, shape TEXT, file TEXT, number INTEGER, head BLOB)",
    "CREATE TABLE IF NOT EXISTS keys (first INTEGER PRIMARY KEY, digests BLOB)",
)


class StoreMismatchError(ValueError):
    """The folder contains rows of another model, revision, dtype or shape."""


class _Rows(NamedTuple):
    """The rows of a store at one moment."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    number: int
    head: bytes = b""  # hash of the first row

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def are_there(self) -> bool:
        """Whether the file has all rows, and begins with the first one."""
        try:
            with self.file.open("rb") as file:
                held = os.fstat(file.fileno()).st_size
                return held >= self.number * self.row_bytes and _hash(file.read(self.row_bytes)) == self.head
        except FileNotFoundError:
            return False

    def mapped(self) -> np.ndarray:
        return np.memmap(self.file, self.dtype, mode="r", shape=(self.number, *self.shape))


class _RowStore:
    """Append-only rows on disk, found by the digest of a key. Every call opens the index anew, so that forks are harmless."""

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        self.directory, self.identity = directory, identity
        self.timeout_s = 30.0  # behind other writers, whose writes are small; one of them may be suspended
        self._file: Path | None = None  # whose first `_number` keys are in `_parts`
        self._number = 0
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # sorted digests, and their rows

    @contextlib.contextmanager
    def _index(self, mode: str, begin: str) -> Iterator[sqlite3.Connection]:
        path = self.directory.absolute() / "index.sqlite"
        uri = f"{path.as_uri()}?mode={mode}"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=self.timeout_s, isolation_level=None)) as index:
            try:
                index.execute(begin)
                yield index
                index.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                    warnings.warn(f"{path} is damaged ({error}). The features are computed again.", stacklevel=2)
                    path.unlink(missing_ok=True)
                raise

    def _rows(self, index: sqlite3.Connection) -> _Rows | None:
        """What is stored; None if there is nothing, some rows are missing in the file, or it is another file."""
        found = index.execute("SELECT * FROM row_file").fetchone()
        if found is None:
            return None
        identity, dtype, shape, file, number, head = found
        if json.loads(identity) != self.identity:
            raise StoreMismatchError(
                f"{self.directory} contains features of {identity}, but {self.identity} was requested. Features of "
                "different models or revisions are never mixed. Use another cache directory, or delete this folder."
            )
        rows = _Rows(self.directory / file, np.dtype(dtype), tuple(json.loads(shape)), number, head)
        return rows if number and rows.are_there() else None

    def _load(self, index: sqlite3.Connection, rows: _Rows) -> None:
        """Read the digests that were added since the last call."""
        if self._file != rows.file:
            self._file, self._number, self._parts = rows.file, 0, []
        select = "SELECT digests FROM keys WHERE first >= ? ORDER BY first"
        # A truncated index may give NULL instead of an error.
        digests = np.frombuffer(b"".join(blob or b"" for (blob,) in index.execute(select, (self._number,))), "S16")
        if self._number + len(digests) != rows.number:
            error = sqlite3.DatabaseError(f"{rows.number} rows, but {self._number + len(digests)} keys")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        if not len(digests):
            return
        numbers = np.arange(self._number, self._number + len(digests))
        self._number += len(digests)
        while self._parts and len(self._parts[-1][0]) < 2 * len(digests):  # few parts, of descending sizes
            before = self._parts.pop()
            digests, numbers = np.concatenate([before[0], digests]), np.concatenate([before[1], numbers])
        order = np.argsort(digests)
        self._parts.append((digests[order], numbers[order]))

    def _positions(self, digests: np.ndarray) -> np.ndarray:
        positions: np.ndarray = np.full(len(digests), -1, np.int64)
        order = np.argsort(digests)  # sorted digests are found three times as fast
        asked = digests[order]
        for known, numbers in self._parts:
            place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
            same = known[place] == asked
            positions[order[same]] = numbers[place[same]]
        return positions

    def find(self, digests: np.ndarray) -> tuple[np.ndarray, _Rows | None]:
        """Row of each digest, int64 `(N,)`, -1 if there is none; and the rows."""
        try:
            if (self.directory / "index.sqlite").is_file():
                with self._index("rw", "BEGIN") as index:
                    rows = self._rows(index)
                    if rows is not None:
                        self._load(index, rows)
                        return self._positions(digests), rows
        except (OSError, sqlite3.Error):  # not readable, damaged, or still without tables
            pass
        return np.full(len(digests), -1, np.int64), None

    def append(self, digests: np.ndarray, new: np.ndarray) -> None:
        """Add rows `(N, *shape)` under digests `(N,)`; keys that exist, also of other processes, are not changed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._index("rwc", "BEGIN IMMEDIATE") as index:
            for table in _TABLES:
                index.execute(table)
            rows = self._rows(index)
            if rows is None:
                rows = _Rows(self.directory / f"rows-{secrets.token_hex(8)}.bin", new.dtype, new.shape[1:], 0)
                index.execute("DELETE FROM row_file")
                index.execute("DELETE FROM keys")
                form = json.dumps(self.identity), new.dtype.name, json.dumps(rows.shape)
                values = (*form, rows.file.name, 0, _hash(new[0].tobytes()))
                index.execute("INSERT INTO row_file VALUES (?, ?, ?, ?, ?, ?)", values)
            if (rows.dtype, rows.shape) != (new.dtype, new.shape[1:]):
                forms = f"{rows.dtype} rows of shape {rows.shape}, not {new.dtype} rows of shape {new.shape[1:]}"
                raise StoreMismatchError(f"{self.directory} contains {forms}. Use another `what`, or delete it.")
            self._load(index, rows)
            unique = np.sort(np.unique(digests, return_index=True)[1])
            fresh = unique[self._positions(digests[unique]) < 0]
            if len(fresh):
                _write(rows.file, new[fresh], rows.number * rows.row_bytes)
                index.execute("INSERT INTO keys VALUES (?, ?)", (rows.number, digests[fresh].tobytes()))
                index.execute("UPDATE row_file SET number = ?", (rows.number + len(fresh),))


def _hash(row: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=16).digest()


def _write(path: Path, rows: np.ndarray, offset: int) -> None:
    """Write rows at an offset, and wait until they are on the disk."""
    # A file that was deleted in between must not come back with zeros for its rows.
    descriptor = os.open(path, os.O_RDWR | (0 if offset else os.O_CREAT), 0o666)
    try:
        left = memoryview(np.ascontiguousarray(rows)).cast("B")
        while left:  # a nearly full disk may accept only a part
            written = os.pwrite(descriptor, left, offset)
            left, offset = left[written:], offset + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Cached features as an array that reads from disk when it is indexed ---------------------------------------------


class FeatureView:
    """Rows of a cache in the order of the requested keys, read from disk when they are indexed.

    `view[3]` is one row mapped from disk (read-only, no copy), `view[[5, 1]]` or `view[mask]` gathers rows into a new
    array, `view[2:9]` is a view, `np.asarray(view)` reads everything, and `view.tensor(...)` returns a torch tensor.
    Pickles (for data loader workers) contain the file name, not the content.

    `rows` `(N,)` are row numbers in `mapped`, the rows on disk; the negative number `-2 - i` is row `i` of `extra`, the rows
    that are only in memory.
    """

    def __init__(self, rows: np.ndarray, mapped: np.ndarray | None, extra: np.ndarray | None = None):
        self.rows, self.mapped, self.extra = rows, mapped, extra
        source: Any = mapped if mapped is not None else extra
        self.dtype: np.dtype = source.dtype
        self.shape: tuple[int, ...] = (len(rows), *source.shape[1:])

    ndim = property(lambda self: len(self.shape), doc="Number of dimensions.")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise IndexError(f"The index is {index!r}, but only the first axis can be indexed.")
        if isinstance(index, slice):
            return FeatureView(self.rows[index], self.mapped, self.extra)
        index = np.asarray(index)
        if index.size == 0 and index.dtype != bool:  # NumPy converts an empty list to floats
            index = index.astype(np.intp)
        rows: Any = self.rows[index]
        self._check_size()
        if self.extra is None:
            return self.mapped[rows]  # type: ignore[index]
        out = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        out[rows < 0] = self.extra[-2 - rows[rows < 0]]
        if self.mapped is not None:
            out[rows >= 0] = self.mapped[rows[rows >= 0]]
        return out

    def _check_size(self) -> None:
        """Refuse a file that was truncated since: a signal would end the process when it reads what is missing."""
        if isinstance(self.mapped, np.memmap) and self.mapped._mmap.size() < self.mapped.nbytes:  # type: ignore[attr-defined]
            raise ValueError(
                f"{self.mapped.filename} was truncated while it was in use. Use the same command again: what is missing is computed."
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._check_size()
        first = int(self.rows[0]) if len(self) else 0
        if self.mapped is not None and np.array_equal(self.rows, np.arange(first, first + len(self))) and first >= 0:
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
        """Rows (by default all) as a new writable tensor on the CPU, in the stored dtype."""
        import torch

        part = self if index is None else self[index]
        return torch.from_numpy(np.array(part))

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


# --- The cache -------------------------------------------------------------------------------------------------------

# Limits of what `get_or_compute` keeps in memory before writing: a kill loses at most this much.
_FLUSH_BYTES = 8 << 20
_FLUSH_SECONDS = 5.0


def default_cache_dir() -> Path:
    """Default directory of cached features: `$CAPTIONRL_CACHE`, else `captionrl/features` in `$HF_HOME`."""
    if path := os.environ.get("CAPTIONRL_CACHE"):
        return Path(path).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "captionrl" / "features"


class FeatureCache:
    """Memory-mapped features on disk, of one model at one revision.

    Several processes may use a cache at the same time, and each may be killed at any moment: written rows stay valid.
    If the disk cannot be written, features are kept in memory and a warning is issued.

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
    ):
        if dtype not in (None, "float16", "float32", "uint8"):
            raise ValueError(f"dtype is {dtype!r}. Use 'float16', 'float32', 'uint8' or None (as computed).")
        self.root = Path(directory) if directory is not None else default_cache_dir()
        model, _, signed = model_id.partition("@")
        revision = "|".join(part for part in (signed, revision) if part)
        if not model or not revision:
            given = f"model_id is {model_id!r} and revision is {revision!r}"
            raise ValueError(f"{given}, but both are needed. Pass revision=model_fingerprint(model).")
        self.identity = {"model": model, "revision": revision, "what": what, "namespace": namespace, "dtype": dtype}
        name = json_digest(self.identity)
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{what}-{model}").strip("._")[:60]
        self.directory = self.root / f"{readable}-{name}"
        self._store = _RowStore(self.directory, self.identity)
        self._memory: dict[bytes, np.ndarray] = {}  # rows that could not be written, by digest

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
        rows = self._store.find(key_digests([]))[1]
        return (rows.number if rows else 0) + len(self._memory)

    def __contains__(self, key: str) -> bool:
        return not self.missing([key])

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
        return np.flatnonzero(self._find(key_digests(keys))[0] == -1).tolist()

    def _find(self, digests: np.ndarray) -> tuple[np.ndarray, _Rows | None]:
        """Row of each digest on disk, `-2 - i` if it is the i-th in memory, -1 if it is unknown; and the rows on disk."""
        positions, rows = self._store.find(digests)
        if self._memory:
            numbers = {digest: -2 - i for i, digest in enumerate(self._memory)}
            unknown = np.flatnonzero(positions == -1)
            positions[unknown] = [numbers.get(digest, -1) for digest in digests[unknown].tolist()]
        return positions, rows

    def get(self, keys: Sequence[str]) -> FeatureView:
        """Features that are already cached; raises KeyError if one is not.

        Args:
            keys: N keys.
        Returns:
            `FeatureView` of shape `(N, ...)`: In the order of `keys`.
        """
        keys = _check_keys(keys)
        positions, rows = self._find(key_digests(keys))
        unknown = np.flatnonzero(positions == -1)
        if len(unknown):
            raise KeyError(
                f"{keys[int(unknown[0])]!r} is not among the {self.identity['what']!r} features of {self._name} "
                f"({len(unknown)} of {len(keys)} keys are missing). Compute them with get_or_compute."
            )
        extra = np.stack(list(self._memory.values())) if self._memory else None
        return FeatureView(positions, rows.mapped() if rows else None, extra)

    def put(self, keys: Sequence[str], features: Any) -> None:
        """Store features. Keys that are already cached are not changed.

        Args:
            keys: N keys.
            features (`torch.Tensor` or array of shape `(N, ...)`): One row per key.
        """
        keys = _check_keys(keys)
        rows = self._checked_rows(keys, features)
        digests = key_digests(keys)
        if not self._memory:
            try:
                self._store.append(digests, rows)
                return
            except (OSError, sqlite3.Error) as error:
                warnings.warn(
                    f"Features cannot be cached in {self.directory} ({error}). They are kept in memory and lost when "
                    "this process ends. Free some space, or set CAPTIONRL_CACHE to a writable folder.",
                    stacklevel=3,
                )
        for i in np.flatnonzero(self._find(digests)[0] == -1).tolist():
            self._memory.setdefault(bytes(digests[i]), rows[i])

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
        """
        keys = _check_keys(keys)
        if not keys:
            raise ValueError("keys is empty. Pass at least one image.")
        digests = key_digests(keys)
        todo = np.flatnonzero(self._find(digests)[0] == -1)
        if len(todo):
            todo = todo[np.sort(np.unique(digests[todo], return_index=True)[1])]  # the first of equal keys
            start = len(todo) * int(os.environ.get("RANK", "0")) // max(int(os.environ.get("WORLD_SIZE", "1")), 1)
            pending: list[tuple[list[str], np.ndarray]] = []
            size, written_at = 0, time.monotonic()
            todo = np.roll(todo, -start)
            with progress_bar(len(todo), progress, f"{self.identity['what']} features") as bar:
                for offset in range(0, len(todo), batch_size):
                    part = todo[offset : offset + batch_size]
                    if bar is not None:
                        bar.update(len(part))
                    part = part[self._find(digests[part])[0] == -1]
                    if len(part):
                        names = [keys[i] for i in part.tolist()]
                        rows = self._checked_rows(names, compute(part.tolist()))
                        pending.append((names, rows))
                        size += rows.nbytes
                    is_late = offset + batch_size >= len(todo) or time.monotonic() - written_at >= _FLUSH_SECONDS
                    if pending and (is_late or size >= _FLUSH_BYTES):
                        rows = np.concatenate([found for _, found in pending])
                        self.put([key for names, _ in pending for key in names], rows)
                        pending, size, written_at = [], 0, time.monotonic()
        return self.get(keys)

    def _checked_rows(self, keys: Sequence[str], features: Any) -> np.ndarray:
        """Features as an array of the stored type with one row per key; refuses rows that are not finite."""
        # A torch tensor; torch is not imported, because readers of a cache do not need it.
        if hasattr(features, "detach"):
            features = features.detach().cpu()
            exact = str(features.dtype) in ("torch.float16", "torch.uint8")
            features = (features if exact else features.float()).numpy()
        rows = np.asarray(features)
        if rows.ndim < 2 or len(rows) != len(keys) or 0 in rows.shape[1:]:
            shape = f"features have shape {rows.shape} for {len(keys)} keys"
            raise ValueError(f"{shape}. Return one row per requested position, with at least two dimensions.")
        stored = self.identity["dtype"] or ("float16" if rows.dtype == np.float16 else "float32")
        if stored == "uint8":
            if rows.dtype != np.uint8:
                raise ValueError(f"Rows are {rows.dtype}, and this cache holds uint8. Return pixels before rescaling.")
            return rows
        with np.errstate(over="ignore"):
            rows = rows.astype(stored, copy=False)
        finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
        if not finite.all():
            key, number = keys[int(np.argmin(finite))], f"{int((~finite).sum())} of {len(rows)} rows"
            raise ValueError(f"The features of {key!r} are not finite in {stored} ({number}). Use float32.")
        return rows


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


# With a batch of 64 photographs, the tensors of convolutions are too large for the allocator to keep, and clearing their pages
# anew for each layer takes three quarters of the time. Keeping them instead (glibc's M_MMAP_MAX=0) fragments the memory.
_PIXELS_AT_ONCE = 2**18


def tower_in_parts(tower: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """The output of a vision tower for `pixels` `(B, 3, H, W)`; on a CPU a few images at a time, which is faster."""
    if pixels.ndim != 4 or pixels.device.type != "cpu":
        return tower(pixels)
    import torch

    at_once = max(1, _PIXELS_AT_ONCE // pixels[0, 0].numel())
    return torch.cat([tower(part) for part in pixels.split(at_once)]) if at_once < len(pixels) else tower(pixels)
