"""Step 1 of an album: its images, existing captions, and facts of the images: hashes and features.

Legend: M images, D features.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.pipeline import ChosenImages
from hf_captionrl.data import ImageError, choose_split, open_image
from hf_captionrl.data.columns import caption_column, id_column, undecoded
from hf_captionrl.data.images import paths_without_bytes
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.retrieval import FeatureCache, Scorer, image_hash

logger = logging.getLogger(__name__)


# --- Images and existing captions: a folder, a list of files, a data set ---------------------------------------------


@dataclass
class AlbumSource:
    """Images of an album, none of them opened."""

    images: Sequence[Any]  # anything that `open_image` opens, read on access
    image_ids: list[str]  # their names, all different; relative paths in a folder
    captions: list[list[str]] = field(default_factory=list)  # existing captions per image, perhaps none
    paths: list[str | None] = field(default_factory=list)  # files of the images; None for images that are not files
    root: Path | None = None  # folder that relative paths start from, if there is one
    concepts: list[Any] | None = None  # what each image shows; images of one concept share a caption

    def __post_init__(self) -> None:
        number = len(self.images)
        self.captions = self.captions or [[] for _ in range(number)]
        self.paths = self.paths or [os.fspath(i) if isinstance(i, str | os.PathLike) else None for i in self.images]
        if number == 0:
            raise ValueError("The album has no images. Use at least one.")
        if len(set(self.image_ids)) < number:
            twice = Counter(self.image_ids).most_common(1)[0][0]
            raise ValueError(f"Two images are called {twice!r}. Use different image ids.")

    def first(self, number: int) -> AlbumSource:
        """The first images."""
        rows = range(min(number, len(self.images)))
        kept = (self.image_ids[:number], self.captions[:number], self.paths[:number])
        concepts = None if self.concepts is None else self.concepts[:number]
        return AlbumSource(ChosenImages(self.images, rows), *kept, self.root, concepts)


def read_regular(path: Path) -> bytes | None:
    """The content of a file; None if it does not exist, or is a link, a pipe or a device, which is never opened."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def sidecar_captions(path: Path) -> list[str]:
    """The caption of a text file, whose lines are joined by spaces; none of an empty file."""
    text = " ".join((read_regular(path) or b"").decode("utf-8-sig").split())
    return [text] if text else []


def load_album_source(name: Any, *, text_files: bool = True, **source: Any) -> AlbumSource:
    """Find the images that the command takes, or a data set in memory, and their captions: their own, or text files.

    `source` are options of [`load_captions`].
    """
    path = Path(name) if isinstance(name, str | os.PathLike) else None
    album = _data_set(name, path, source | ({"text_files": ".txt"} if text_files else {}))
    unread: list[Path] = []
    for row, image in enumerate(album.paths):
        if image is None or album.captions[row] or not text_files:
            continue
        text_file = Path(image).with_suffix(".txt")
        try:
            album.captions[row] = sidecar_captions(text_file)
            is_read = read_regular(text_file) is not None or not os.path.lexists(text_file)
        except UnicodeDecodeError:
            is_read = False
        unread += [] if is_read else [text_file]
    if unread:
        logger.warning(
            "%d text files are not read, because they are links or not UTF-8, such as %s.", len(unread), unread[0]
        )
    return album


def _data_set(name: Any, path: Path | None, source: dict[str, Any]) -> AlbumSource:
    split = source.pop("split", None)
    if name == "scenes":
        source = {}
    else:
        source.setdefault("require_captions", False)
        split = split or "all"
    rows = choose_split(name if path is None else str(name), split, **source).dataset
    column = undecoded(rows.with_format(None)).select_columns("image")
    files: list[str | None] = [None] * len(rows)  # images inside a table, and files that do not exist
    root = None
    if path is not None and path.exists():  # else files are in the cache of the Hub
        listed = paths_without_bytes(column.with_format("arrow")["image"][:]).to_pylist() or files
        files = [file if file and os.path.isfile(file) else None for file in listed]
        root = path if path.is_dir() else Path(source.get("image_root") or path.parent)
    captions = [[text for text in texts if text and text.strip()] for texts in caption_column(rows)]
    concepts = rows["concept"][:] if source.get("concept_column") else None
    return AlbumSource(column["image"], id_column(rows), captions, files, root, concepts)


def read_captions_for(source: AlbumSource, path: str | os.PathLike[str]) -> list[list[str]]:
    """Captions of a file, in any layout of [`read_caption_file`], for the images of an album; empty ones are left out."""
    captions = read_caption_file(path, is_repeatable=True).captions
    if captions.keys().isdisjoint(source.image_ids):
        raise ValueError(
            f"None of the {len(captions)} captions of {path} belongs to an image of the album: it has ids such as "
            f"{next(iter(captions), None)!r}, and the album such as {source.image_ids[0]!r}. Check the folder and the file."
        )
    return [[text for text in captions.get(image_id, ()) if text.strip()] for image_id in source.image_ids]


# --- Facts of the images, each opened once ---------------------------------------------------------------------------

MAX_CHUNK_PIXELS = 2**25
"""Pixels of decoded images that are held at once: 100 MB, one photograph of 24 megapixels or thousands of small ones."""


@dataclass
class ImageFacts:
    """Facts of the readable images of an album."""

    rows: list[int]  # their rows in the album
    keys: list[str]  # hashes of their pixels
    features: Tensor  # (M, D), on the CPU; bit-equal for equal pixels


def opened_chunks(
    images: Sequence[Any], rows: Sequence[int], batch_size: int, unreadable: dict[int, str] | None = None
) -> Iterator[tuple[list[int], list[Image.Image]]]:
    """Decoded images and their rows; a list is emptied when the next one is requested. Without `unreadable`, errors are raised."""
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


def read_images(
    images: Sequence[Any],
    scorer: Scorer,
    *,
    cache: FeatureCache | None = None,
    batch_size: int = 16,
    unreadable: dict[int, str] | None = None,
) -> ImageFacts:
    """Facts of all images, each opened once; every different image is encoded once, and the cache gets new features."""
    rows: list[int] = []
    keys: list[str] = []
    features: dict[str, Tensor] = {}
    for chunk, opened in opened_chunks(images, range(len(images)), batch_size, unreadable):
        hashes = list(map(image_hash, opened))
        new = {key: image for key, image in zip(hashes, opened, strict=True) if key not in features}
        absent = list(new) if cache is None else [list(new)[at] for at in cache.missing(list(new))]
        if absent:
            encoded = scorer.image_features([new[key] for key in absent]).float().cpu()
            features |= dict(zip(absent, encoded, strict=True))
            if cache is not None:
                cache.put(absent, encoded)
        if cache is not None and (present := [key for key in new if key not in features]):
            features |= dict(zip(present, cache.get(present).tensor().float(), strict=True))
        rows += chunk
        keys += hashes
        del new, opened  # else they are held while the next chunk is decoded
    if not rows:
        raise ValueError(f"No image of the album can be read: {next(iter((unreadable or {}).values()), '')}")
    return ImageFacts(rows, keys, torch.stack([features[key] for key in keys]))
