"""Nearest neighbours from compressed features: faiss' IVF-PQ finds candidates, exact similarities rank them.

Legend: N images, D features, Q queries, k neighbours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.io import atomic_write_bytes

__all__ = ["CompressedIndex", "build_compressed_index"]

_CANDIDATES = 4
"""Candidates per neighbour, whose exact similarities are computed."""
_QUERIES_AT_ONCE = 64
_TRAINING_ROWS = 40
"""Smallest number of training rows per list and per code; faiss recommends 39."""


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "Compressed neighbours need faiss, which is not installed. Run `pip install 'hf-captionrl[faiss]'`."
        ) from error
    return faiss


def build_compressed_index(features: np.ndarray, path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Train an IVF-PQ index and write it; codes take up to 64 bytes per row, half of it below 10,240 rows.

    Args:
        features (array of shape `(N, D)`): Rows of unit length, float32; may be memory-mapped.
        path (`str` or `Path`): The file.
        seed (`int`): Seed of the clustering and of the choice of its training rows.

    Returns:
        `Path`: The file.

    Raises:
        ImportError: If faiss is not installed.
        ValueError: If there are fewer than 640 rows, too few for 16 codes.
    """
    faiss = _faiss()
    count, width = features.shape
    bits = 8 if count >= _TRAINING_ROWS * 2**8 else 4
    if count < _TRAINING_ROWS * 2**bits:
        raise ValueError(f"There are {count} rows, but IVF-PQ needs {_TRAINING_ROWS * 2**bits}. Use the exact search.")
    lists = max(1, min(int(4 * count**0.5), count // _TRAINING_ROWS))
    parts = next(n for n in (64, 48, 32, 16, 8, 4, 2, 1) if width % n == 0)
    index = faiss.IndexIVFPQ(faiss.IndexFlatIP(width), width, lists, parts, bits, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed = index.pq.cp.seed = seed
    some = np.random.default_rng(seed).permutation(count)[: 256 * max(lists, 256)]
    index.train(np.ascontiguousarray(features[np.sort(some)]))
    for start in range(0, count, 65_536):
        index.add(np.ascontiguousarray(features[start : start + 65_536]))
    index.nprobe = min(32, lists)
    return atomic_write_bytes(path, faiss.serialize_index(index).tobytes())


class CompressedIndex:
    """Searches an index that `build_compressed_index` wrote.

    Args:
        path (`str` or `Path`): The file.
        features (array of shape `(N, D)`): The rows of the index, of unit length; memory-mapped, read only for candidates.

    Raises:
        ImportError: If faiss is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], features: np.ndarray) -> None:
        faiss = _faiss()
        # Mapped: the processes of a machine share one copy of the codes.
        self._index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP)
        self.features = features

    def search(self, rows: Any, k: int) -> tuple[Tensor, Tensor]:
        """The k most similar other images of some images, among the candidates of the index.

        Args:
            rows (sequence of Q integers): The images.
            k (`int`): Neighbours per image.

        Returns:
            `tuple` of two tensors of shape `(Q, k)`: int64 rows, most similar first, and float32 cosine similarities in [-1, 1].

        Raises:
            ValueError: If the searched lists have fewer than k other images.
        """
        queries = np.asarray(rows, dtype=np.int64)
        indices = torch.empty(len(queries), k, dtype=torch.long)
        similarities = torch.empty(len(queries), k)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            own = queries[start : start + _QUERIES_AT_ONCE]  # (q,)
            unit = np.ascontiguousarray(self.features[own])  # (q, D)
            candidates = np.sort(self._index.search(unit, min(_CANDIDATES * k + 1, len(self.features)))[1], axis=1)
            scores = np.einsum("qd,qcd->qc", unit, self.features[np.maximum(candidates, 0)])  # (q, c)
            scores[(candidates == own[:, None]) | (candidates < 0)] = -np.inf
            # Stable: of equal similarities, the image in the first row.
            best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            values = np.take_along_axis(scores, best, axis=1)
            if not np.isfinite(values).all():
                raise ValueError(f"The lists around row {own[0]} have fewer than {k} other images. Lower --top.")
            indices[start : start + len(own)] = torch.from_numpy(np.take_along_axis(candidates, best, axis=1))
            similarities[start : start + len(own)] = torch.from_numpy(values)
        return indices, similarities.clamp_(-1.0, 1.0)
