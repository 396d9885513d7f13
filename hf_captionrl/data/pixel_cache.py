"""Images as the vision tower reads them, before normalisation: from a memory-mapped file, or decoded on access.

Legend: N images, H x W the input size of the vision tower.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.decoding import decode_image
from hf_captionrl.data.feature_extraction import image_rows
from hf_captionrl.data.video import frames_of
from hf_captionrl.retrieval import FeatureCache, FeatureView

__all__ = ["CachedPixels", "DecodedPixels", "PixelForm", "cached_pixels"]

PixelForm = Literal["uint8", "jpeg"]
"""How pixels are stored: exactly, or as JPEGs in about a tenth of the space."""

_JPEG_SHARE = 10
_JPEG_HEADER = 640  # bytes of the tables of a JPEG, however small it is
_QUALITIES = (95, 92, 90, 87, 84, 80, 75, 70, 60, 50, 40, 30, 20, 10)


class Prepares(Protocol):
    """First part of an image processor; `Captioner.prepared_pixels` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(3, H, W)."""
        ...

    @property
    def signature(self) -> str:
        """Hash of all that determines the pixels."""
        ...

    def prepare(self, image: Image.Image | Tensor) -> Tensor:
        """Pixels of an image, `(3, H, W)` uint8."""
        ...


class DecodedPixels(Sequence[Tensor]):
    """Prepared pixels of images that are decoded when they are indexed, JPEGs by torchvision.

    The pixels equal those of [`CachedPixels`]. Compared with images, they take less CPU time, and the workers of a `DataLoader`
    transfer less data.

    Args:
        dataset (`datasets.Dataset`): With an `image` column.
        processor: First part of an image processor, `captioner.prepared_pixels`.
    """

    def __init__(self, dataset: datasets.Dataset, processor: Prepares) -> None:
        self.images = undecoded(dataset).select_columns("image").with_format(None)
        self.processor = processor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Any:
        """`(3, H, W)` uint8."""
        return self.processor.prepare(decode_image(self.images[operator.index(index)]["image"]))


class CachedPixels(Sequence[Tensor]):
    """Prepared pixels of images, read when they are indexed. Pickles contain the file name, not the content.

    Args:
        rows ([`FeatureView`] of shape `(N, 3, H, W)` or `(N, bytes)`): uint8: the pixels, or their JPEGs padded to one length.
    """

    def __init__(self, rows: FeatureView) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Pixels of one image, `(3, H, W)` uint8; a copy."""
        row = torch.from_numpy(np.array(self.rows[range(len(self))[operator.index(index)]]))
        return decode_jpeg(row, ImageReadMode.RGB) if row.dim() == 1 else row


def cached_pixels(
    dataset: datasets.Dataset,
    processor: Prepares,
    *,
    form: PixelForm = "uint8",
    directory: str | os.PathLike | None = None,
    batch_size: int = 64,
    progress: str | bool = "Preparing images",
) -> CachedPixels:
    """Prepared pixels of every image, from the cache if they are in it.

    Rows are keyed by the bytes of the image's file and by the settings of the processor. Images that are missing are decoded
    and resized in as many threads as there are cores; a warm cache opens no image. The cache has the guarantees of
    [`FeatureCache`]: it stays valid if a process is killed, and damaged rows are detected and prepared again.

    Args:
        dataset (`datasets.Dataset`): With an `image` column.
        processor: First part of an image processor, `captioner.prepared_pixels`.
        form (`"uint8"` or `"jpeg"`): Exact pixels, or JPEGs in about a tenth of the space. Each JPEG has the highest quality
            that fits; pixels of photographs differ by 2 (384 pixels) to 4 (224 pixels) of 255 on average.
        directory (path, *optional*): Root of all caches; by default `default_cache_dir()`.
        batch_size (`int`): Smallest number of images per write.
        progress (`str` or `bool`): Label of the progress bar, or False.

    Returns:
        [`CachedPixels`]: N rows, in the order of the data set.

    Raises:
        ImageError: If an image cannot be read.
        ValueError: If `form` is unknown, there are no rows, or the data are videos.
    """
    if form not in get_args(PixelForm):
        raise ValueError(f"form is {form!r}. Use 'uint8' (exact) or 'jpeg' (a tenth of the space).")
    refuse_videos(dataset)
    cache, read = pixel_rows(processor.signature, form, directory), row_reader(processor, form)
    return CachedPixels(image_rows(cache, dataset, read, torch.stack, batch_size=batch_size, progress=progress))


def refuse_videos(dataset: datasets.Dataset) -> None:
    """Refuse data whose pixels cannot be cached."""
    if number := frames_of(dataset):
        raise ValueError(
            f"The data are videos ({number} frames each), and only the pixels of images are cached. Leave out "
            "cache_pixels; set freeze_vision_tower=True and cache_image_features=True."
        )


def row_reader(processor: Prepares, form: PixelForm) -> Callable[[Any], Tensor]:
    """Function from an undecoded image to its row of the cache, `(3, H, W)` or `(bytes,)` uint8."""
    size = math.prod(processor.shape) // _JPEG_SHARE + _JPEG_HEADER

    def read(value: Any) -> Tensor:
        pixels = processor.prepare(decode_image(value))
        return pixels if form == "uint8" else _to_jpeg(pixels, size)

    return read


def pixel_rows(signature: str, form: PixelForm, directory: str | os.PathLike | None) -> FeatureCache:
    """The cache of the pixels of one processor in one form."""
    return FeatureCache(directory, model_id="pixels", revision=signature, what=f"pixels_{form}", dtype="uint8")


def _to_jpeg(pixels: Tensor, size: int) -> Tensor:
    """`(size,)` uint8: the JPEG of the highest quality that fits, padded with zeros."""
    for quality in _QUALITIES:
        data = encode_jpeg(pixels, quality)
        if len(data) <= size:
            return torch.nn.functional.pad(data, (0, size - len(data)))
    raise ValueError(
        f"An image of {tuple(pixels.shape)} pixels does not fit into {size} bytes as a JPEG of quality {_QUALITIES[-1]}. "
        "Use cache_pixels='uint8'."
    )
