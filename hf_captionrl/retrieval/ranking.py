"""Ranks of the targets of captions. Rewards and metrics share this code.

Legend: N captions, M images in the pool, K images per bag, D features.

Three rules hold everywhere. Ties count against the caption: an image with the same score ranks before the target, so a
constant caption is never correct by chance. The score of the target is read from the same block as the other scores,
because a separate dot product rounds differently (it changed 1,829 of 5,000 ranks). Exact copies of an image get the
same score, because a matrix product may round their columns differently too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# --- Checks of features and targets before they are ranked or compared; errors contain the index of the invalid row ---
# Between these magnitudes, the squares of a row neither underflow nor overflow in float32, and its norm is above the
# minimum of `normalize` (1e-12).
_SMALL, _LARGE = 2.0**-30, 2.0**40


def as_features(features: Any, name: str = "features") -> Tensor:
    """Features as a tensor, from any container; raises ValueError if rows differ in length or are not numbers."""
    try:
        if isinstance(features, list | tuple) and features and isinstance(features[0], Tensor):
            return torch.stack(list(features))
        if isinstance(features, list | tuple) and features and isinstance(features[0], np.ndarray):
            return torch.from_numpy(np.stack(features))  # torch would take minutes
        return torch.as_tensor(features)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is not a matrix of numbers ({error}). Pass an array or a tensor.") from error


def check_features(features: Any, name: str = "features") -> Tensor:
    """`(N, D)` features as a tensor, at least float32; raises ValueError if a row is NaN, infinite or zero."""
    tensor = as_features(features, name)
    if tensor.ndim != 2 or 0 in tensor.shape or not tensor.is_floating_point():
        raise ValueError(
            f"{name} must be a floating point matrix (rows, features) that is not empty. Got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}."
        )
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
            f"{name}[{row}] is {kind} ({len(bad)} such rows) and cannot be ranked. Check the caption or image."
        )
    return tensor


def _is_extreme(largest: Tensor) -> Tensor:
    return (largest < _SMALL) | (largest > _LARGE)


def _scaled(rows: Tensor, largest: Tensor) -> Tensor:
    """Rows with a largest value in [0.5, 1): divided by a power of two, which rounds nothing, so that ties stay ties."""
    exponent = torch.frexp(largest).exponent
    half = exponent // 2  # 2 ** exponent itself may be out of range
    return torch.ldexp(torch.ldexp(rows, -half), half - exponent)


def _scale_extremes(rows: Tensor) -> Tensor:
    """`(N, D)` rows, those of extreme magnitude scaled."""
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    extreme = _is_extreme(largest)
    if bool(extreme.any()):
        rows = rows.clone()
        rows[extreme] = _scaled(rows[extreme], largest[extreme, None])
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
    return _scale_extremes(text), _scaled(images, most) if bool(_is_extreme(most)) else images


def check_targets(targets: Any, num_captions: int, num_images: int) -> Tensor:
    """`(N,)` int64 image rows of the captions on the CPU; raises ValueError if one is not a row of the pool."""
    if targets is None:
        if num_captions != num_images:
            raise ValueError(f"{num_captions} captions and {num_images} images do not pair up. Pass targets.")
        return torch.arange(num_captions)
    try:
        rows = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"targets must be integers, one image row per caption ({error}).") from error
    if rows.shape != (num_captions,) or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(
            f"targets must be one image row, an integer, for each of {num_captions} captions. Got {rows.dtype} of shape "
            f"{tuple(rows.shape)}."
        )
    rows = rows.long().cpu()
    bad = torch.nonzero((rows < 0) | (rows >= num_images)).flatten()
    if len(bad):
        i = int(bad[0])
        raise ValueError(f"targets[{i}] is {int(rows[i])}. Use rows of the pool, from 0 to {num_images - 1}.")
    return rows


def check_bag(rows: Sequence[int], name: str, num_images: int) -> list[int]:
    """Image rows of a bag or set of candidates; raises ValueError if one is invalid or repeated, or if fewer than two."""
    try:
        images = [operator.index(row) for row in rows]
    except TypeError:
        raise ValueError(f"{name} is {rows!r}, but must be a list of image rows, integers from 0.") from None
    if bad := [row for row in images if not 0 <= row < num_images]:
        raise ValueError(f"{name} contains image {bad[0]}. Use rows of the pool, from 0 to {num_images - 1}.")
    if len(images) < 2 or len(set(images)) != len(images):
        raise ValueError(f"{name} is {images}. Use at least 2 images, the target and distractors, each once.")
    return images


# --- Copies of images in a pool, by their features -------------------------------------------------------------------

_ROWS_AT_ONCE = 4096


def duplicate_images(image_features: Any, *, unit: bool = False) -> Tensor:
    """`(M,)` first row with identical features, for each image. A copy in the pool is a false negative.

    `unit`: whether rows are equal if they are after scaling to length 1.
    """
    return first_rows(check_features(image_features, "image_features"), unit_length if unit else torch.Tensor.detach)


def first_rows(images: Tensor, scale: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Tensor:
    """[`duplicate_images`] of checked features `(M, D)`; `scale` maps some rows to the rows that are compared."""

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


# --- Concepts: several images of one thing, of which a caption may retrieve any ----------------------------------------


def concept_numbers(concepts: Sequence[Any]) -> list[int] | None:
    """Number of each image's concept, by first appearance; an image without one (None, NaN or "") is its own. None: no concept has two images."""
    numbers: dict[Any, int] = {}
    names = ["" if c is None or c != c else str(c) for c in concepts]
    rows = [numbers.setdefault(name or (row,), len(numbers)) for row, name in enumerate(names)]
    return rows if len(numbers) < len(rows) else None


def num_concepts(count: int, concepts: Sequence[int] | None) -> int:
    """Number of concepts of `count` images; with None each image is one."""
    return count if concepts is None else max(concepts) + 1


def best_of_concepts(scores: Tensor, concepts: Tensor) -> Tensor:
    """Scores `(N, C)` of concepts, those of their best images, from `(N, M)` and the concept of each image `(M,)`."""
    best = scores.new_full((len(scores), int(concepts.max()) + 1), -torch.inf)
    return best.scatter_reduce_(1, concepts.expand_as(scores), scores, "amax")


# --- Ranks of the targets of captions. Rewards and metrics share this code -------------------------------------------

# Scores per block: 2**24 floats are 64 MiB. The product is as fast as in one piece, but needs less memory.
_BLOCK_SCORES = 2**24


def default_block_size(num_images: int) -> int:
    """Rows of a block of scores with M columns: about 64 MiB, and at least 16 rows."""
    return max(_BLOCK_SCORES // num_images, 16)


def _pair(text_features: Any, image_features: Any) -> tuple[Tensor, Tensor]:
    """Check both matrices, and that their dtypes and dimensions agree."""
    raw_text = as_features(text_features, "text_features")
    raw_images = as_features(image_features, "image_features")
    text, images = check_features(raw_text, "text_features"), check_features(raw_images, "image_features")
    if (raw_text.dtype, text.shape[1]) != (raw_images.dtype, images.shape[1]):
        raise ValueError(
            f"text_features are {raw_text.dtype} of {text.shape[1]} numbers, but image_features {raw_images.dtype} of "
            f"{images.shape[1]}. Use features of the same scorer."
        )
    return in_range(text, images)


def ranks_from_scores(scores: Tensor, columns: Tensor, *, buffer: Tensor | None = None) -> Tensor:
    """`(N,)` rank of one column `columns[n]` in each row of scores `(N, K)`; all other functions use this rule.

    1 = best; equal scores rank before the target. `buffer`, bool `(N, K)`, is overwritten and saves an allocation per call.
    """
    target = scores.gather(1, columns[:, None])
    # Counting worse images, not better ones, ranks a NaN score last instead of first.
    worse = torch.lt(scores, target, out=buffer)
    if worse.device.type == "cpu":  # NumPy counts booleans ten times as fast as torch
        count = torch.from_numpy(np.count_nonzero(worse.numpy(), axis=1))
    else:
        count = torch.count_nonzero(worse, dim=1)
    return scores.shape[1] - count


def tie_copies(scores: Tensor, duplicate_of: Tensor) -> Tensor:
    """Set the scores `(N, K)` of exact copies of an image to that of the first one, in place.

    `duplicate_of` `(K,)`: first column with the same image, from [`duplicate_images`].
    """
    copies = torch.nonzero(duplicate_of != torch.arange(len(duplicate_of))).flatten()
    if len(copies):
        scores[:, copies] = scores[:, duplicate_of[copies]]
    return scores


def _copies(images: Tensor, duplicate_of: Tensor | None) -> list[int] | None:
    """First row with the same image, for each image; None if there are no copies."""
    found = first_rows(images) if duplicate_of is None else duplicate_of
    return None if torch.equal(found, torch.arange(len(images))) else found.tolist()


def _scores_in(text: Tensor, images: Tensor, rows: list[int], copies: list[int] | None) -> Tensor:
    """Scores `(N, K)` of captions and the K images of a bag or set."""
    scores = text @ images[rows].T
    if copies is None or len({copies[row] for row in rows}) == len(rows):
        return scores
    column: dict[int, int] = {}
    return tie_copies(scores, torch.tensor([column.setdefault(copies[row], i) for i, row in enumerate(rows)]))


def ranks(
    text_features: Any,
    image_features: Any,
    targets: Any = None,
    *,
    block_size: int | None = None,
    duplicate_of: Tensor | None = None,
    concepts: Sequence[int] | None = None,
) -> Tensor:
    """`(N,)` rank of each caption's target in the whole pool, on the CPU: 1 = best, ties against the caption.

    The product of text `(N, D)` and images `(M, D)`, normalised for cosine similarity, is computed in blocks of captions, by
    default of 64 MiB. `targets` are the image rows of the captions, by default caption i belongs to image i; `duplicate_of`
    is the result of [`duplicate_images`], if already known. With `concepts`, of [`concept_numbers`], ranks are those of the
    target's concept among all concepts, each by its best image.
    """
    text, images = _pair(text_features, image_features)
    columns = check_targets(targets, len(text), len(images)).to(text.device)
    of_image = None if concepts is None else torch.tensor(concepts, device=text.device)  # (M,)
    columns = columns if of_image is None else of_image[columns]
    block_size = block_size or default_block_size(len(images))
    copies = _copies(images, duplicate_of)
    first = None if copies is None else torch.tensor(copies)
    scores = torch.empty(min(block_size, len(text)), len(images), dtype=text.dtype, device=text.device)
    # Allocated once: the allocator would not reuse the block before, and two GiB would be left at 64,000 captions.
    worse = torch.empty_like(scores, dtype=torch.bool)
    found = []
    for start in range(0, len(text), block_size):
        block = text[start : start + block_size]
        out = torch.mm(block, images.T, out=scores[: len(block)])  # (block, M); all blocks use the same buffer
        if first is not None:
            tie_copies(out, first)
        if of_image is not None:
            found.append(ranks_from_scores(best_of_concepts(out, of_image), columns[start : start + block_size]))
            continue
        found.append(ranks_from_scores(out, columns[start : start + block_size], buffer=worse[: len(block)]))
    return torch.cat(found).cpu()


def recall_at_k(rank: Tensor, k: int) -> float:
    """Share of captions whose target is among the first k."""
    if k < 1:
        raise ValueError(f"k is {k}. Use at least 1.")
    if len(rank) == 0:
        raise ValueError("There are no ranks to average. Pass at least one caption.")
    return float((rank <= k).double().mean())


def distractor_recall(rank: Tensor, pool_size: int, *, k: int = 1, num_distractors: int = 99) -> Tensor:
    r"""`(N,)` probability that the target is among the first k against distractors drawn at random from the pool.

    The value is exact: with b = rank - 1 better images among the other M - 1, the number of better images among n
    distractors is hypergeometric, so the probability is `sum_{i<k} C(b, i) C(M-1-b, n-i) / C(M-1, n)`. For k = 1 this
    is `C(M-1-b, n) / C(M-1, n)`. Ranks are those in the whole pool.
    """
    others = pool_size - 1
    if k < 1:
        raise ValueError(f"k is {k}. Use at least 1.")
    _check_num_distractors(num_distractors, others)
    better = (torch.as_tensor(rank).double() - 1).cpu()
    bad = torch.nonzero(~((better >= 0) & (better <= others))).flatten()
    if len(bad):
        i = int(bad[0])
        raise ValueError(f"rank[{i}] is {float(better[i]) + 1:g}, but must be from 1 to pool_size, {pool_size}.")
    # log x! for every x in the formula; its differences are exact to about 1e-12.
    log_factorial = torch.lgamma(torch.arange(others + 1, dtype=torch.float64) + 1)

    def log_choose(total: Tensor, part: Tensor) -> Tensor:
        inside = (part >= 0) & (part <= total)
        total_, part_ = total.clamp(min=0).long(), torch.minimum(part.clamp(min=0), total.clamp(min=0)).long()
        value = log_factorial[total_] - log_factorial[part_] - log_factorial[total_ - part_]
        return torch.where(inside, value, torch.full_like(value, -torch.inf))

    chance = torch.zeros_like(better)
    whole = log_choose(torch.tensor([float(others)]), torch.tensor([float(num_distractors)]))
    for i in range(min(k, num_distractors + 1)):
        drawn = torch.full_like(better, float(i))
        term = log_choose(better, drawn) + log_choose(others - better, num_distractors - drawn)
        chance += torch.exp(term - whole)
    return chance.clamp(0.0, 1.0)


def _check_num_distractors(number: int, others: int) -> None:
    if not 1 <= number <= others:
        raise ValueError(f"num_distractors is {number}, but must be from 1 to {others}, the other images of the pool.")


def sampled_ranks(rank: Tensor, pool_size: int, *, num_distractors: int, repeats: int, seed: int) -> Tensor:
    """`(repeats, N)` ranks against random distractors, drawn independently for each caption, from ranks in the whole pool.

    The number of better images among the distractors is hypergeometric, so it is drawn directly. This has the same
    distribution as drawing images, and needs no scores. It checks the closed form and old protocols.
    """
    others = pool_size - 1
    _check_num_distractors(num_distractors, others)
    better = torch.as_tensor(rank).cpu().numpy() - 1
    size = (repeats, len(better))
    drawn = np.random.default_rng(seed).hypergeometric(better, others - better, num_distractors, size=size)
    return torch.from_numpy(drawn).long() + 1


def bag_ranks(
    text_features: Any,
    image_features: Any,
    bags: Sequence[Sequence[int]],
    targets: Any = None,
    *,
    duplicate_of: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank of each caption's target within each bag that contains it (TrueMatch).

    `bags` are lists of at least 2 image rows; all captions of the images in a bag are ranked within the bag. The other
    arguments are those of [`ranks`]. Returns three int64 tensors `(P,)`: ranks, 1 = best; row of the ranked caption; index of
    the bag.
    """
    text, images = _pair(text_features, image_features)
    owners = check_targets(targets, len(text), len(images))
    if len(bags) == 0:
        raise ValueError("bags is empty. Pass at least one bag.")
    copies = _copies(images, duplicate_of)
    of_image = torch.argsort(owners, stable=True).tolist()  # captions of image 0, of image 1, ...
    # (M + 1,) where those of each begin
    first = [0, *torch.bincount(owners, minlength=len(images)).cumsum(0).tolist()]
    found, captions, numbers = [], [], []
    for number, bag in enumerate(bags):
        rows = check_bag(bag, f"bags[{number}]", len(images))
        for row in rows:
            if first[row] == first[row + 1]:
                raise ValueError(f"bags[{number}] contains image {row}, which has no caption. Caption all images.")
        ranked = [caption for row in rows for caption in of_image[first[row] : first[row + 1]]]
        columns = torch.tensor([i for i, row in enumerate(rows) for _ in range(first[row], first[row + 1])])
        scores = _scores_in(text[ranked], images, rows, copies)  # (captions of the bag, K)
        found.append(ranks_from_scores(scores, columns.to(text.device)))
        captions += ranked
        numbers += [number] * len(ranked)
    return torch.cat(found).cpu(), torch.tensor(captions), torch.tensor(numbers)


def set_ranks(
    text_features: Any,
    image_features: Any,
    sets: Sequence[Sequence[int]],
    targets: Any,
    *,
    duplicate_of: Tensor | None = None,
) -> Tensor:
    """`(N,)` rank of each caption's target within the candidates of the caption (ImageCoDe), 1 = best, ties against it.

    `sets` has for each caption a list of at least 2 image rows, its target among them. The other arguments are those of
    [`ranks`].
    """
    text, images = _pair(text_features, image_features)
    if targets is None:
        raise ValueError("set_ranks needs targets. Pass the image row of each caption.")
    owners = check_targets(targets, len(text), len(images)).tolist()
    if len(sets) != len(text):
        raise ValueError(f"There are {len(sets)} sets for {len(text)} captions. Pass one set per caption.")
    copies = _copies(images, duplicate_of)
    found = torch.empty(len(text), dtype=torch.long)
    for i, candidates in enumerate(sets):
        rows = check_bag(candidates, f"sets[{i}]", len(images))
        if owners[i] not in rows:
            raise ValueError(f"sets[{i}] must contain image {owners[i]}, the target of caption {i}. Add it.")
        scores = _scores_in(text[i : i + 1], images, rows, copies)  # (1, K)
        found[i] = ranks_from_scores(scores, torch.tensor([rows.index(owners[i])], device=text.device))[0]
    return found
