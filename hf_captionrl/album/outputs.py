"""Files of an album: tables, JSON lines, text files beside the images, metadata."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_captionrl.album.sources import sidecar_of
from hf_captionrl.io import atomic_write_text, write_jsonl

if TYPE_CHECKING:
    from hf_captionrl.album.album_result import Album

__all__ = ["check_sidecars", "write_metadata", "write_sidecars"]


def write_metadata(album: Album, paths: Sequence[str | None], path: str | os.PathLike[str]) -> Path:
    """Write the `metadata.jsonl` of an image folder: `file_name`, relative to the file, and `text`."""
    path = Path(path)
    rows = []
    for image, file in zip(album.images, paths, strict=True):
        if file is None:
            raise ValueError(
                f"Image {image.image_id!r} is not a file, and metadata name files. Write a .jsonl or .csv file."
            )
        if image.caption:
            name = os.path.relpath(os.path.abspath(file), os.path.abspath(path.parent))
            rows.append({"file_name": Path(name).as_posix(), "text": image.caption})
    return write_jsonl(path, rows)


def check_sidecars(image_ids: Sequence[str], paths: Sequence[str | None]) -> list[Path]:
    """The text file beside each image; refuses images that are not files or would share a text file."""
    owner: dict[Path, str] = {}
    for image_id, file in zip(image_ids, paths, strict=True):
        if file is None:
            raise ValueError(f"Image {image_id!r} is not a file, so no text file can stand beside it. Use --output.")
        target = sidecar_of(file)
        if target in owner:
            raise ValueError(
                f"{owner[target]!r} and {image_id!r} would have the same text file, {str(target)!r}. Rename one of them."
            )
        owner[target] = image_id
    return list(owner)


def write_sidecars(album: Album, paths: Sequence[str | None]) -> int:
    """Write the caption of each image into the text file beside it; returns the number of files.

    A file that has this content is left alone, so that a repeated command changes nothing.
    """
    number = 0
    for image, file in zip(album.images, paths, strict=True):
        if file is None or not image.caption:
            continue
        target, text = sidecar_of(file), image.caption + "\n"
        if not target.is_file() or target.read_text(encoding="utf-8", errors="replace") != text:
            atomic_write_text(target, text)
        number += 1
    return number
