"""Nearest images of each image: exact with blocked matrix products, approximate with faiss; multimodal features.

Legend: N images, D features, k neighbours, M captions per image.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval.ranking import default_block_size, unit_rows
from hf_captionrl.utils.io import atomic_write_bytes

# Columns per group; only groups with large maxima are searched. A plain top-200 of 118,000 columns takes a sixth of the
# time of the product.
_GROUP = 32


def normalised(features: Any, name: str = "features") -> Tensor:
    """Features `(N, D)` scaled to length 1, in fp32; `name` is theirs in error messages."""
    return unit_rows(features, name).float()  # normalise first: float64 can represent values that float32 cannot


def multimodal_features(image_features: Any, text_features: Any, *, equal_weights: bool = True) -> Tensor:
    """Features of an image and its mean caption: `m = concat(z, t)`, `t = mean_j encode_text(c_j)`.

    Reference: No Detail Left Behind, Algorithm 1, lines 4 to 8. Differs from it by: `z` and `t` are normalised before
    they are concatenated, so that both have equal weight for every scorer; not with `equal_weights=False`, where `t` keeps its
    length: the less the captions of an image agree, the less they count.

    `text_features` are means `(N, D)`, all captions `(N, M, D)`, or N matrices `(M_i, D)`. Returns float32 rows `(N, 2 D)` of
    norm 1, whose products are the mean of the cosine similarities of images and captions.
    """
    images = normalised(image_features, "image_features")
    if isinstance(text_features, Sequence):
        means = []
        for i, captions in enumerate(text_features):
            rows = torch.as_tensor(captions).float()
            if rows.ndim != 2 or len(rows) == 0:
                shape = tuple(rows.shape)
                raise ValueError(f"text_features[{i}] has shape {shape}. Use (captions, features), not empty.")
            means.append(rows.mean(dim=0))
        texts = torch.stack(means) if means else torch.empty(0, 0)
    else:
        texts = torch.as_tensor(text_features).float()
        texts = texts.mean(dim=1) if texts.ndim == 3 else texts
    unit = normalised(texts, "text_features")
    if len(unit) != len(images):
        raise ValueError(f"There are {len(images)} images and text features of {len(unit)}. Pass the same images.")
    if equal_weights:
        return torch.cat([images, unit.to(images.device)], dim=1) / 2**0.5
    return normalised(torch.cat([images, texts.float().to(images.device)], dim=1))


def nearest_neighbours(
    features: Any,
    k: int,
    *,
    rows: Any = None,
    block_size: int | None = None,
    device: str | torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most similar other images of each image, exact, without building the N x N matrix.

    Excludes the image itself by its index, not its copies. Equal similarities are in the order of the rows.

    Args:
        features (array or tensor of shape `(N, D)`): Features, not necessarily normalised.
        k: Neighbours per image, from 1 to N - 1; the paper's training bags use 200.
        rows (sequence of `Q` integers, *optional*): Only find the neighbours of these images, among all images.
        block_size: Images per block; by default as many as fit into 64 MiB of scores.
        device: Device of the products; by default that of the features.
    Returns:
        `tuple` of two tensors of shape `(N, k)` on the CPU (`(Q, k)` with `rows`): int64 rows of the neighbours, most
        similar first, and their float32 cosine similarities in [-1, 1].
    """
    unit = normalised(features)
    return rank_rows(unit if device is None else unit.to(device), k, rows=rows, block_size=block_size)


def rank_rows(unit: Tensor, k: int, *, rows: Any = None, block_size: int | None = None) -> tuple[Tensor, Tensor]:
    """[`nearest_neighbours`] of rows from [`normalised`], on their device."""
    count = len(unit)
    _check_k(k, count)
    block_size = block_size or default_block_size(count)
    queries = torch.arange(count) if rows is None else torch.as_tensor(rows, dtype=torch.long)
    if queries.ndim != 1 or (len(queries) and not 0 <= int(queries.min()) <= int(queries.max()) < count):
        raise ValueError(f"rows must be a list of numbers in [0, {count}), the rows of the features.")
    indices = torch.empty(len(queries), k, dtype=torch.long)
    similarities = torch.empty(len(queries), k)
    buffer = torch.empty(min(block_size, max(len(queries), 1)), count, device=unit.device)
    for start in range(0, len(queries), block_size):
        own = queries[start : start + block_size].to(unit.device)
        block = unit[start : start + len(own)] if rows is None else unit[own]
        scores = torch.mm(block, unit.T, out=buffer[: len(own)])  # (block, N); all blocks use the same buffer
        scores[torch.arange(len(own), device=unit.device), own] = -torch.inf
        values, found = _top(scores, k)
        indices[start : start + len(own)], similarities[start : start + len(own)] = found.cpu(), values.cpu()
    return indices, similarities.clamp_(-1.0, 1.0)


def _check_k(k: int, count: int) -> None:
    if not 1 <= k < count:
        raise ValueError(f"k is {k}, but each of {count} images has between 1 and {count - 1} neighbours.")


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row and their columns; of equal scores, those in the first columns."""
    width = k + 1  # the additional one shows whether the last place is tied
    groups = scores.shape[1] // _GROUP
    if groups > 4 * width:
        # Without ties, the `width` largest values are in the `width` groups with the largest maxima. Ties follow below.
        whole = scores[:, : groups * _GROUP].view(len(scores), groups, _GROUP)
        chosen = whole.amax(dim=2).topk(width, dim=1, sorted=False).indices  # (block, width)
        inside = whole.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
        inside = torch.cat([inside, scores[:, groups * _GROUP :]], dim=1)
        values, places = inside.topk(width, dim=1)
        at = (places // _GROUP).clamp(max=width - 1)
        columns = torch.where(
            places < width * _GROUP,
            chosen.gather(1, at) * _GROUP + places % _GROUP,
            places - width * _GROUP + groups * _GROUP,
        )
    else:
        values, columns = scores.topk(width, dim=1)
    for row in torch.nonzero(values[:, k - 1] == values[:, k]).flatten().tolist():
        last = values[row, k - 1]
        above = int((values[row, :k] > last).sum())
        columns[row, above:k] = torch.nonzero(scores[row] == last).flatten()[: k - above]
    values, columns = values[:, :k], columns[:, :k]
    order = columns.argsort(dim=1)
    values, columns = values.gather(1, order), columns.gather(1, order)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def approximate_neighbours(
    features: Any,
    k: int,
    *,
    num_clusters: int | None = None,  # lists; None: 4 sqrt(N), and at most N / 39, the limit recommended by faiss
    num_probes: int = 32,  # lists searched per image
    recall_rows: int = 256,
    seed: int = 0,
) -> tuple[Tensor, Tensor, float]:
    """Approximate neighbours from faiss' inverted lists, for millions of images, and their measured recall.

    Up to 118,000 images, [`nearest_neighbours`] is exact and not slower. Images whose lists have fewer than k other images are
    searched exactly, and `recall_rows` random ones for the recall: the share of true neighbours that were found.
    """
    faiss = _faiss()
    unit = normalised(features).cpu()
    count, width = unit.shape
    _check_k(k, count)
    lists = max(1, min(int(4 * count**0.5), count // 39)) if num_clusters is None else num_clusters
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed = seed
    index.cp.min_points_per_centroid = 1  # cluster small sets too, without a warning on stderr
    index.nprobe = min(num_probes, lists)
    array = unit.contiguous().numpy()
    index.train(array)
    index.add(array)
    scores, found = (torch.from_numpy(part) for part in index.search(array, k + 1))
    # Remove the image itself, by its index; if it is missing because of copies, remove the last one.
    own = found == torch.arange(count)[:, None]
    own[:, -1] |= ~own.any(dim=1)
    indices, similarities = found[~own].view(count, k).long(), scores[~own].view(count, k)
    short = torch.nonzero((indices < 0).any(dim=1)).flatten()
    if len(short):
        indices[short], similarities[short] = rank_rows(unit, k, rows=short)
    sample = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:recall_rows]
    recall = neighbour_recall(indices[sample], rank_rows(unit, k, rows=sample)[0])
    return indices, similarities.clamp(-1.0, 1.0), recall


def neighbour_recall(found: Any, exact: Any) -> float:
    """Share of the true neighbours `exact` `(N, k)` that an approximate search found, in [0, 1]."""
    found, exact = torch.as_tensor(found), torch.as_tensor(exact)
    hits = sum(len(set(a).intersection(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True))
    return hits / exact.numel()


# --- Nearest neighbours from compressed features: faiss' IVF-PQ finds candidates, exact similarities rank them -------

_CANDIDATES = 4
"""Candidates per neighbour, whose exact similarities are computed."""
_QUERIES_AT_ONCE = 64
_TRAINING_ROWS = 40
"""Smallest number of training rows per list and per code; faiss recommends 39."""


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        remedy = "Run `pip install 'hf-captionrl[faiss]'`, or use the exact search, fast enough for 200,000 images."
        raise ImportError(f"Approximate neighbours need faiss, which is not installed. {remedy}") from error
    return faiss


def build_compressed_index(features: np.ndarray, path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Train an IVF-PQ index of rows `(N, D)` of unit length, float32, and write it; the rows may be memory-mapped.

    Codes take up to 64 bytes per row, half of it below 10,240 rows; 640 rows are the minimum. `seed` is that of the clustering
    and of the choice of its training rows.
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
    """Searches an index that `build_compressed_index` wrote; `features` are its rows, read only for candidates."""

    def __init__(self, path: str | os.PathLike[str], features: np.ndarray) -> None:
        faiss = _faiss()
        # Mapped: the processes of a machine share one copy of the codes.
        self._index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP)
        self.features = features

    def search(self, rows: Any, k: int) -> tuple[Tensor, Tensor]:
        """The k most similar other images of Q images, among the candidates of the index.

        Returns rows `(Q, k)`, most similar first, and cosine similarities. Raises ValueError if the searched lists have fewer
        than k other images.
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
