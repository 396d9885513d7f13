"""Opens the images of an album once: hashes, small pictures and features.

Legend: M images, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.album.image_copies import CALIBRATION_IMAGES, copy_cosine, small_picture, threshold_of
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.data.source_keys import source_key
from hf_captionrl.retrieval import FeatureCache, Scorer, image_hash

__all__ = ["ImageFacts", "copy_threshold", "joined_facts", "opened_chunks", "read_chunks", "read_images"]

MAX_CHUNK_PIXELS = 2**25
"""Pixels of decoded images that are held at once: 100 MB, one photograph of 24 megapixels or thousands of small ones."""
_HASH_BYTES = 16


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
    """Facts of some images, batch by batch; every different image is encoded once.

    With a `cache` that has the features of an image, and after its first album, the image is not opened.

    `unreadable` gets the rows that cannot be read; None raises an `ImageError` instead.
    """
    known: dict[str, Tensor] = {}
    pictures = None if cache is None else _picture_cache(cache)
    for start in range(0, len(rows), batch_size):
        block = rows[start : start + batch_size]
        sources: dict[int, str] = {}
        parts: list[ImageFacts] = []
        if cache is not None and pictures is not None:
            sources = _source_keys(images, block)
            parts = _cached_facts(sources, cache, pictures, known)
        cached = {row for part in parts for row in part.rows}
        others = [row for row in block if row not in cached]
        for chunk, opened in opened_chunks(images, others, batch_size, unreadable):
            keys = [image_hash(image) for image in opened]
            if cache is not None:
                # `captionrl features` and training know an image by the bytes of its file.
                first = dict(zip(reversed(keys), reversed(chunk), strict=True))
                for key, row in first.items():
                    if row not in sources and len(cache) and key not in cache:
                        sources[row] = source_key(images[row])  # of an image in memory
                _find_features(first, sources, cache, known)
            new = {key: image for key, image in zip(keys, opened, strict=True) if key not in known}
            if new:
                known |= dict(zip(new, scorer.image_features(list(new.values())).float().cpu(), strict=True))
            small = np.stack([small_picture(image) for image in opened])
            del opened, new
            if pictures is not None:
                _put_pictures(pictures, [sources.get(row) for row in chunk], keys, small)
            parts.append(ImageFacts(chunk, keys, small, torch.stack([known[key] for key in keys])))
        if parts:
            yield _in_order(joined_facts(parts, {}))


def _picture_cache(cache: FeatureCache) -> FeatureCache:
    """The hash of the pixels and the small picture of an image, `(784,)`, by the bytes of its file.

    They depend on no model, so albums with other scorers find them too.
    """
    return FeatureCache(cache.root, model_id="image_hash", revision="1", what="small_pictures", dtype="uint8")


def _source_keys(images: Sequence[Any], rows: Sequence[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for row in rows:
        # An image in memory has no bytes to hash, and need not be decoded. What cannot be read is left to `open_image`.
        if not isinstance(value := images[row], Image.Image):
            with suppress(ImageError, OSError):
                found[row] = source_key(value)
    return found


def _find_features(
    row_of: dict[str, int], sources: dict[int, str], cache: FeatureCache, known: dict[str, Tensor]
) -> None:
    """Look up features by the hash of the pixels, else by the bytes of the file, and add them to `known`."""
    if not len(cache):
        return
    names = {key: key if key in cache else sources[row] for key, row in row_of.items() if key not in known}
    names = {key: name for key, name in names.items() if name in cache}
    if names:
        with suppress(KeyError):  # a damaged row, which is dropped with a warning: all are computed again
            known |= dict(zip(names, cache.get(list(names.values())).tensor().float(), strict=True))


def _cached_facts(
    sources: dict[int, str], cache: FeatureCache, pictures: FeatureCache, known: dict[str, Tensor]
) -> list[ImageFacts]:
    """Facts of the images that need not be opened."""
    listed = list(sources.items())
    missing = set(pictures.missing([source for _, source in listed]))
    listed = [one for at, one in enumerate(listed) if at not in missing]
    if not listed:
        return []
    try:
        stored = np.asarray(pictures.get([source for _, source in listed]))
    except KeyError:  # a damaged row, which is dropped with a warning
        return []
    keys = [row[:_HASH_BYTES].tobytes().hex() for row in stored]
    _find_features({key: row for key, (row, _) in zip(keys, listed, strict=True)}, sources, cache, known)
    kept = [at for at, key in enumerate(keys) if key in known]
    if not kept:
        return []
    features = torch.stack([known[keys[at]] for at in kept])
    return [
        ImageFacts([listed[at][0] for at in kept], [keys[at] for at in kept], stored[kept, _HASH_BYTES:], features)
    ]


def _put_pictures(
    pictures: FeatureCache, sources: Sequence[str | None], keys: Sequence[str], small: np.ndarray
) -> None:
    rows = {
        source: np.concatenate([np.frombuffer(bytes.fromhex(key), np.uint8), picture])
        for source, key, picture in zip(sources, keys, small, strict=True)
        if source is not None
    }
    new = [list(rows)[at] for at in pictures.missing(list(rows))]
    if new:
        pictures.put(new, np.stack([rows[source] for source in new]))


def _in_order(facts: ImageFacts) -> ImageFacts:
    order = sorted(range(len(facts.rows)), key=facts.rows.__getitem__)
    rows, keys = [facts.rows[at] for at in order], [facts.keys[at] for at in order]
    return ImageFacts(rows, keys, facts.pictures[order], facts.features[order])


def copy_threshold(images: Sequence[Any], facts: ImageFacts, scorer: Scorer, cache: FeatureCache | None) -> float:
    """Cosine from which two images of the album may be near-copies; see [`threshold_of`].

    The cosine of each image with its copy is cached beside the features, by the hash of its pixels.
    """
    rows, keys = facts.rows[:CALIBRATION_IMAGES], facts.keys[:CALIBRATION_IMAGES]

    def compute(asked: Sequence[int]) -> np.ndarray:
        chunks = opened_chunks(images, [rows[at] for at in asked], 1)
        # A variable for the image would hold it while the next one is decoded.
        return np.array([[copy_cosine(scorer, opened.pop())] for _, opened in chunks], np.float32)

    if cache is None:
        return threshold_of(compute(range(len(rows)))[:, 0])
    cosines = FeatureCache.for_scorer(scorer, cache.root, what="saved_again").get_or_compute(keys, compute)
    return threshold_of(np.asarray(cosines)[:, 0])


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
