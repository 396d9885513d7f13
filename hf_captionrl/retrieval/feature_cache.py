"""Caches features on disk, keyed by image, model and revision.

Legend: N keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_captionrl.io import json_digest
from hf_captionrl.retrieval.content_hashes import image_hash, model_fingerprint
from hf_captionrl.retrieval.feature_view import FeatureView
from hf_captionrl.retrieval.hash_index import key_digests
from hf_captionrl.retrieval.row_store import RowStore

if TYPE_CHECKING:
    from hf_captionrl.retrieval.scorer_base import Scorer

__all__ = ["FeatureCache", "FeatureView", "default_cache_dir", "image_hash", "model_fingerprint"]

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
