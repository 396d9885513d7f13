"""Bags of similar images: candidates, TrueMatch's curation, disjoint bags for training; files of bags and of neighbours.

Reference: No Detail Left Behind, Algorithms 1 and 2 and section B.2.
Legend: N images, D features, k ranked neighbours per image, K images per bag, T bags.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.retrieval.neighbours import nearest_neighbours, normalised
from hf_captionrl.utils.io import atomic_write_bytes, write_json

TOP_NEIGHBOURS = 200
"""Number of ranked neighbours from which training bags are filled (B.2)."""
_REMEDY = "Create it again with `captionrl bags`."


def candidate_bags(
    features: Any,
    bag_size: int,
    *,
    block_size: int | None = None,
    device: str | torch.device | None = None,
    concepts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """One bag per image: the image and the K - 1 most similar ones (Algorithm 1). Bags overlap.

    Args:
        features (array or tensor of shape `(N, D)`): From [`multimodal_features`], or features of the images alone.
        bag_size: K, from 2 to N.
        block_size: Images per block of the product, see [`nearest_neighbours`].
        device: Device of the products.
        concepts: See [`nearest_neighbours`].
    Returns:
        `tuple`: int64 bags of shape `(N, K)`, the query first, and their float32 similarities of shape `(N,)`: the mean
        cosine similarity between the query and the other images.
    """
    settings: dict[str, Any] = {"block_size": block_size, "device": device, "concepts": concepts}
    indices, similarities = nearest_neighbours(features, bag_size - 1, **settings)
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
    """
    rows, scores = torch.as_tensor(bags), torch.as_tensor(similarities)
    order = scores.argsort(descending=True, stable=True)
    visited: set[int] = set()
    kept = []
    for place, bag in zip(order.tolist(), rows[order].tolist(), strict=True):
        if visited.isdisjoint(bag):
            visited.update(bag)
            kept.append(place)
    return rows[kept].long(), scores[kept]


def bag_similarities(features: Any, bags: Any) -> Tensor:
    """`(T,)` mean cosine similarity between the first image of a bag and the others, float32 in [-1, 1].

    `features` `(N, D)` are those of the images; `bags` `(T, K)` rows of images, the query first.
    """
    unit = normalised(features).cpu()
    rows = torch.as_tensor(bags).long()
    # mean_k <q, x_k> = <q, mean_k x_k>. In parts, because all bags at once would copy all features.
    parts = [(unit[part[:, 0]] * unit[part[:, 1:]].mean(dim=1)).sum(dim=1) for part in rows.split(1024)]
    return torch.cat(parts).clamp(-1.0, 1.0) if parts else torch.empty(0)


def check_neighbours(neighbours: Any, num_images: int | None = None) -> np.ndarray:
    """Ranked neighbours `(N, k)` as an array, most similar first; raises ValueError if they are not of `num_images` images."""
    array = neighbours.detach().cpu().numpy() if isinstance(neighbours, Tensor) else np.asarray(neighbours)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "iu":
        raise ValueError(
            f"neighbours must be integers of shape (images, ranked neighbours), not {array.dtype} of shape {array.shape}. Use the "
            "output of nearest_neighbours."
        )
    count = len(array)
    if num_images not in (None, count):
        raise ValueError(f"There are neighbours of {count} images, but the data set has {num_images}. {_REMEDY}")
    ordered = np.sort(array, axis=1)
    faults = {
        f"contains a row outside the data set of {count} images": ((array < 0) | (array >= count)).any(axis=1),
        "contains the image itself": (array == np.arange(count)[:, None]).any(axis=1),
        "contains an image twice": (ordered[:, 1:] == ordered[:, :-1]).any(axis=1),
    }
    for fault, where in faults.items():
        if where.any():
            raise ValueError(f"neighbours[{np.argmax(where)}] {fault} ({int(where.sum())} such rows). {_REMEDY}")
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
    """
    array = check_neighbours(neighbours) if check else np.asarray(neighbours)
    count, width = len(array), min(array.shape[1], top)
    if not 1 <= bag_size <= count:
        raise ValueError(f"bag_size is {bag_size}, but must be between 1 and {count}, the number of images.")
    if bag_size - 1 > width:
        raise ValueError(
            f"Bags of {bag_size} need {bag_size - 1} ranked neighbours per image, but there are {width}. Use smaller bags, or more "
            f"neighbours (the paper: {TOP_NEIGHBOURS})."
        )
    queries = np.random.default_rng(seed).permutation(count) if order is None else np.asarray(order)
    if bag_size == 1:
        return torch.from_numpy(queries.astype(np.int64))[:, None]
    free = bytearray(b"\x01") * count
    bags: np.ndarray = np.empty((count // bag_size, bag_size), np.int64)
    number = 0
    for bag in _fill(array[:, :width], map(int, queries), bag_size, free):
        bags[number], number = bag, number + 1
    left = queries[np.frombuffer(free, np.uint8)[queries] == 1].tolist()
    for bag in _near_by_graph(array, left, bag_size, free) if features is None else _near(features, left, bag_size):
        bags[number], number = bag, number + 1
    return torch.from_numpy(bags[:number])


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


# --- Files, with image ids (not row numbers) and the signature of the scorer -----------------------------------------

Features = Literal["image", "multimodal", "concatenated"]
"""Features that define the similarity: of the images alone, or of images and captions."""


@dataclass(frozen=True)
class BagFile:
    """Bags and their provenance; `"truematch"` and `"training"` bags of the same size are disjoint, `"candidates"` may overlap."""

    bags: list[list[str]]  # image ids, of any sizes; the first image of a bag is the query
    similarities: list[float]  # mean cosine similarity between the query and the other images, one per bag
    signature: str  # of the scorer, `model@revision|...`
    features: str = "multimodal"  # that define the similarity, one of `Features`
    kind: str = "truematch"

    def rows(self, image_ids: Sequence[Any], name: str = "The bag file") -> dict[int, list[list[int]]]:
        """The bags as rows of a data set, whose ids are given, by size: as `bag_ranks` and the metrics expect them."""
        row_of = _unique(image_ids)
        if unknown := row_of.missing([image_id for bag in self.bags for image_id in bag]):
            raise ValueError(
                f"{name} contains image {unknown[0]!r}, which is not in the data set of {len(row_of)} images. {_REMEDY}"
            )
        bags: dict[int, list[list[int]]] = {}
        for bag in self.bags:
            bags.setdefault(len(bag), []).append([row_of[image_id] for image_id in bag])
        return bags


@dataclass(frozen=True)
class NeighbourFile:
    """Ranked neighbours and their provenance."""

    indices: Tensor  # (N, k) int64 rows, most similar first
    similarities: Tensor  # (N, k) their cosine similarities, float32
    image_ids: Sequence[str] = field(repr=False)  # of each row
    signature: str  # of the scorer, `model@revision|...`
    features: str = "multimodal"  # that define the similarity, one of `Features`


def save_bags(path: str | Path, file: BagFile) -> Path:
    """Write bags as JSON.

    Args:
        path: Output path, ending in .json.
        file: The bags.
    Returns:
        `Path`: The path written.
    """
    _check_bag_file(file, str(path))
    head = {name: getattr(file, name) for name in ("kind", "features", "signature")}
    bags = zip(file.bags, file.similarities, strict=True)
    return write_json(Path(path), {**head, "bags": [{"image_ids": bag, "similarity": score} for bag, score in bags]})


def load_bags(path: str | Path, *, image_ids: Sequence[Any] | None = None, signature: str | None = None) -> BagFile:
    """Read bags, and check that they belong to the data set and the scorer.

    Args:
        path: File from [`save_bags`].
        image_ids: Ids of the data set.
        signature: Expected `Scorer.signature`, or its first part `model@revision`.
    Returns:
        `BagFile`: The bags.
    """
    path = _existing(path, "captionrl bags")
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        bags = [[str(i) for i in row["image_ids"]] for row in head["bags"]]
        scores = [float(row["similarity"]) for row in head["bags"]]
        file = BagFile(bags, scores, head["signature"], head["features"], head["kind"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ValueError(f"{path} is not a bag file ({type(error).__name__}: {error}). {_REMEDY}") from error
    _check_bag_file(file, str(path))
    _check_signature(file.signature, signature, str(path))
    if image_ids is not None:
        file.rows(image_ids, str(path))
    return file


def save_neighbours(path: str | Path, file: NeighbourFile) -> Path:
    """Write ranked neighbours as safetensors.

    Args:
        path: Output path, ending in .safetensors.
        file: The neighbours.
    Returns:
        `Path`: The path written.
    """
    from safetensors.torch import save

    check_neighbours(file.indices, len(file.image_ids))
    _unique(file.image_ids)
    # Ids are bytes of a tensor, because a safetensors header is limited to 100 MB, a few million ids.
    names = bytearray(json.dumps(list(map(str, file.image_ids))).encode("ascii"))
    tensors = {
        "indices": file.indices.int().contiguous(),
        "similarities": file.similarities.float().contiguous(),
        "image_ids": torch.frombuffer(names, dtype=torch.uint8),
    }
    return atomic_write_bytes(
        Path(path), save(tensors, metadata={"signature": file.signature, "features": file.features})
    )


def load_neighbours(
    path: str | Path, *, image_ids: Sequence[Any] | None = None, signature: str | None = None
) -> NeighbourFile:
    """Read ranked neighbours in the order of a data set.

    Args:
        path: File from [`save_neighbours`].
        image_ids: Ids of the data set; if it has the same images in another order, rows are renumbered.
        signature: Expected `Scorer.signature`, or its first part `model@revision`.
    Returns:
        `NeighbourFile`: The neighbours.
    """
    from safetensors import SafetensorError, safe_open

    path = _existing(path, "captionrl bags --mode neighbours")
    try:
        with safe_open(path, framework="pt") as opened:
            head = opened.metadata() or {}
            indices, similarities = opened.get_tensor("indices").long(), opened.get_tensor("similarities")
            names = json.loads(opened.get_tensor("image_ids").numpy().tobytes())
        scorer, features = head["signature"], head["features"]
    except (KeyError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path} is not a neighbour file ({type(error).__name__}: {error}). {_REMEDY}") from error
    _check_signature(scorer, signature, str(path))
    check_neighbours(indices, len(names))
    if image_ids is not None:
        lookup = _unique(image_ids)
        to = torch.from_numpy(lookup.rows(names))  # row of the data set of each row of the file
        unknown = (to < 0).nonzero()
        if len(unknown) or len(names) != len(lookup):
            which = f"image {names[int(unknown[0])]!r} is not in the data set" if len(unknown) else "some are missing"
            raise ValueError(
                f"{path} has neighbours of {len(names)} images, but the data set has {len(lookup)} images: {which}. {_REMEDY}"
            )
        order = to.argsort()
        indices, similarities, names = to[indices][order], similarities[order], [names[i] for i in order.tolist()]
    return NeighbourFile(indices, similarities, names, scorer, features)


def _unique(image_ids: Sequence[Any]) -> RowLookup:
    """Rows by id; refuses ids that occur twice."""
    ids = list(map(str, image_ids))
    if len(lookup := RowLookup(ids)) < len(ids):
        twice = next(image_id for row, image_id in enumerate(ids) if lookup[image_id] != row)
        raise ValueError(f"image_ids contains {twice!r} twice, but bags need unique ids.")
    return lookup


def _existing(path: str | Path, command: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Create it with `{command}`.")
    return Path(path)


def _check_signature(found: str, expected: str | None, name: str) -> None:
    if expected is not None and found != expected and not (expected and found.startswith(f"{expected}|")):
        raise ValueError(f"{name} was created with features of {found!r}, but the scorer is {expected!r}. {_REMEDY}")


def _check_bag_file(file: BagFile, name: str) -> None:
    if not file.bags or len(file.bags) != len(file.similarities):
        raise ValueError(
            f"{name} has {len(file.bags)} bags and {len(file.similarities)} similarities. Use at least one bag, and one each."
        )
    seen: set[tuple[int, str]] = set()
    for number, bag in enumerate(file.bags):
        pairs = {(len(bag), image_id) for image_id in bag}
        if len(bag) < 2 or len(pairs) < len(bag):
            # A copy would be a distractor of its image.
            raise ValueError(f"{name}: bag {number} is {bag}. Use at least 2 images per bag, each once.")
        if file.kind != "candidates" and (twice := seen & pairs):
            raise ValueError(
                f"{name}: image {min(twice)[1]!r} is in bag {number} and in another one of its size. Bags that overlap are of kind "
                f"'candidates', not {file.kind!r}."
            )
        seen |= pairs
