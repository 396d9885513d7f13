"""Files of an album: tables, JSON lines, text files beside the images, metadata."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.album.sources import FORMULA, sidecar_of
from hf_captionrl.io import atomic_write_text, write_jsonl

if TYPE_CHECKING:
    from hf_captionrl.album.album_result import Album

__all__ = ["check_sidecars", "safe_cell", "write_csv", "write_metadata", "write_rows", "write_sidecars"]

_COLUMNS = ("image_id", "caption", "old_caption", "rank", "margin", "distinct", "confused_with", "copy_of", "problems")


def safe_cell(value: Any) -> Any:
    """A cell that spreadsheets show as text: an apostrophe precedes texts that would be formulas."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = " | ".join(value)
    return "'" + value if isinstance(value, str) and FORMULA.match(value) else value


def write_csv(album: Album, path: str | os.PathLike[str]) -> Path:
    """Write a table: UTF-8 with a byte order mark, so that Excel reads every script."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(_COLUMNS)
    for row in album.rows():
        writer.writerow([safe_cell(row[name]) for name in _COLUMNS])
    return atomic_write_text(path, "\ufeff" + buffer.getvalue())


def write_rows(album: Album, path: str | os.PathLike[str]) -> Path:
    """Write one JSON object per image; `captionrl evaluate` reads the file."""
    return write_jsonl(path, album.rows())


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
