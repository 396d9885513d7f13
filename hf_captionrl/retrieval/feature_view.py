"""Cached features as an array that reads from disk when it is indexed."""

from __future__ import annotations

import contextlib
import errno
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_captionrl.retrieval.row_store import drop_rows

if TYPE_CHECKING:
    import torch

__all__ = ["FeatureView"]


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
