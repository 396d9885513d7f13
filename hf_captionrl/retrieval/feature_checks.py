"""Checks of features and targets before they are ranked or compared; errors name the index of the wrong row.

Legend: N captions, M images of the pool, D features.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_features", "check_bag", "check_features", "check_targets", "in_range", "unit_length", "unit_rows"]

# Between these magnitudes neither the squares of a row underflow or overflow in float32, nor does the smallest norm that
# `normalize` divides by (1e-12) matter.
_SMALL, _LARGE = 2.0**-30, 2.0**40


def as_features(features: Any, name: str = "features") -> Tensor:
    """Features as a tensor, from any container.

    Raises:
        ValueError: If rows are of different lengths (the row is named), or an element is not a number.
    """
    if isinstance(features, list | tuple):
        sizes = [np.shape(row) for row in features]
        odd = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            raise ValueError(
                f"{name}[{odd}] has the shape {sizes[odd]}, but {name}[0] {sizes[0]}. All must come from one scorer."
            )
        if features and isinstance(features[0], Tensor):
            return torch.stack(list(features))
        if features and isinstance(features[0], np.ndarray):
            return torch.from_numpy(np.stack(features))  # row by row torch would take minutes
    try:
        return torch.as_tensor(features)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as a matrix of numbers: {error}.") from error


def check_features(features: Any, name: str = "features") -> Tensor:
    """Turn features into a float matrix and refuse rows without a direction.

    Args:
        features (array or tensor of shape `(N, D)`): Features of captions or images, of any length.
        name: Their name in error messages.
    Returns:
        `torch.Tensor` of shape `(N, D)`: The same numbers, at least float32.
    Raises:
        ValueError: If they are not a matrix of floats, are empty, or a row is NaN, infinite or zero (the row is
            named).
    """
    tensor = as_features(features, name)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(
            f"{name} must be a matrix (rows, features) that is not empty, got shape {tuple(tensor.shape)}."
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}. Pass features, not ids or pixels.")
    tensor = tensor.detach()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    # The largest magnitude finds all three faults: it is NaN, infinite or zero exactly where a row is. A sum of squares is
    # not: it underflows for rows of tiny numbers and overflows for rows of huge ones.
    largest = torch.linalg.vector_norm(tensor, ord=torch.inf, dim=1)
    bad = torch.nonzero(~torch.isfinite(largest) | (largest == 0)).flatten()
    if len(bad):
        row = int(bad[0])
        kind = "zero" if float(largest[row]) == 0 else "NaN or infinite"
        raise ValueError(
            f"{name}[{row}] is {kind} ({len(bad)} such rows of {len(tensor)}). A row needs a direction to be ranked: "
            "look at the caption or image it came from and leave it out."
        )
    return tensor


def _is_extreme(largest: Tensor) -> Tensor:
    return (largest < _SMALL) | (largest > _LARGE)


def unit_length(rows: Tensor) -> Tensor:
    """Scale rows of any magnitude to length 1.

    Args:
        rows (`torch.Tensor` of shape `(N, D)`): Finite float32 or float64 rows, none of them zero.

    Returns:
        `torch.Tensor` of shape `(N, D)`: The same directions.
    """
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    extreme = _is_extreme(largest)
    if bool(extreme.any()):
        rows = rows.clone()
        rows[extreme] = rows[extreme] / largest[extreme, None]
    return torch.nn.functional.normalize(rows, dim=1)


def unit_rows(features: Any, name: str = "features") -> Tensor:
    """Features scaled to length 1; rows without a direction are refused.

    Args:
        features (array or tensor of shape `(N, D)`): Features of captions or images, of any length.
        name: Their name in error messages.
    Returns:
        `torch.Tensor` of shape `(N, D)`: Rows of norm 1, at least float32.
    Raises:
        ValueError: As [`check_features`].
    """
    return unit_length(check_features(features, name))


def in_range(text: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Scale features so that their products neither underflow nor overflow; each caption ranks the images as before.

    Args:
        text (`torch.Tensor` of shape `(N, D)`): Features of the captions, checked.
        images (`torch.Tensor` of shape `(M, D)`): Features of the images, checked.
    """
    largest = torch.linalg.vector_norm(text, ord=torch.inf, dim=1)
    extreme = _is_extreme(largest)
    if bool(extreme.any()):
        text = text.clone()
        text[extreme] = text[extreme] / largest[extreme, None]
    most = torch.linalg.vector_norm(images, ord=torch.inf)
    # One factor for all: the norms of images influence the ranks.
    return text, images / most if bool(_is_extreme(most)) else images


def check_targets(targets: Any, num_captions: int, num_images: int) -> Tensor:
    """Check the image row each caption belongs to.

    Returns:
        `torch.Tensor` of shape `(N,)`: int64 rows, on the CPU.

    Raises:
        ValueError: If the number of targets is wrong or a target is not a row of the pool (its index is named).
    """
    if targets is None:
        if num_captions != num_images:
            raise ValueError(
                f"{num_captions} captions and {num_images} images do not pair up. Pass targets, an image row each."
            )
        return torch.arange(num_captions)
    try:
        rows = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"targets must be integers, an image row for each caption: {error}.") from error
    if rows.ndim != 1 or len(rows) != num_captions:
        raise ValueError(
            f"targets must hold one image row for each of {num_captions} captions, got shape {tuple(rows.shape)}."
        )
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"targets must be integers, got {rows.dtype}.")
    rows = rows.long().cpu()
    bad = torch.nonzero((rows < 0) | (rows >= num_images)).flatten()
    if len(bad):
        i = int(bad[0])
        raise ValueError(f"targets[{i}] = {int(rows[i])} is not a row of the pool of {num_images} images.")
    return rows


def check_bag(rows: Sequence[int], name: str, num_images: int) -> list[int]:
    """Check the images of a bag, or of a set of candidates.

    Raises:
        ValueError: If a row is not in the pool or occurs twice, or there are fewer than two.
    """
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        kind = "the string " if isinstance(rows, str) else ""
        raise ValueError(f"{name} must be a list of image rows, got {kind}{rows!r}.")
    found = []
    for row in rows:
        try:
            found.append(operator.index(row))
        except TypeError:
            raise ValueError(f"{name} holds {row!r}, which is not an image row. Pass integers from 0.") from None
    if len(found) < 2:
        raise ValueError(f"{name} has {len(found)} image(s). A bag needs at least 2, the target and a distractor.")
    for row in found:
        if not 0 <= row < num_images:
            raise ValueError(f"{name} names image {row}, which is not a row of the pool of {num_images} images.")
    if len(set(found)) != len(found):
        raise ValueError(f"{name} names an image twice: {found}. The copy would count as a distractor.")
    return found
