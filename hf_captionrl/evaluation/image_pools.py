"""Images besides the test split that a caption is ranked among: a pool, and bags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data.retrieval_benchmarks import coco_id, load_hard_pool, load_published_bags, match_coco_ids
from hf_captionrl.retrieval.bag_files import load_bags

__all__ = ["bags_and_images", "joined_images", "pool_images", "read_bags"]


def _image_ids(rows: datasets.Dataset) -> list[str]:
    return [str(i) for i in rows["image_id"][:]]


def joined_images(splits: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Images and ids of several splits, one after the other."""
    return datasets.concatenate_datasets([rows.select_columns(["image", "image_id"]) for rows in splits])


def pool_images(path: Path, test: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """The test images, followed by the other images of a pool such as CapEnrich's."""
    wanted = set(load_hard_pool(path))
    own = {coco_id(i) for i in _image_ids(test)}
    more, found = [], set(own)
    for row, image_id in enumerate(_image_ids(others)):
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
    ids = _image_ids(test)
    more = [] if others is None else _image_ids(others)
    bags = read_bags(path, [*ids, *more])
    used = sorted({row - len(ids) for group in bags.values() for bag in group for row in bag if row >= len(ids)})
    if not used or others is None:
        return bags, None
    place = {row + len(ids): number + len(ids) for number, row in enumerate(used)}
    bags = {size: [[place.get(row, row) for row in bag] for bag in group] for size, group in bags.items()}
    return bags, others.select(used)


def read_bags(path: Path, ids: Sequence[str]) -> dict[int, list[list[int]]]:
    """Bags as rows of images with these ids."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r} with bags. Use a file of `captionrl bags`.")
    row = {image_id: number for number, image_id in enumerate(ids)}
    if path.is_dir():
        found = match_coco_ids(load_published_bags(path), ids)
        return {size: [[row[i] for i in bag] for bag in group] for size, group in found.items()}
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
    return _checked_bags(path, value, row)


def _checked_bags(path: Path, value: Mapping[str, Any], row: Mapping[str, int]) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}
    for size, bags in value.items():
        for number, bag in enumerate(bags):
            unknown = [i for i in bag if str(i) not in row]
            if unknown:
                raise ValueError(
                    f"{path}: bag {number} of size {size} holds image {unknown[0]!r}, which is not used here."
                )
            if not len(bag) == len(set(map(str, bag))) == int(size):
                raise ValueError(
                    f"{path}: bag {number} of size {size} holds {len(bag)} images, {len(set(map(str, bag)))} different."
                )
            found.setdefault(int(size), []).append([row[str(i)] for i in bag])
    return found
