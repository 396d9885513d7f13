"""Features of a data set's images or videos, each encoded once.

Legend: N rows, F frames of a video, n videos of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.data.images import open_image
from hf_captionrl.data.video import frames_of, sample_frames, video_hash
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
    unit_length: bool = False,
) -> FeatureView:
    """Features of every image, from the cache where it has them; keyed by image content.

    The features of a video are the mean of those of its frames (`sample_frames`, "uniform"), position by position, as in
    Chen and Jin 2020, section 5.1; its key is the hash of its file with the number of frames.

    Args:
        cache ([`FeatureCache`]): Of one model.
        dataset (`datasets.Dataset`): With an `image` column.
        encode (`Callable`): From a list of images to their features, a tensor or array of as many rows.
        batch_size (`int`): Images a call, or frames; a video's own are never divided.
        progress (`str` or `bool`): Label of the progress bar, or False.
        unit_length (`bool`): Scale the mean over a video's frames to length 1. For scorers: their features have it, and
            the mean of several is shorter. It weights each frame alike, whatever its length before.

    Returns:
        [`FeatureView`] of shape `(len(dataset), ...)`: In the order of the rows, memory-mapped.

    Raises:
        ImageError: If an image or video cannot be read.
        ValueError: If there are no rows.
    """
    if frames_of(dataset):
        return _video_features(cache, dataset, encode, batch_size, progress, unit_length)
    column = dataset.select_columns("image")
    keys = [image_hash(image) for image in iterate_images(dataset)]

    def compute(rows: list[int]) -> Tensor:
        return encode([open_image(column[i]["image"]) for i in rows])

    return cache.get_or_compute(keys, compute, batch_size=batch_size, progress=progress)


def _video_features(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    encode: Callable[[list[Image.Image]], Any],
    batch_size: int,
    progress: str | bool,
    unit_length: bool,
) -> FeatureView:
    F = frames_of(dataset)
    column = dataset.select_columns("image")
    pooling = "unit mean" if unit_length else "mean"
    keys = [f"{video_hash(row['image'])}/{pooling} of {F} frames" for row in column]

    def compute(rows: list[int]) -> Tensor:
        frames = [frame for i in rows for frame in sample_frames(column[i]["image"], F)]
        features = torch.as_tensor(encode(frames))  # (n * F, ...)
        means = features.float().unflatten(0, (len(rows), F)).mean(1)
        return torch.nn.functional.normalize(means, dim=-1) if unit_length else means

    return cache.get_or_compute(keys, compute, batch_size=max(1, batch_size // F), progress=progress)
