"""Cached features and pixels of images and videos, by the bytes of their files.

Legend: N rows, F frames of a video, n videos of a batch, H x W the input size of the vision tower.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.data.columns import frames_of, undecoded
from hf_captionrl.data.images import ImageError, media_source, open_image, workers
from hf_captionrl.retrieval import FeatureCache, FeatureView, image_hash
from hf_captionrl.retrieval.feature_cache import progress_bar
from hf_captionrl.utils.io import write_json

_ROWS_AT_ONCE = 256
_NO_FILE = "00" * 16


# --- Keys of images from the bytes of their files, so that no image is decoded to find it in a cache -----------------


def source_keys(
    dataset: datasets.Dataset, *, progress: str | bool = False, skip_unreadable: bool = False
) -> list[str]:
    """One key per row: the hash of its image's bytes.

    A process reads each file once. With `skip_unreadable`, rows without a readable file have one key in common instead
    of raising an `ImageError`.
    """
    column = undecoded(dataset).select_columns("image").with_format(None)

    def key(value: Any) -> str:
        try:
            return source_key(value)
        except (ImageError, OSError):
            if skip_unreadable:
                return f"file {_NO_FILE}"
            raise

    with workers() as pool, progress_bar(len(column), progress, "image files", delay=1.0) as bar:
        keys: list[str] = []
        for batch in column.iter(_ROWS_AT_ONCE):
            keys += pool.map(key, batch["image"])
            if bar is not None:
                bar.update(len(batch["image"]))
    return keys


def source_key(value: Any) -> str:
    """Key of one undecoded image, as [`source_keys`] gives it."""
    source, _ = media_source(value)
    if isinstance(source, Image.Image):
        digest = image_hash(open_image(source))
    elif isinstance(source, io.BytesIO):
        digest = hashlib.blake2b(source.getbuffer(), digest_size=16).hexdigest()
    else:
        status = os.stat(source)
        digest = _file_hash(source, status.st_size, status.st_mtime_ns)
    return f"file {digest}"  # keys of `image_hash` are those of decoded pixels


@functools.cache
def _file_hash(path: str, size: int, modified_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# --- The images that a saved model was trained on, so that they do not test it ---------------------------------------

TRAINING_IMAGES_FILE = "training_images.json"
"""In the folder of a saved model; never published."""
_DIGITS = 16  # of each hash; 113,000 images of COCO fill 2 MB
UNREADABLE = "0" * _DIGITS
"""The hash of images that cannot be read."""


def image_hashes(dataset: datasets.Dataset) -> list[str]:
    """Shortened hashes of the images' bytes."""
    keys = source_keys(dataset, progress="Hashing files", skip_unreadable=True)
    return [key.split()[-1][:_DIGITS] for key in keys]


def write_training_images(folder: str | os.PathLike[str], hashes: Iterable[str]) -> None:
    """Record in a model's folder the images that it was trained on."""
    different = sorted({*hashes} - {UNREADABLE})
    write_json(Path(folder) / TRAINING_IMAGES_FILE, {"images": len(different), "hashes": "".join(different)})


def training_images(folder: str | os.PathLike[str]) -> set[str]:
    """Hashes of the images that the model of a folder was trained on; empty if nothing is known."""
    path = Path(folder) / TRAINING_IMAGES_FILE
    if not path.is_file():
        return set()
    text = json.loads(path.read_text(encoding="utf-8"))["hashes"]
    return {text[start : start + _DIGITS] for start in range(0, len(text), _DIGITS)}


# --- Features --------------------------------------------------------------------------------------------------------

FramePooling = Literal["mean", "concat", "ordered"]
"""How features of frames are combined to features of a video."""


def pool_frames(features: Any, num_frames: int, pooling: FramePooling = "mean") -> Tensor:
    r"""Features of videos, `(n, M, D)` or `(n, D)` fp32, from those of their frames, `(n * F, M, D)` or `(n * F, D)`.

    `"mean"`: $\frac1F\sum_f x_f$, position by position (Chen and Jin 2020, section 5.1). `"concat"`: the image tokens of
    all frames, $(x_1, \ldots, x_F)$, `(n, F * M, D)` or `(n, F, D)`, for decoders that attend to any number of them, as in
    BLIP (Li et al. 2022, section 5.6). Neither encodes the order of the frames: cross-attention sees no difference if a
    video is played backwards. `"ordered"` is `"concat"` with sinusoidal position encodings (Vaswani et al. 2017, section
    3.5) of the frame added to its tokens; a captioner pretrained on images has to learn to use them.
    """
    frames = torch.as_tensor(features).float().unflatten(0, (-1, num_frames))  # (n, F, ...)
    if pooling == "mean":
        return frames.mean(1)
    if pooling == "ordered":
        place = torch.arange(frames.size(-1))
        angles = torch.arange(num_frames)[:, None] * 10000.0 ** (-(place // 2 * 2) / len(place))  # (F, D)
        code = torch.where(place % 2 == 0, angles.sin(), angles.cos()).to(frames.device)
        frames = frames + code.view(1, num_frames, *[1] * (frames.dim() - 3), -1)
    return frames.flatten(1, 2) if frames.dim() > 3 else frames


def cached_features(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    encode: Callable[[list[Image.Image]], Any],
    *,
    batch_size: int = 64,
    progress: str | bool = "Encoding images",
    unit_length: bool = False,
    pooling: FramePooling = "mean",
) -> FeatureView:
    """Features of every image, from the cache if they are in it; keyed by the bytes of the image's file.

    Only images whose features are missing are decoded, in as many threads as there are cores.

    The features of a video are computed from those of its frames (`sample_frames`, "uniform") by `pool_frames`; its key
    is the hash of its file with the pooling and the number of frames.

    Args:
        cache ([`FeatureCache`]): Cache of one model.
        dataset (`datasets.Dataset`): With an `image` column.
        encode (`Callable`): From a list of images to their features, a tensor or array of as many rows.
        batch_size (`int`): Images, or frames, per call; the frames of one video are never divided.
        progress (`str` or `bool`): Label of the progress bar, or False.
        unit_length (`bool`): Scale the mean over a video's frames to length 1, as scorers need it.
        pooling (`"mean"`, `"concat"` or `"ordered"`): For videos, see `pool_frames`. A cache holds features of one shape: another number of image tokens needs another `what`.

    Returns:
        [`FeatureView`] of shape `(len(dataset), ...)`: In the order of the rows, memory-mapped.

    Raises:
        ImageError: If an image or video cannot be read.
    """
    F = frames_of(dataset)
    if not F:
        return _cached_rows(cache, dataset, open_image, encode, batch_size, progress)
    from hf_captionrl.data.video import sample_frames

    def encode_videos(videos: list[list[Image.Image]]) -> Tensor:
        features = pool_frames(encode([frame for frames in videos for frame in frames]), F, pooling)
        return torch.nn.functional.normalize(features, dim=-1) if unit_length else features

    read = functools.partial(sample_frames, num_frames=F)
    suffix = f"/{'unit ' * unit_length}{pooling} of {F} frames"
    return _cached_rows(cache, dataset, read, encode_videos, max(1, batch_size // F), progress, suffix)


def _cached_rows(
    cache: FeatureCache,
    dataset: datasets.Dataset,
    read: Callable[[Any], Any],
    encode: Callable[[list[Any]], Any],
    batch_size: int,
    progress: str | bool,
    suffix: str = "",
) -> FeatureView:
    """Cached rows of all images or videos; missing ones are read in threads, and encoded together."""
    column = undecoded(dataset).select_columns("image").with_format(None)
    keys = [key + suffix for key in source_keys(dataset, progress=progress and "Checking image files")]
    with workers() as pool:

        def compute(rows: list[int]) -> Any:
            return encode(list(pool.map(read, column[rows]["image"])))

        return cache.get_or_compute(keys, compute, batch_size=batch_size, progress=progress)


# --- Pixels as the vision tower reads them, before normalisation -----------------------------------------------------


def cached_pixels(
    dataset: datasets.Dataset,
    processor: Any,
    *,
    directory: str | os.PathLike | None = None,
    batch_size: int = 64,
    progress: str | bool = "Preparing images",
) -> FeatureView:
    """Prepared pixels of every image, from the cache if they are in it.

    Rows are keyed by the bytes of the image's file and by the settings of the processor. Images that are missing are decoded
    and resized in as many threads as there are cores; a warm cache opens no image. The cache has the guarantees of
    [`FeatureCache`]: it stays valid if a process is killed.

    Args:
        dataset (`datasets.Dataset`): With an `image` column; not of videos.
        processor: First part of an image processor, `captioner.prepared_pixels`, with `shape` `(3, H, W)`, `signature`
            (hash of all that determines the pixels) and `prepare(image)`, `(3, H, W)` uint8.
        directory (path, *optional*): Root of all caches; by default `default_cache_dir()`.
        batch_size (`int`): Smallest number of images per write.
        progress (`str` or `bool`): Label of the progress bar, or False.

    Returns:
        [`FeatureView`] of shape `(N, 3, H, W)`, uint8: In the order of the data set, memory-mapped.

    Raises:
        ImageError: If an image cannot be read.
    """
    if frames_of(dataset):
        raise ValueError(
            "The data are videos. Use cache_image_features and freeze_vision_tower instead of cache_pixels."
        )
    signature = processor.signature  # refuses a processor that cannot be cached
    cache = FeatureCache(directory, model_id="pixels", revision=signature, what="pixels_uint8", dtype="uint8")

    def read(value: Any) -> Tensor:
        return processor.prepare(open_image(value))  # type: ignore[no-any-return]

    return _cached_rows(cache, dataset, read, torch.stack, batch_size, progress)
