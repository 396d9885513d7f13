"""Opens the images of an album once: hashes, small pictures and features.

Legend: M images, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.album.image_copies import small_picture
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.data.source_keys import source_key
from hf_captionrl.retrieval import FeatureCache, Scorer, image_hash

__all__ = ["ImageFacts", "joined_facts", "opened_chunks", "read_chunks", "read_images"]

MAX_CHUNK_PIXELS = 2**25
"""Pixels of decoded images that are held at once: 100 MB, one photograph of 24 megapixels or thousands of small ones."""


@dataclass
class ImageFacts:
    """Facts of the readable images of an album."""

    rows: list[int]  # their rows in the album
    keys: list[str]  # hashes of their pixels
    pictures: np.ndarray  # (M, 768): see [`small_picture`]
    features: Tensor  # (M, D): unit length, on the CPU
    unreadable: dict[int, str] = field(default_factory=dict)  # reason for each row that cannot be read


def opened_chunks(
    images: Sequence[Any], rows: Sequence[int], batch_size: int, unreadable: dict[int, str] | None = None
) -> Iterator[tuple[list[int], list[Image.Image]]]:
    """Decoded images and their rows, at most `batch_size` and `MAX_CHUNK_PIXELS` at once.

    A list of images is emptied when the next one is requested.

    `unreadable` gets the rows that cannot be read; None raises an `ImageError` instead.
    """
    chunk: list[int] = []
    opened: list[Image.Image] = []
    pixels = 0
    for row in rows:
        try:
            image = open_image(images[row])
        except ImageError as error:
            if unreadable is None:
                raise
            unreadable[row] = str(error)
            continue
        size = image.width * image.height
        if chunk and (len(chunk) == batch_size or pixels + size > MAX_CHUNK_PIXELS):
            yield chunk, opened
            opened.clear()  # the caller's variable would hold them while the next image is decoded
            chunk, opened, pixels = [], [], 0
        chunk.append(row)
        opened.append(image)
        pixels += size
        del image
    if chunk:
        yield chunk, opened


def read_chunks(
    images: Sequence[Any],
    rows: Sequence[int],
    scorer: Scorer,
    *,
    cache: FeatureCache | None,
    batch_size: int,
    unreadable: dict[int, str] | None,
) -> Iterator[ImageFacts]:
    """Facts of some images, chunk by chunk; every different image is encoded once.

    `unreadable` gets the rows that cannot be read; None raises an `ImageError` instead.
    """
    known: dict[str, Tensor] = {}
    is_warm = cache is not None and len(cache) > 0
    for chunk, opened in opened_chunks(images, rows, batch_size, unreadable):
        keys = [image_hash(image) for image in opened]
        if cache is not None and is_warm:
            # `captionrl features` and training know an image by the bytes of its file, which are read only if its pixels are new.
            first = {key: row for row, key in reversed(list(zip(chunk, keys, strict=True))) if key not in known}
            stored = {key: key if key in cache else source_key(images[row]) for key, row in first.items()}
            stored = {key: name for key, name in stored.items() if name in cache}
            if stored:
                known |= dict(zip(stored, cache.get(list(stored.values())).tensor().float(), strict=True))
        new = {key: image for key, image in zip(keys, opened, strict=True) if key not in known}
        if new:
            known |= dict(zip(new, scorer.image_features(list(new.values())).float().cpu(), strict=True))
        pictures = np.stack([small_picture(image) for image in opened])
        del opened, new
        yield ImageFacts(chunk, keys, pictures, torch.stack([known[key] for key in keys]))


def read_images(
    images: Sequence[Any],
    scorer: Scorer,
    *,
    cache: FeatureCache | None = None,
    batch_size: int = 16,
    skip_unreadable: bool = False,
    progress: Any = None,
) -> ImageFacts:
    """Hash every image, and encode every different image once; equal images have bit-equal features.

    `cache` gets the new features; unreadable images raise an `ImageError` unless `skip_unreadable`.
    """
    unreadable: dict[int, str] = {}
    listed = unreadable if skip_unreadable else None
    chunks = []
    for chunk in read_chunks(
        images, range(len(images)), scorer, cache=cache, batch_size=batch_size, unreadable=listed
    ):
        if cache is not None and cache.missing(chunk.keys):
            cache.put(chunk.keys, chunk.features)
        chunks.append(chunk)
        if progress is not None:
            progress(len(chunk.rows))
    return joined_facts(chunks, unreadable)


def joined_facts(chunks: Sequence[ImageFacts], unreadable: dict[int, str]) -> ImageFacts:
    """The facts of all chunks; refuses an album without readable images."""
    if not chunks:
        reason = next(iter(unreadable.values()), "there are none")
        raise ValueError(f"No image of the album can be read: {reason}")
    return ImageFacts(
        [row for chunk in chunks for row in chunk.rows],
        [key for chunk in chunks for key in chunk.keys],
        np.concatenate([chunk.pictures for chunk in chunks]),
        torch.cat([chunk.features for chunk in chunks]),
        unreadable,
    )
