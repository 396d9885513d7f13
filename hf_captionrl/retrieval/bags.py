"""Bags of similar images: candidates, TrueMatch's curation, and disjoint bags for training.

Reference: No Detail Left Behind, Algorithms 1 and 2 and section B.2.
Legend: N images, D features, k ranked neighbours per image, K images per bag, T bags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval.neighbours import multimodal_features, nearest_neighbours, normalised

__all__ = [
    "TOP_NEIGHBOURS",
    "bag_similarities",
    "candidate_bags",
    "check_neighbours",
    "curate_bags",
    "multimodal_features",
    "nearest_neighbours",
    "training_bags",
]

_AT_ONCE = 4096

TOP_NEIGHBOURS = 200
"""Number of ranked neighbours from which training bags are filled (B.2)."""


def candidate_bags(
    features: Any, bag_size: int, *, block_size: int | None = None, device: str | torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """One bag per image: the image and the K - 1 most similar ones (Algorithm 1). Bags overlap.

    Args:
        features (array or tensor of shape `(N, D)`): From [`multimodal_features`], or features of the images alone.
        bag_size: K, from 2 to N.
        block_size: Images per block of the product, see [`nearest_neighbours`].
        device: Device of the products.

    Returns:
        `tuple`: int64 bags of shape `(N, K)`, the query first, and their float32 similarities of shape `(N,)`: the mean
        cosine similarity between the query and the other images.

    Raises:
        ValueError: If features are invalid or there are fewer than `bag_size` images.
    """
    if not 2 <= bag_size <= len(features):
        raise ValueError(f"bag_size is {bag_size}, but must be between 2 and {len(features)}, the number of images.")
    indices, similarities = nearest_neighbours(features, bag_size - 1, block_size=block_size, device=device)
    return torch.cat([torch.arange(len(indices))[:, None], indices], dim=1), similarities.mean(dim=1)


def curate_bags(bags: Any, similarities: Any) -> tuple[Tensor, Tensor]:
    """Keep the most similar bag of each visual concept (Algorithm 2, TrueMatch).

    Bags are visited in descending order of similarity (ties in their original order). A bag is kept if it shares no
    image with the bags kept before.

    Args:
        bags (array or tensor of shape `(T, K)`): Rows of images.
        similarities (array or tensor of shape `(T,)`): Similarities within the bags.

    Returns:
        `tuple`: The kept bags, int64 of shape `(Q, K)`, and their similarities `(Q,)`, in descending order.

    Raises:
        ValueError: If shapes disagree, or a similarity is NaN.
    """
    rows, scores = torch.as_tensor(bags), torch.as_tensor(similarities)
    if rows.ndim != 2 or scores.shape != rows.shape[:1]:
        raise ValueError(
            f"bags must have shape (T, K) and similarities (T,). Got {tuple(rows.shape)} and {tuple(scores.shape)}."
        )
    if scores.isnan().any():
        raise ValueError(f"similarities[{int(scores.isnan().nonzero()[0])}] is NaN. Check the features of that image.")
    order = scores.argsort(descending=True, stable=True)
    visited: set[int] = set()
    kept = []
    for place, bag in zip(order.tolist(), rows[order].tolist(), strict=True):
        if visited.isdisjoint(bag):
            visited.update(bag)
            kept.append(place)
    return rows[kept].long(), scores[kept]


def bag_similarities(features: Any, bags: Any) -> Tensor:
    """Mean cosine similarity between the first image of a bag and the others.

    Args:
        features (array or tensor of shape `(N, D)`): Features of the images.
        bags (array or tensor of shape `(T, K)`): Rows of images, the query first.

    Returns:
        `torch.Tensor` of shape `(T,)`: float32 in [-1, 1].

    Raises:
        ValueError: If features are invalid, or bags have fewer than two images.
    """
    unit = normalised(features).cpu()
    rows = torch.as_tensor(bags).long()
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ValueError(f"bags must have shape (T, K) with K of at least 2. Got {tuple(rows.shape)}.")
    # mean_k <q, x_k> = <q, mean_k x_k>. In parts, because all bags at once would copy all features.
    parts = [(unit[part[:, 0]] * unit[part[:, 1:]].mean(dim=1)).sum(dim=1) for part in rows.split(1024)]
    return torch.cat(parts).clamp(-1.0, 1.0) if parts else torch.empty(0)


def check_neighbours(neighbours: Any, num_images: int | None = None) -> np.ndarray:
    """Check ranked neighbours, and return them as an array.

    Args:
        neighbours (array or tensor of shape `(N, k)`): Rows of the nearest images of each image, most similar first.
        num_images: Number of images of the data set; by default that of the neighbours.

    Returns:
        `np.ndarray` of shape `(N, k)`: Integers, not copied if possible.

    Raises:
        ValueError: If they are not integers, do not have `num_images` rows, or if an image has a neighbour that does not
            exist, is the image itself, or occurs twice.
    """
    array = neighbours.detach().cpu().numpy() if isinstance(neighbours, Tensor) else np.asarray(neighbours)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "iu":
        raise ValueError(
            f"neighbours must be integers of shape (images, ranked neighbours). Got {array.dtype} of shape "
            f"{array.shape}. Use the output of nearest_neighbours."
        )
    count = len(array)
    remedy = "Create them again for this data set with `captionrl bags --mode neighbours`."
    if num_images is not None and count != num_images:
        raise ValueError(f"There are neighbours of {count} images, but the data set has {num_images}. {remedy}")
    ordered = np.sort(array, axis=1)
    faults = {
        f"contains a row outside the data set of {count} images": ((array < 0) | (array >= count)).any(axis=1),
        "contains the image itself": (array == np.arange(count)[:, None]).any(axis=1),
        "contains an image twice": (ordered[:, 1:] == ordered[:, :-1]).any(axis=1),
    }
    for fault, where in faults.items():
        if where.any():
            row = int(np.argmax(where))
            raise ValueError(f"neighbours[{row}] {fault} ({int(where.sum())} such rows). {remedy}")
    return array


def training_bags(
    neighbours: Any,
    bag_size: int,
    *,
    seed: int = 0,
    order: Sequence[int] | np.ndarray | None = None,
    features: Any = None,
    top: int = TOP_NEIGHBOURS,
    check: bool = True,
) -> Tensor:
    """Disjoint bags of a query and the nearest images that are not yet in a bag (B.2); N mod K images are left out.

    Images whose `top` neighbours are all in other bags (0.3 % of COCO with bags of 2, 3 % with bags of 20) come last.
    They get the nearest free images: exact with `features`, otherwise approximated through neighbours of neighbours.
    The paper says that each image is seen once per epoch, but not how; without this pass, leftovers would not be seen.

    Args:
        neighbours (array or tensor of shape `(N, k)`): Ranked neighbours, from [`nearest_neighbours`].
        bag_size: K, from 1 (plain shuffling) to k + 1.
        seed: Seed of the order of the queries.
        order (sequence of `N` integers, *optional*): Order of the queries, a permutation of the images.
        features (array or tensor of shape `(N, D)`, *optional*): The features of the neighbours, for the leftovers.
        top: Number of neighbours to use, of the k.
        check: Whether to check the neighbours; False if they have already been checked.

    Returns:
        `torch.Tensor` of shape `(N // K, K)`: int64 rows: the query, then the other images, nearest first. Bags of
        leftovers are last.

    Raises:
        ValueError: If the neighbours are invalid, `order` is not a permutation, or the bag is larger than the data set
            or than the neighbours can fill.
    """
    array = check_neighbours(neighbours) if check else np.asarray(neighbours)
    count, width = len(array), min(array.shape[1], top)
    if not 1 <= bag_size <= count:
        raise ValueError(f"bag_size is {bag_size}, but must be between 1 and {count}, the number of images.")
    if bag_size - 1 > width:
        raise ValueError(
            f"Bags of {bag_size} need {bag_size - 1} ranked neighbours per image, but there are {width}. Use smaller "
            f"bags, or more neighbours (the paper: {TOP_NEIGHBOURS})."
        )
    if order is None:
        queries = np.random.default_rng(seed).permutation(count)
    else:
        queries = np.asarray(order)
        if queries.shape != (count,) or not np.array_equal(np.sort(queries), np.arange(count)):
            raise ValueError(f"order must contain each of the {count} images once. Omit it to draw it from seed.")
    if features is not None and len(features) != count:
        raise ValueError(
            f"There are features of {len(features)} images, but neighbours of {count}. Use those of the same data set."
        )
    if bag_size == 1:
        return torch.from_numpy(queries.astype(np.int64))[:, None]
    free = bytearray(b"\x01") * count
    bags: np.ndarray = np.empty((count // bag_size, bag_size), np.int64)
    number = 0
    for bag in _fill(array[:, :width], _numbers(queries), bag_size, free):
        bags[number], number = bag, number + 1
    left = [image for image in _numbers(queries) if free[image]]
    for bag in _near_by_graph(array, left, bag_size, free) if features is None else _near(features, left, bag_size):
        bags[number], number = bag, number + 1
    return torch.from_numpy(bags[:number])


def _numbers(array: np.ndarray) -> Iterator[int]:
    """The integers of an array, of which few are Python objects at a time."""
    for start in range(0, len(array), _AT_ONCE):
        yield from array[start : start + _AT_ONCE].tolist()


def _fill(neighbours: np.ndarray, order: Iterable[int], bag_size: int, free: bytearray) -> Iterator[list[int]]:
    """Bags of free queries, in order, that their free neighbours can fill; updates `free`."""
    for query in order:
        if not free[query]:
            continue
        bag = [query]
        for other in neighbours[query].tolist():  # converting all rows at once would take a gigabyte
            if free[other]:
                bag.append(other)
                if len(bag) == bag_size:
                    break
        else:
            continue
        for image in bag:
            free[image] = 0
        yield bag


def _near(features: Any, left: list[int], bag_size: int) -> Iterator[list[int]]:
    """Bags of leftovers by their similarity, in rounds: images whose nearest 200 are taken wait for the next round."""
    while len(left) >= bag_size:
        ranked, _ = nearest_neighbours(features[left], min(max(TOP_NEIGHBOURS, bag_size - 1), len(left) - 1))
        inside = bytearray(b"\x01") * len(left)
        for bag in _fill(ranked.numpy(), range(len(left)), bag_size, inside):
            yield [left[i] for i in bag]
        left = [image for i, image in enumerate(left) if inside[i]]


def _near_by_graph(neighbours: np.ndarray, left: list[int], bag_size: int, free: bytearray) -> Iterator[list[int]]:
    """Bags of leftovers: free neighbours first, then neighbours of neighbours by the sum of both ranks, then any."""
    state = np.frombuffer(free, dtype=np.uint8)
    width = min(neighbours.shape[1], TOP_NEIGHBOURS)
    by_sum = np.add.outer(np.arange(width), np.arange(width)).ravel().argsort(kind="stable")
    others = iter(left)
    remaining = len(left)
    for query in left:
        if remaining < bag_size:
            return
        if not free[query]:
            continue
        own = neighbours[query]
        further = neighbours[own[:width], :width].ravel()[by_sum]
        near = np.concatenate([own[state[own] == 1], further[state[further] == 1]])
        bag = list(dict.fromkeys([query, *near.tolist()]))[:bag_size]
        while len(bag) < bag_size:
            # Images skipped here are already in a bag, possibly this one, so none is lost.
            other = next(others)
            if free[other] and other not in bag:
                bag.append(other)
        for image in bag:
            free[image] = 0
        remaining -= bag_size
        yield bag
