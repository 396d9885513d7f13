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
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock

from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.io import json_digest, write_json

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


def key_digests(keys: Iterable[str]) -> list[bytes]:
    """16 bytes that represent each key, BLAKE2b of its UTF-8 encoding."""
    return [hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest() for key in keys]


class RowLookup(dict[Any, int]):
    """The first row of each id of a column."""

    def __init__(self, ids: Iterable[Any]) -> None:
        super().__init__()
        for row, image_id in enumerate(ids):
            self.setdefault(image_id, row)

    def rows(self, names: Iterable[Any]) -> np.ndarray:
        """First row of each name, int64 `(M,)`; -1 for unknown names."""
        return np.array([self.get(name, -1) for name in names], np.int64)

    def missing(self, names: Iterable[Any]) -> list[Any]:
        """The names that are not ids, in their order."""
        return [name for name in names if name not in self]


# --- Cached features as an array that reads from disk when it is indexed ---------------------------------------------


class FeatureView:
    """Rows of a cache in the order of the requested keys, read from disk when they are indexed.

    `view[3]` is one row mapped from disk (read-only, no copy), `view[[5, 1]]`, `view[2:9]` or `view[mask]` gathers rows into a
    new array, `np.asarray(view)` reads everything, and `view.tensor(...)` returns a torch tensor. Pickles (for data loader workers) contain the file name, not the content.

    `rows` `(N,)` are row numbers in `mapped`, the rows on disk.
    """

    def __init__(self, rows: np.ndarray, mapped: np.ndarray):
        self.rows, self.mapped = rows, mapped
        self.dtype: np.dtype = mapped.dtype
        self.shape: tuple[int, ...] = (len(rows), *mapped.shape[1:])

    ndim = property(lambda self: len(self.shape), doc="Number of dimensions.")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.mapped[self.rows[index]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        first = int(self.rows[0]) if len(self) else 0
        if np.array_equal(self.rows, np.arange(first, first + len(self))):  # in the order of the file: not copied
            rows = self.mapped[first : first + len(self)]
        else:
            rows = self.mapped[self.rows]
        return np.array(rows, dtype) if copy else np.asarray(rows, dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        # For torch.as_tensor(view), which would otherwise read the rows one by one.
        return self.tensor().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # CPU

    def tensor(self, index: Any = None) -> torch.Tensor:
        """Rows (by default all) as a new writable tensor on the CPU, in the stored dtype."""
        import torch

        return torch.from_numpy(np.array(self if index is None else self[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        file = self.mapped
        assert isinstance(file, np.memmap)
        return _view, (self.rows, str(file.filename), file.dtype.str, file.shape)


def _view(rows: np.ndarray, file: str, dtype: str, shape: tuple[int, ...]) -> FeatureView:
    return FeatureView(rows, np.memmap(file, dtype, mode="r", shape=shape))


# --- The cache: rows of equal shape in one file, and the digests of their keys in another ----------------------------
# meta.json          identity, dtype and shape of the rows, and the random part of the names of both files
# rows-<random>.bin  row i begins at byte i * row_bytes, so that the whole file is mapped as one array
# keys-<random>.bin  16 bytes per row, in the same order
#
# A writer holds the lock of the folder, and writes keys after their rows are on the disk: a killed writer leaves at most bytes behind
# the last row or key, which the next writer overwrites. Rows that have a key are never overwritten: if the file of rows lacks some,
# neither file is used, and the next writer starts with new names.


class _Rows(NamedTuple):
    """The rows of a store at one moment."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    number: int = 0

    @property
    def keys(self) -> Path:
        return self.file.with_name(self.file.name.replace("rows", "keys"))

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def mapped(self) -> np.ndarray:
        return np.memmap(self.file, self.dtype, mode="r", shape=(self.number, *self.shape))


def _write(path: Path, data: bytes, offset: int) -> None:
    """Write bytes at an offset, and wait until they are on the disk."""
    # A file that was deleted in between must not come back with zeros for its rows.
    descriptor = os.open(path, os.O_RDWR | (0 if offset else os.O_CREAT), 0o666)
    try:
        left = memoryview(data)
        while left:  # a nearly full disk may accept only a part
            written = os.pwrite(descriptor, left, offset)
            left, offset = left[written:], offset + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Limits of what `get_or_compute` keeps in memory before writing: a kill loses at most this much.
_FLUSH_BYTES = 8 << 20
_FLUSH_SECONDS = 5.0
_LOCK_SECONDS = 30.0
"""Writes of other processes are small, but one of them may be suspended."""


def default_cache_dir() -> Path:
    """Default directory of cached features: `$CAPTIONRL_CACHE`, else `captionrl/features` in `$HF_HOME`."""
    if path := os.environ.get("CAPTIONRL_CACHE"):
        return Path(path).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "captionrl" / "features"


class FeatureCache:
    """Memory-mapped features on disk, of one model at one revision.

    Several processes may use a cache at the same time, and each may be killed at any moment: written rows stay valid.

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
        dtype: str | None = None,
    ):
        if dtype not in (None, "float16", "float32", "uint8"):
            raise ValueError(f"dtype is {dtype!r}. Use 'float16', 'float32', 'uint8' or None (as computed).")
        self.root = Path(directory) if directory is not None else default_cache_dir()
        model, _, signed = model_id.partition("@")
        revision = "|".join(part for part in (signed, revision) if part)
        if not model or not revision:
            raise ValueError(
                f"model_id is {model_id!r} and revision is {revision!r}, but both are needed. Pass revision=model_fingerprint(model)."
            )
        self.identity = {"model": model, "revision": revision, "what": what, "dtype": dtype}
        name = json_digest(self.identity)
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{what}-{model}").strip("._")[:60]
        self.directory = self.root / f"{readable}-{name}"
        self._file: Path | None = None  # whose first `_number` keys are in `_index`
        self._number = 0
        self._index: dict[bytes, int] = {}  # digests and their rows

    @classmethod
    def for_scorer(
        cls, scorer: Scorer, directory: str | os.PathLike | None = None, *, what: str = "image"
    ) -> FeatureCache:
        """Cache for the features of a scorer, whose `cache_revision` (weights, image processor, dtype) is the revision, else its `signature`."""
        model = getattr(scorer, "model_id", type(scorer).__name__)
        revision = getattr(scorer, "cache_revision", None) or scorer.signature
        return cls(directory, model_id=model, revision=revision, what=what)

    def _rows(self) -> _Rows | None:
        """What is stored; None if there is nothing, or rows are missing in the file."""
        try:
            meta = json.loads((self.directory / "meta.json").read_text(encoding="utf-8"))
            rows = _Rows(self.directory / meta["file"], np.dtype(meta["dtype"]), tuple(meta["shape"]))
            rows = rows._replace(number=rows.keys.stat().st_size // 16)
            is_whole = rows.file.stat().st_size >= rows.number * rows.row_bytes
        except (OSError, ValueError, TypeError, KeyError):  # missing or damaged
            return None
        if meta["identity"] != self.identity:
            raise ValueError(
                f"{self.directory} contains features of {meta['identity']}, but {self.identity} was requested. Features of "
                "different models or revisions are never mixed. Use another cache directory, or delete this folder."
            )
        return rows if is_whole else None

    def _row_of(self, rows: _Rows) -> dict[bytes, int]:
        """The row of each stored digest; reads those that were added since the last call."""
        if self._file != rows.file:
            self._file, self._number, self._index = rows.file, 0, {}
        with rows.keys.open("rb") as file:
            file.seek(16 * self._number)
            while self._number < rows.number and len(digest := file.read(16)) == 16:
                self._index[digest] = self._number
                self._number += 1
        return self._index

    def _find(self, digests: Iterable[bytes]) -> tuple[list[int], _Rows | None]:
        """Row of each digest, -1 if there is none; and the rows."""
        rows = self._rows()
        row_of = {} if rows is None else self._row_of(rows)
        return [row_of.get(digest, -1) for digest in digests], rows

    def _append(self, digests: list[bytes], new: np.ndarray) -> None:
        """Add rows `(N, *shape)` under N digests; keys that exist, also of other processes, are not changed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / ".lock", timeout=_LOCK_SECONDS):
            rows = self._rows()
            if rows is None:
                rows = _Rows(self.directory / f"rows-{secrets.token_hex(8)}.bin", new.dtype, new.shape[1:])
                rows.file.touch()
                rows.keys.touch()
                meta = {"dtype": new.dtype.name, "shape": rows.shape, "file": rows.file.name}
                write_json(self.directory / "meta.json", {"identity": self.identity, **meta})
            if (rows.dtype, rows.shape) != (new.dtype, new.shape[1:]):
                forms = f"{rows.dtype} rows of shape {rows.shape}, not {new.dtype} rows of shape {new.shape[1:]}"
                raise ValueError(f"{self.directory} contains {forms}. Use another `what`, or delete it.")
            row_of = self._row_of(rows)
            fresh = [i for digest, i in RowLookup(digests).items() if digest not in row_of]
            if fresh:
                _write(rows.file, new[fresh].tobytes(), rows.number * rows.row_bytes)
                _write(rows.keys, b"".join(digests[i] for i in fresh), rows.number * 16)

    def __len__(self) -> int:
        rows = self._rows()
        return rows.number if rows else 0

    def __contains__(self, key: str) -> bool:
        return not self.missing([key])

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Positions in `keys`, ascending, of those that are not cached, not even by other processes in the meantime."""
        return [i for i, row in enumerate(self._find(key_digests(keys))[0]) if row < 0]

    def get(self, keys: Sequence[str]) -> FeatureView:
        """Features `(N, ...)` that are already cached, in the order of `keys`; raises KeyError if one is not."""
        positions, rows = self._find(key_digests(keys))
        unknown = [key for key, row in zip(keys, positions, strict=True) if row < 0]
        if unknown:
            raise KeyError(
                f"{unknown[0]!r} is not among the {self.identity['what']!r} features of {self.identity['model']}@"
                f"{self.identity['revision']} ({len(unknown)} of {len(keys)} keys missing). Compute them with get_or_compute."
            )
        assert rows is not None
        return FeatureView(np.array(positions, np.int64), rows.mapped())

    def put(self, keys: Sequence[str], features: Any) -> None:
        """Store features, a tensor or array with one row per key. Keys that are already cached are not changed."""
        rows = self._checked_rows(keys, features)
        try:
            self._append(key_digests(keys), rows)
        except OSError as error:  # also a lock that another process never releases
            raise OSError(
                f"Features cannot be cached in {self.directory} ({error}). Free some space, or set CAPTIONRL_CACHE to a writable folder."
            ) from error

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
        if not keys:
            raise ValueError("keys is empty. Pass at least one image.")
        digests = key_digests(keys)
        row_of = self._find(digests)[0]
        todo = [i for i in RowLookup(digests).values() if row_of[i] < 0]  # the first of equal keys
        start = len(todo) * int(os.environ.get("RANK", "0")) // max(int(os.environ.get("WORLD_SIZE", "1")), 1)
        todo = todo[start:] + todo[:start]
        pending: list[tuple[list[int], np.ndarray]] = []
        size, written_at = 0, time.monotonic()
        with progress_bar(len(todo), bool(todo) and progress, f"{self.identity['what']} features") as bar:
            for offset in range(0, len(todo), batch_size):
                part = todo[offset : offset + batch_size]
                if bar is not None:
                    bar.update(len(part))
                part = [i for i, row in zip(part, self._find(digests[i] for i in part)[0], strict=True) if row < 0]
                if part:
                    pending.append((part, self._checked_rows([keys[i] for i in part], compute(part))))
                    size += pending[-1][1].nbytes
                is_late = offset + batch_size >= len(todo) or time.monotonic() - written_at >= _FLUSH_SECONDS
                if pending and (is_late or size >= _FLUSH_BYTES):
                    written = [keys[i] for part, _ in pending for i in part]
                    self.put(written, np.concatenate([rows for _, rows in pending]))
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
        if rows.ndim < 2 or len(rows) != len(keys):
            raise ValueError(
                f"features have shape {rows.shape} for {len(keys)} keys. Return one row, a vector, per key."
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
            raise ValueError(
                f"The features of {keys[int(np.argmin(finite))]!r} are not finite in {stored}. Use float32."
            )
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
