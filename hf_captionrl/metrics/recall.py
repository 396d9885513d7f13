"""Self-retrieval: does a caption retrieve its target?

Legend: N captions, M images of the pool, P ranked (caption, bag) pairs, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.metrics.bootstrap import proportion_interval, signature
from hf_captionrl.retrieval.ranking import (
    as_features,
    bag_ranks,
    check_bag,
    check_features,
    check_targets,
    concept_numbers,
    distractor_recall,
    duplicate_images,
    num_concepts,
    ranks,
    sampled_ranks,
    set_ranks,
    unit_rows,
)


def self_retrieval(
    text_features: Any,
    image_features: Any,
    *,
    targets: Any = None,
    bags: Sequence[Sequence[int]] | None = None,
    sets: Sequence[Sequence[int]] | None = None,
    num_distractors: int | None = None,
    protocol: Literal["expected", "blocks", "sampled"] = "expected",
    ks: Sequence[int] = (1, 5, 10),
    seed: int = 0,
    repeats: int = 1,
    duplicates: Literal["count", "merge"] = "count",
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
    block_size: int | None = None,
    pool_ranks: Any = None,
    concepts: Sequence[Any] | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""Recall at k, mean and median rank of each caption's target.

    Reference: the pool of SMILE, RD100 of DiscriTune and No Detail Left Behind, TrueMatch of the latter, ImageCoDe.
    With n random distractors the default is the exact expectation: if b of the M - 1 other images rank higher,
    `recall_at_1 = mean C(M-1-b, n) / C(M-1, n)`, which needs no seed.
    Differs from them by: ties always count against the caption (a tie at rank 1 is not a success).

    Args:
        text_features (array or tensor of shape `(N, D)`): Features of the captions, scaled to unit length here.
        image_features (array or tensor of shape `(M, D)`): Features of the pool, of the same dtype.
        targets (sequence of `N` integers): Image row of each caption; `None`: caption i belongs to image i.
        bags: Lists of image rows; each caption is ranked within the bag of its image (TrueMatch).
        sets: Candidate rows of each caption, the target among them (ImageCoDe).
        num_distractors: Number n of random distractors from the pool per caption; 99 gives RD100. `None`: the whole pool.
        protocol: With `num_distractors`: `"expected"` (closed form), `"blocks"` (consecutive blocks of n + 1 images,
            an incomplete last block is dropped, as in the papers) or `"sampled"` (drawn `repeats` times for each caption).
        ks: Values of k.
        seed: Seed of `"sampled"`.
        repeats: Draws per caption of `"sampled"`.
        duplicates: `"count"` images with equal features, or `"merge"` them into one.
        num_bootstrap: 0: no intervals. These (see [`proportion_interval`]) are over images or bags, and need no resamples.
        confidence: Coverage of the intervals.
        block_size: Captions ranked at once; `None`: blocks of scores of about 64 MiB.
        pool_ranks (sequence of `N` integers): Rank of each target in the whole pool, if known, from
            [`hf_captionrl.retrieval.ranking.ranks`] of features of unit length; `None`: they are computed.
        concepts (sequence of `M` values, *optional*): What each image shows, such as a product number. A caption then
            retrieves any image of its target's concept among other concepts, each ranked by its best image; the pool,
            distractors and intervals are those of concepts. An image whose value is None or "" is its own concept.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: `recall_at_<k>` in [0, 1], with `recall_at_<k>_ci` (low, high) and the name of its
        method, `recall_at_<k>_ci_method`; `per_sample`, the values of each `recall_at_<k>` for [`paired_test`]; `mean_rank`, `median_rank`; `ranks`, an int array of ranks in the pool, bag, set or block
        (for `"expected"` in the whole pool, and mean and median are those of the expected ranks); `captions` and `groups`,
        the caption and the image (with `bags`: the bag) of each rank; `num_captions`, `pool_size`, `num_duplicate_images`,
        `signature`.

    Example:
        >>> result = self_retrieval([[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]], num_bootstrap=0, ks=(1,))
        >>> result["recall_at_1"], result["ranks"].tolist()
        (1.0, [1, 1])
    """
    if sum(option is not None for option in (bags, sets, num_distractors)) > 1:
        raise ValueError("bags, sets and num_distractors are different protocols. Pass only one of them.")
    if pool_ranks is not None and (bags or sets or protocol == "blocks" or duplicates == "merge"):
        raise ValueError("pool_ranks are ranks among all images, and this protocol has others. Leave pool_ranks out.")
    if protocol not in ("expected", "blocks", "sampled") or duplicates not in ("count", "merge"):
        options = f"protocol {protocol!r} and duplicates {duplicates!r}"
        raise ValueError(f"{options}: use 'expected', 'blocks' or 'sampled', and 'count' or 'merge'.")
    if not ks or any(not isinstance(k, int) or not 0 < k < 2**31 for k in ks):
        raise ValueError(f"ks must be positive integers below 2**31, got {tuple(ks)}.")

    text = as_features(text_features, "text_features")
    images = as_features(image_features, "image_features")
    dtype = str(text.dtype).removeprefix("torch.")
    if text.dtype != images.dtype:
        raise ValueError(
            f"text_features are {dtype} and image_features {images.dtype}. Both should come from one scorer."
        )
    target_ranks = None if pool_ranks is None else torch.as_tensor(pool_ranks).long().cpu()  # (N,) if known
    if target_ranks is not None and target_ranks.shape != (len(text),):
        raise ValueError(f"pool_ranks must be {len(text)} ranks, one per caption.")
    scaled = unit_rows if target_ranks is None else check_features  # known ranks need no copies of unit length
    text, images = scaled(text, "text_features"), scaled(images, "image_features")
    owners = check_targets(targets, len(text), len(images))
    if concepts is not None and len(concepts) != len(images):
        raise ValueError(f"There are {len(images)} images but {len(concepts)} concepts. Pass one per image.")
    of_image = None if concepts is None else concept_numbers(concepts)
    if of_image is not None and (sets is not None or protocol == "blocks" or duplicates == "merge"):
        raise ValueError(
            "concepts are for the pool, random distractors and bags. Leave concepts out, or the other option."
        )
    first = duplicate_images(images, unit=target_ranks is not None)
    num_duplicates = int((first != torch.arange(len(first))).sum())
    if duplicates == "merge" and num_duplicates:
        kept, row = torch.unique(first, return_inverse=True)
        bags, sets = _renumbered(bags, row, "bags"), _renumbered(sets, row, "sets")
        images, owners, first = images[kept.to(images.device)], row[owners], torch.arange(len(kept))

    number = num_concepts(len(images), of_image)
    captions = torch.arange(len(text))  # (P,) caption of each rank, and its image, concept or bag
    groups = owners if of_image is None else torch.tensor(of_image)[owners]
    chances: dict[int, Tensor] = {}  # by k, the chance of a rank of at most k, if it is not 0 or 1
    expected = None  # (P,) ranks whose mean and median are reported; None: the ranks
    if bags is not None:
        if of_image is not None and any(len({of_image[row] for row in bag}) < len(bag) for bag in bags):
            raise ValueError("A bag has two images of one concept. Mine bags with `captionrl bags --concept_column`.")
        target_ranks, captions, groups = bag_ranks(text, images, bags, owners, duplicate_of=first)
        variant = f"bags-{_sizes(bags)}"
    elif sets is not None:
        target_ranks = set_ranks(text, images, sets, owners, duplicate_of=first)
        variant = f"sets-{_sizes(sets)}"
    elif num_distractors is not None and protocol == "blocks":
        variant = f"rd{num_distractors + 1}-blocks"
        blocks = _blocks(num_distractors + 1, len(images), owners)
        target_ranks, captions, _ = bag_ranks(text, images, blocks, owners, duplicate_of=first)
        groups = owners[captions]
    else:
        variant = "pool" if num_distractors is None else f"rd{num_distractors + 1}-{protocol}"
        if target_ranks is None:
            target_ranks = ranks(text, images, owners, block_size=block_size, duplicate_of=first, concepts=of_image)
        if num_distractors is not None and protocol == "sampled":
            variant += f"-{repeats}-seed-{seed}"
            draws: dict[str, int] = {"num_distractors": num_distractors, "repeats": repeats, "seed": seed}
            target_ranks = sampled_ranks(target_ranks, number, **draws).flatten()
            captions, groups = captions.repeat(repeats), groups.repeat(repeats)
        elif num_distractors is not None:
            for k in ks:
                chances[k] = distractor_recall(target_ranks, number, k=k, num_distractors=num_distractors)
            # If b of the M - 1 others are better, n b / (M - 1) of the n drawn ones are expected to be.
            expected = 1 + (target_ranks.double() - 1) * num_distractors / (number - 1)
    expected = target_ranks.double() if expected is None else expected

    recalls = {f"recall_at_{k}": chances.get(k, (target_ranks <= k).double()).numpy() for k in ks}
    result: dict[str, Any] = {key: float(values.mean()) for key, values in recalls.items()}
    result["per_sample"] = recalls
    if num_bootstrap:
        for key, values in recalls.items():
            result[f"{key}_ci"] = proportion_interval(values, groups=groups.numpy(), confidence=confidence)
            result[f"{key}_ci_method"] = result[f"{key}_ci"].method
    counted = {"pool": number, "ties": "against", "duplicates": duplicates, "dtype": dtype}
    counted |= {} if of_image is None else {"images": len(images)}
    return result | {
        "mean_rank": float(expected.mean()),
        "median_rank": float(np.median(expected.numpy())),
        "ranks": target_ranks.numpy(),
        "captions": captions.numpy(),
        "groups": groups.numpy(),
        "num_captions": len(text),
        "pool_size": number,
        "num_duplicate_images": num_duplicates,
        "signature": signature(metric="self_retrieval", scorer=scorer, variant=variant, **counted),
    }


def _renumbered(lists: Sequence[Sequence[int]] | None, row: Tensor, name: str) -> list[list[int]] | None:
    """Bags or sets in rows of the merged pool, each image once."""
    checked = [check_bag(rows, f"{name}[{i}]", len(row)) for i, rows in enumerate(lists or ())]
    return None if lists is None else [list(dict.fromkeys(row[rows].tolist())) for rows in checked]


def _sizes(lists: Sequence[Sequence[int]]) -> str:
    return "-".join(map(str, sorted({len(rows) for rows in lists})))


def _blocks(size: int, pool_size: int, owners: Tensor) -> list[range]:
    """Consecutive images, `size` at a time; an incomplete last block is dropped."""
    if size > pool_size:
        raise ValueError(f"Blocks of {size} images do not fit into a pool of {pool_size}. Lower num_distractors.")
    whole = [range(start, start + size) for start in range(0, pool_size - size + 1, size)]
    lacking = torch.nonzero(torch.bincount(owners, minlength=pool_size)[: len(whole) * size] == 0)
    if len(lacking):
        raise ValueError(f"protocol='blocks' needs a caption of every image; image {int(lacking[0])} has none.")
    return whole
