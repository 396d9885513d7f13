"""Checks of features and targets before they are ranked or compared; errors contain the index of the invalid row.

Legend: N captions, M images in the pool, D features.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_features", "check_bag", "check_features", "check_targets", "in_range", "unit_length", "unit_rows"]

# Between these magnitudes, the squares of a row neither underflow nor overflow in float32, and its norm is above the
# minimum of `normalize` (1e-12).
_SMALL, _LARGE = 2.0**-30, 2.0**40


def as_features(features: Any, name: str = "features") -> Tensor:
    """Features as a tensor, from any container; raises ValueError if rows differ in length or are not numbers."""
    if isinstance(features, list | tuple):
        sizes = [np.shape(row) for row in features]
        odd = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            raise ValueError(
                f"{name}[{odd}] has shape {sizes[odd]}, but {name}[0] has {sizes[0]}. Use features of the same scorer."
            )
        if features and isinstance(features[0], Tensor):
            return torch.stack(list(features))
        if features and isinstance(features[0], np.ndarray):
            return torch.from_numpy(np.stack(features))  # torch would take minutes
    try:
        return torch.as_tensor(features)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is not a matrix of numbers ({error}). Pass an array or a tensor.") from error


def check_features(features: Any, name: str = "features") -> Tensor:
    """`(N, D)` features as a tensor, at least float32; raises ValueError if a row is NaN, infinite or zero."""
    tensor = as_features(features, name)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(
            f"{name} must be a matrix (rows, features) that is not empty. Got shape {tuple(tensor.shape)}."
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, not {tensor.dtype}. Pass features, not ids or pixels.")
    tensor = tensor.detach()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    # The largest magnitude of a row detects all three: it is NaN, infinite or zero exactly if the row is. A sum of squares
    # does not: it underflows for tiny values and overflows for huge ones.
    largest = torch.linalg.vector_norm(tensor, ord=torch.inf, dim=1)
    bad = torch.nonzero(~torch.isfinite(largest) | (largest == 0)).flatten()
    if len(bad):
        row = int(bad[0])
        kind = "zero" if float(largest[row]) == 0 else "NaN or infinite"
        raise ValueError(
            f"{name}[{row}] is {kind} ({len(bad)} of {len(tensor)} rows), so it cannot be ranked. Check the caption or "
            "image, or remove it."
        )
    return tensor


def _is_extreme(largest: Tensor) -> Tensor:
    return (largest < _SMALL) | (largest > _LARGE)


def _scale_extremes(rows: Tensor) -> Tensor:
    """`(N, D)` rows, those of extreme magnitude divided by their largest value."""
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    extreme = _is_extreme(largest)
    if bool(extreme.any()):
        rows = rows.clone()
        rows[extreme] = rows[extreme] / largest[extreme, None]
    return rows


def unit_length(rows: Tensor) -> Tensor:
    """Scale `(N, D)` rows of any magnitude to length 1; rows must be finite, not zero, and float32 or float64."""
    return torch.nn.functional.normalize(_scale_extremes(rows), dim=1)


def unit_rows(features: Any, name: str = "features") -> Tensor:
    """`(N, D)` features checked by [`check_features`] and scaled to length 1."""
    return unit_length(check_features(features, name))


def in_range(text: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Scale text `(N, D)` and images `(M, D)` so that products neither underflow nor overflow; ranks do not change."""
    most = torch.linalg.vector_norm(images, ord=torch.inf)
    # The same factor for all images, because their norms affect the ranks.
    return _scale_extremes(text), images / most if bool(_is_extreme(most)) else images


def check_targets(targets: Any, num_captions: int, num_images: int) -> Tensor:
    """`(N,)` int64 image rows of the captions on the CPU; raises ValueError if one is not a row of the pool."""
    if targets is None:
        if num_captions != num_images:
            raise ValueError(
                f"{num_captions} captions and {num_images} images do not pair up. Pass targets, one image row per caption."
            )
        return torch.arange(num_captions)
    try:
        rows = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"targets must be integers, one image row per caption ({error}).") from error
    if rows.ndim != 1 or len(rows) != num_captions:
        raise ValueError(
            f"targets must contain one image row for each of {num_captions} captions. Got shape {tuple(rows.shape)}."
        )
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"targets must be integers, not {rows.dtype}. Pass rows of the pool.")
    rows = rows.long().cpu()
    bad = torch.nonzero((rows < 0) | (rows >= num_images)).flatten()
    if len(bad):
        i = int(bad[0])
        raise ValueError(f"targets[{i}] is {int(rows[i])}. Use rows of the pool, from 0 to {num_images - 1}.")
    return rows


def check_bag(rows: Sequence[int], name: str, num_images: int) -> list[int]:
    """Image rows of a bag or set of candidates; raises ValueError if one is invalid or repeated, or if fewer than two."""
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        kind = "the string " if isinstance(rows, str) else ""
        raise ValueError(f"{name} must be a list of image rows, not {kind}{rows!r}.")
    found = []
    for row in rows:
        try:
            found.append(operator.index(row))
        except TypeError:
            raise ValueError(f"{name} contains {row!r}, which is not an image row. Pass integers from 0.") from None
    if len(found) < 2:
        raise ValueError(f"{name} has {len(found)} image(s). Use at least 2, the target and a distractor.")
    for row in found:
        if not 0 <= row < num_images:
            raise ValueError(f"{name} contains image {row}. Use rows of the pool, from 0 to {num_images - 1}.")
    if len(set(found)) != len(found):
        raise ValueError(f"{name} contains an image twice: {found}. Remove the copy, which would be a distractor.")
    return found
