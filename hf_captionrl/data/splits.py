"""Splits of a data set: parsing of requested splits, joining, and dividing by the hash of the image ids."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping

import datasets
import numpy as np
import pyarrow as pa

from hf_captionrl.data.arrow_columns import arrow_column, id_column, select_rows
from hf_captionrl.data.caption_columns import merge_rows_of_one_image, replace_column, undecoded, with_split
from hf_captionrl.data.raw_splits import SPLIT_NAMES
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = ["ALL", "SPLITS", "carve_missing", "hash_split", "join_splits", "parse_split", "tell_splits_apart"]

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
"""The splits that every recipe uses."""

ALL = "all"
"""Name for all splits together."""

# Enough to detect different images with the same ids, without reading all images.
_OVERLAP_PROBES = 100


def parse_split(split: str) -> tuple[str, ...]:
    """Parse `--split` and `split=`: a split, several (`"validation+test"`), or `"all"`."""
    names = [name.strip() for name in split.split("+")]
    if names == [ALL]:
        return ()
    # Karpathy's restval is a part of train, not another name for it.
    names = [name if name == "restval" else SPLIT_NAMES.get(name, name) for name in names]
    if not all(names):
        raise ValueError(f"split is {split!r}, which has an empty name. Use a split, 'validation+test', or 'all'.")
    if ALL in names or len(set(names)) < len(names):
        raise ValueError(f"split is {split!r}, which has images twice. Name each split once, or only 'all'.")
    return tuple(names)


def join_splits(splits: Mapping[str, datasets.Dataset], names: Iterable[str], where: str) -> datasets.Dataset:
    """Several splits as one data set."""
    names = list(names) or list(splits)
    for name in names:
        if name not in splits:
            raise ValueError(
                f"{where} has no split {name!r}; it has {list(splits)}. Use one of them, several ('a+b') or 'all'."
            )
    if len(names) == 1:
        return with_split(splits[names[0]], names[0])
    parts = [splits[name] for name in names]
    # If one split has addresses among its paths, no image is decoded on access.
    if not all(getattr(part.features["image"], "decode", False) for part in parts):
        parts = [undecoded(part) for part in parts]
    different = {
        column
        for one, other in itertools.combinations(parts, 2)
        for column in set(one.column_names) & set(other.column_names)
        if one.features[column] != other.features[column]
    }
    if different:
        logger.warning("%s: the columns %s differ between splits and are left out.", where, sorted(different))
    parts = [part.remove_columns([name for name in part.column_names if name in different]) for part in parts]
    joined = datasets.concatenate_datasets(parts)
    return with_split(merge_rows_of_one_image(joined, where), "+".join(names))


def hash_split(ds: datasets.Dataset, fractions: dict[str, float], *, seed: int = 0) -> dict[str, datasets.Dataset]:
    """Divide a data set by the hash of its image ids.

    Images are ranked by hash and divided at the fractions: sizes are exact, the order of the rows does not matter, and
    adding images moves only those near the boundaries. A fraction above 0 gets at least one image, if there are enough.

    Args:
        ds (`datasets.Dataset`): Data set with unique `image_id`s.
        fractions (`dict[str, float]`): Share of each part in [0, 1], with sum 1. The first above 0 gets the remainder.
        seed (`int`): Seed of the hash.

    Returns:
        `dict[str, datasets.Dataset]`: The parts that are not empty, with rows in their original order.

    Raises:
        ValueError: If the fractions are not in [0, 1] or do not add up to 1.
    """
    _check_fractions(fractions)

    order = np.lexsort(_hash_ranks(ds, seed).T[::-1])
    names = [name for name, share in fractions.items() if share > 0]
    parts = {}
    start = 0
    for name in reversed(names[1:]):
        size = min(round(fractions[name] * len(ds)) or 1, max(0, len(order) - start - 1))
        parts[name] = order[start : start + size]
        start += size
    parts[names[0]] = order[start:]
    return {name: select_rows(ds, np.sort(parts[name])) for name in names if len(parts[name])}


def _hash_ranks(ds: datasets.Dataset, seed: int) -> np.ndarray:
    """16 bytes per row that depend on the id and the seed, as a higher and a lower number: `(N, 2)`."""
    ranks: np.ndarray = np.empty((len(ds), 2), ">u8")
    for row, image_id in enumerate(id_column(ds)):
        digest = hashlib.blake2b(f"{seed}/{image_id}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        ranks[row] = np.frombuffer(digest, ranks.dtype)
    return ranks


def _check_fractions(fractions: dict[str, float]) -> None:
    if not all(0 <= share <= 1 for share in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"Split fractions {fractions} must be in [0, 1] and add up to 1. Correct split_fractions.")


def carve_missing(
    splits: dict[str, datasets.Dataset], fractions: tuple[float, float, float], seed: int, where: str
) -> dict[str, datasets.Dataset]:
    """Split missing `validation` and `test` splits off `train`, and log the sizes; `fractions` has all three shares."""
    shares = dict(zip(SPLITS, fractions, strict=True))
    missing = [name for name in SPLITS[1:] if name not in splits]
    if "train" not in splits or not any(shares[name] for name in missing):
        return splits
    _check_fractions(shares)
    wanted = {name: shares[name] for name in missing}
    # The share of an existing split stays in train.
    train = shares["train"] + sum(shares[name] for name in SPLITS[1:] if name not in missing)
    used = {"train": train, **wanted}
    parts = hash_split(splits["train"], used, seed=seed)
    logger.warning(
        "%s has no split %s: its %d images are divided by the hash of image_id (seed %d) into %s.",
        *(where, " and ".join(missing), len(splits["train"]), seed),
        ", ".join(f"{len(part)} {name} ({used[name]:.3g})" for name, part in parts.items()),
    )
    # With a share of 0 nothing is left in train.
    return {**{name: split for name, split in splits.items() if name != "train"}, **parts}


def tell_splits_apart(splits: dict[str, datasets.Dataset], where: str) -> dict[str, datasets.Dataset]:
    """Make ids unique over the splits: cached features and reports identify images by id only."""
    ids = {name: id_column(ds) for name, ds in splits.items()}
    lookups = {name: RowLookup(column) for name, column in ids.items()}
    shared = {}
    for one, other in itertools.combinations(splits, 2):
        rows = lookups[other].rows(ids[one])  # (N,) row in `other` of each row of `one`
        if len(common := np.flatnonzero(rows >= 0)):
            probes = common[:_OVERLAP_PROBES]
            shared[one, other] = len(common), list(zip(probes.tolist(), rows[probes].tolist(), strict=True))
    for (one, other), (number, pairs) in shared.items():
        left, right = (undecoded(splits[name]).select_columns("image") for name in (one, other))
        if any(left[row] != right[same] for row, same in pairs):
            logger.warning("%s: splits use the same ids for different images; image_id becomes '<split>/<id>'.", where)
            return {
                name: replace_column(
                    ds,
                    "image_id",
                    arrow_column((f"{name}/{i}" for i in ids[name]), pa.string()),
                    datasets.Value("string"),
                )
                for name, ds in splits.items()
            }
        logger.warning(
            "%s: %d images are in %s and in %s (%s, ...): results on one split include images of the other.",
            *(where, number, one, other, ids[one][pairs[0][0]]),
        )
    return splits
