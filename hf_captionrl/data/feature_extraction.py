"""Features of a data set's images or videos, each encoded once.

Legend: N rows, F frames of a video, n videos of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import datasets
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.images import open_image
from hf_captionrl.data.source_keys import source_keys, workers
from hf_captionrl.data.video import frames_of, sample_frames, video_hash
from hf_captionrl.retrieval import FeatureCache, FeatureView

__all__ = ["FramePooling", "VideoPooling", "cached_features", "image_rows", "pool_frames"]

FramePooling = Literal["mean", "concat", "ordered"]
"""How features of frames are combined to features of a video."""
VideoPooling = FramePooling | Literal["native"]
"""As `FramePooling`, or with the model's video inputs."""


def pool_frames(features: Any, num_frames: int, pooling: FramePooling = "mean") -> Tensor:
    r"""Features of videos from features of their frames.

    `"mean"`: $\frac1F\sum_f x_f$, position by position (Chen and Jin 2020, section 5.1). `"concat"`: the image tokens of
    all frames, $(x_1, \ldots, x_F)$, for decoders that attend to any number of them, as in BLIP (Li et al. 2022, section
    5.6). Neither encodes the order of the frames: cross-attention sees no difference if a video is played backwards.
    `"ordered"` is `"concat"` with sinusoidal position encodings (Vaswani et al. 2017, section 3.5) of the frame added to
    its tokens; a captioner pretrained on images has to learn to use them.

    Args:
        features (`torch.Tensor` or array of shape `(n * F, M, D)` or `(n * F, D)`): The frames of a video are
            consecutive.
        num_frames (`int`): F.
        pooling (`"mean"`, `"concat"` or `"ordered"`): See above.

    Returns:
        `torch.Tensor` of shape `(n, M, D)` or `(n, D)`; but for `"mean"` `(n, F * M, D)` or `(n, F, D)`; fp32.

    Raises:
        ValueError: If `pooling` is none of them.
    """
    if pooling not in ("mean", "concat", "ordered"):
        raise ValueError(f"frame_pooling is {pooling!r}. Use 'mean', 'concat' or 'ordered'.")
    frames = torch.as_tensor(features).float().unflatten(0, (-1, num_frames))  # (n, F, ...)
    if pooling == "mean":
        return frames.mean(1)
    if pooling == "ordered":
        code = _place_code(num_frames, frames.size(-1)).to(frames.device)  # (F, D)
        frames = frames + code.view(1, num_frames, *[1] * (frames.dim() - 3), -1)
    return frames.flatten(1, 2) if frames.dim() > 3 else frames


def _place_code(num_frames: int, width: int) -> Tensor:
    """Sinusoidal encodings of the positions 0 to F - 1, `(F, D)`; sines and cosines alternate."""
    rates = 10000.0 ** (-(torch.arange(width) // 2 * 2) / width)  # (D,), radians a place
    angles = torch.arange(num_frames)[:, None] * rates  # (F, D)
    return torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos())


def cached_features(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    encode: Callable[[list[Image.Image]], Any],
    *,
    batch_size: int = 64,
    progress: str | bool = "Encoding images",
    unit_length: bool = False,
    pooling: VideoPooling = "mean",
) -> FeatureView:
    """Features of every image, from the cache if they are in it; keyed by the bytes of the image's file.

    Only images whose features are missing are decoded, in as many threads as there are cores. A file is recognised by its
    path, size and modification time; a changed file is hashed again.

    The features of a video are computed from those of its frames (`sample_frames`, "uniform") by `pool_frames`; its key
    is the hash of its file with the pooling and the number of frames.

    Args:
        cache ([`FeatureCache`]): Cache of one model.
        dataset (`datasets.Dataset`): With an `image` column.
        encode (`Callable`): From a list of images to their features, a tensor or array of as many rows; with `"native"` from
            the consecutive frames of several videos to features with one row per video.
        batch_size (`int`): Images, or frames, per call; the frames of one video are never divided.
        progress (`str` or `bool`): Label of the progress bar, or False.
        unit_length (`bool`): Scale the mean over a video's frames to length 1. For scorers, whose features have unit
            length; the mean of several is shorter.
        pooling (`"mean"`, `"concat"`, `"ordered"` or `"native"`): For videos, see `pool_frames`; with `"native"`, `encode`
            pools. A cache holds features of one shape: another number of image tokens needs another `what`.

    Returns:
        [`FeatureView`] of shape `(len(dataset), ...)`: In the order of the rows, memory-mapped.

    Raises:
        ImageError: If an image or video cannot be read.
        ValueError: If there are no rows.
    """
    if frames_of(dataset):
        return _video_features(cache, dataset, encode, batch_size, progress, unit_length, pooling)
    return image_rows(cache, dataset, open_image, encode, batch_size=batch_size, progress=progress)


def image_rows(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    read: Callable[[Any], Any],
    encode: Callable[[list[Any]], Any],
    *,
    batch_size: int,
    progress: str | bool,
) -> FeatureView:
    """Cached rows of all images; missing ones are read in threads, one undecoded value at a time, and encoded together."""
    column = undecoded(dataset).select_columns("image").with_format(None)
    keys = source_keys(dataset, cache.root, progress=progress and "Checking image files")
    with workers() as pool:

        def compute(rows: list[int]) -> Any:
            return encode(list(pool.map(read, column[rows]["image"])))

        return cache.get_or_compute(keys, compute, batch_size=batch_size, progress=progress)


def _video_features(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    encode: Callable[[list[Image.Image]], Any],
    batch_size: int,
    progress: str | bool,
    unit_length: bool,
    pooling: VideoPooling,
) -> FeatureView:
    F = frames_of(dataset)
    column = dataset.select_columns("image")
    name = f"unit {pooling}" if unit_length else pooling
    keys = [f"{video_hash(row['image'])}/{name} of {F} frames" for row in column]

    def compute(rows: list[int]) -> Tensor:
        frames = [frame for i in rows for frame in sample_frames(column[i]["image"], F)]
        found = encode(frames)
        features = torch.as_tensor(found).float() if pooling == "native" else pool_frames(found, F, pooling)
        return torch.nn.functional.normalize(features, dim=-1) if unit_length else features

    return cache.get_or_compute(keys, compute, batch_size=max(1, batch_size // F), progress=progress)
