"""Images besides the test split that a caption is ranked among: a pool, and bags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data.arrow_columns import id_column
from hf_captionrl.data.retrieval_benchmarks import coco_id, load_hard_pool, load_published_bags, match_coco_ids
from hf_captionrl.retrieval.bag_files import load_bags
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = ["bags_and_images", "joined_images", "pool_images", "read_bags"]


def joined_images(splits: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Images and ids of several splits, one after the other."""
    return datasets.concatenate_datasets([rows.select_columns(["image", "image_id"]) for rows in splits])


def pool_images(path: Path, test: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """The test images, followed by the other images of a pool such as CapEnrich's."""
    wanted = set(load_hard_pool(path))
    # Of the other images nothing is kept.
    found = wanted.intersection(map(coco_id, id_column(test)))
    more = []
    for row, image_id in enumerate(id_column(others)):
        number = coco_id(image_id)
        if number in wanted and number not in found:
            more.append(row)
            found.add(number)
    missing = sorted(wanted - found, key=int)
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(wanted)} images of {path} are not in the data set, such as COCO image {missing[0]}. "
            "Use a data set with all images of the pool (all splits of COCO)."
        )
    return joined_images([test, others.select(more)])


def bags_and_images(
    path: Path, test: datasets.Dataset, others: datasets.Dataset | None
) -> tuple[dict[int, list[list[int]]], datasets.Dataset | None]:
    """Bags as rows of the test split followed by other images, and these images.

    `others` may be the validation split; TrueMatch's bags are of both.
    """
    parts = [rows.select_columns("image_id") for rows in (test, others) if rows is not None]
    number = len(test)
    bags = read_bags(path, id_column(datasets.concatenate_datasets(parts)))
    used = sorted({row - number for group in bags.values() for bag in group for row in bag if row >= number})
    if not used or others is None:
        return bags, None
    place = {row + number: at + number for at, row in enumerate(used)}
    bags = {size: [[place.get(row, row) for row in bag] for bag in group] for size, group in bags.items()}
    return bags, others.select(used)


def read_bags(path: Path, ids: Sequence[str]) -> dict[int, list[list[int]]]:
    """Bags as rows of images with these ids."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r} with bags. Use a file of `captionrl bags`.")
    if path.is_dir():
        return _rows_of_bags(match_coco_ids(load_published_bags(path), ids), RowLookup(ids))
    if path.suffix == ".parquet":
        return load_bags(path, image_ids=ids).rows(ids)
    shape = f'{path} must hold bags of `captionrl bags`, or {{"3": [["id", "id", "id"], ...]}}, lists by their size'
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{shape}; it is not JSON ({error}).") from None
    if isinstance(value, dict) and "bags" in value:
        return load_bags(path, image_ids=ids).rows(ids)
    if not isinstance(value, dict) or not all(
        size.isdigit() and isinstance(bags, list) and all(isinstance(bag, list) for bag in bags)
        for size, bags in value.items()
    ):
        raise ValueError(f"{shape}.")
    lookup = RowLookup(ids)
    return _rows_of_bags(_checked_bags(path, value, lookup), lookup)


def _rows_of_bags(bags: Mapping[int, list[list[str]]], lookup: RowLookup) -> dict[int, list[list[int]]]:
    rows = iter(lookup.rows([i for group in bags.values() for bag in group for i in bag]).tolist())
    return {size: [list(islice(rows, len(bag))) for bag in group] for size, group in bags.items()}


def _checked_bags(path: Path, value: Mapping[str, Any], lookup: RowLookup) -> dict[int, list[list[str]]]:
    found: dict[int, list[list[str]]] = {}
    strange = set(lookup.missing([str(i) for bags in value.values() for bag in bags for i in bag]))
    for size, bags in value.items():
        for number, bag in enumerate(bags):
            names = [str(i) for i in bag]
            if unknown := [name for name in names if name in strange]:
                raise ValueError(
                    f"{path}: bag {number} of size {size} holds image {unknown[0]!r}, which is not used here."
                )
            if not len(names) == len(set(names)) == int(size):
                raise ValueError(
                    f"{path}: bag {number} of size {size} holds {len(names)} images, {len(set(names))} different."
                )
            found.setdefault(int(size), []).append(names)
    return found
