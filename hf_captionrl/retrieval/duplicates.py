"""Copies of images in a pool, by their features.

Legend: M images in the pool, D features.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval.feature_checks import check_features, unit_length

__all__ = ["duplicate_images", "first_rows"]

_ROWS_AT_ONCE = 4096


def duplicate_images(image_features: Any, *, unit: bool = False) -> Tensor:
    """First row with identical features, for each image. A copy in the pool is a false negative.

    Args:
        image_features (array or tensor of shape `(M, D)`): Features of the pool.
        unit: Whether rows are equal if they are after scaling to length 1.
    Returns:
        `torch.Tensor` of shape `(M,)`: int64; image i is a copy of an earlier image if value i is not i.
    Raises:
        ValueError: If the features are invalid.
    """
    return first_rows(check_features(image_features, "image_features"), unit_length if unit else torch.Tensor.detach)


def first_rows(images: Tensor, scale: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Tensor:
    """[`duplicate_images`] of checked features, scaled block by block.

    Args:
        images (`torch.Tensor` of shape `(M, D)`): Features of the pool.
        scale: Maps some rows to the rows that are compared.
    Returns:
        `torch.Tensor` of shape `(M,)`: int64.
    """

    def bits(rows: Any) -> np.ndarray:
        found = scale(images[rows]).cpu().contiguous().numpy()
        return found.view(np.uint64 if found.shape[1] * found.itemsize % 8 == 0 else np.uint32)

    # Equal rows have equal sums of their bits. Most sums are unique, so that most rows need not be compared.
    starts = range(0, len(images), _ROWS_AT_ONCE)
    sums = np.concatenate([bits(slice(at, at + _ROWS_AT_ONCE)).sum(axis=1, dtype=np.uint64) for at in starts])
    _, group, size = np.unique(sums, return_inverse=True, return_counts=True)
    found, first = np.arange(len(images)), dict[bytes, int]()
    repeated = np.flatnonzero(size[group] > 1)
    for at in range(0, len(repeated), _ROWS_AT_ONCE):
        rows = repeated[at : at + _ROWS_AT_ONCE]
        for i, row in zip(rows.tolist(), bits(torch.from_numpy(rows)), strict=True):
            found[i] = first.setdefault(row.tobytes(), i)
    return torch.from_numpy(found)
