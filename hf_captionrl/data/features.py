"""Features of a data set's images, each image encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
from PIL import Image
from torch import Tensor

from hf_captionrl.data.images import open_image
from hf_captionrl.retrieval import FeatureCache, FeatureView, image_hash

__all__ = ["cached_features", "iterate_images"]


def iterate_images(dataset: datasets.Dataset) -> Iterator[Image.Image]:
    """Open the images of a data set one after the other.

    Args:
        dataset (`datasets.Dataset`): With an `image` column.

    Returns:
        `Iterator[PIL.Image.Image]`: RGB images; only one is held at a time.
    """
    for row in dataset.select_columns("image"):
        yield open_image(row["image"])


def cached_features(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    encode: Callable[[list[Image.Image]], Any],
    *,
    batch_size: int = 64,
    progress: str | bool = "Encoding images",
) -> FeatureView:
    """Features of every image, from the cache where it has them; keyed by image content.

    Args:
        cache ([`FeatureCache`]): Of one model.
        dataset (`datasets.Dataset`): With an `image` column.
        encode (`Callable`): From a list of images to their features, a tensor or array of as many rows.
        batch_size (`int`): Images a call.
        progress (`str` or `bool`): Label of the progress bar, or False.

    Returns:
        [`FeatureView`] of shape `(len(dataset), ...)`: In the order of the rows, memory-mapped.
    """
    column = dataset.select_columns("image")
    keys = [image_hash(image) for image in iterate_images(dataset)]

    def compute(rows: list[int]) -> Tensor:
        return encode([open_image(column[i]["image"]) for i in rows])

    return cache.get_or_compute(keys, compute, batch_size=batch_size, progress=progress)
