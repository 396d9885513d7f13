"""Images of an album, and existing captions: a folder, a list of files, a data set."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_captionrl.data import ImageError
from hf_captionrl.data.image_folders import list_images
from hf_captionrl.data.image_paths import paths_without_bytes, refuse_outside
from hf_captionrl.data.source_keys import source_key
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.pipelines import ChosenImages

__all__ = ["FORMULA", "AlbumSource", "load_album_source", "read_captions_for", "sidecar_of"]

FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""Start of a cell that spreadsheets would evaluate, or would evaluate if apostrophes were removed from it."""


@dataclass
class AlbumSource:
    """Images of an album, none of them opened."""

    images: Sequence[Any]  # anything that `open_image` opens, read on access
    image_ids: list[str]  # their names, all different; relative paths in a folder
    # Existing captions, per image; an empty list if there is none.
    captions: list[list[str]] = field(default_factory=list)
    paths: list[str | None] = field(default_factory=list)  # files of the images; None for images that are not files
    root: Path | None = None  # folder that relative paths start from, if there is one

    def __post_init__(self) -> None:
        number = len(self.images)
        self.captions = self.captions or [[] for _ in range(number)]
        if not self.paths:
            self.paths = [os.fspath(i) if isinstance(i, str | os.PathLike) else None for i in self.images]
        sizes = {"image_ids": len(self.image_ids), "captions": len(self.captions), "paths": len(self.paths)}
        for name, size in sizes.items():
            if size != number:
                raise ValueError(f"There are {number} images and {size} {name}. Pass one per image.")
        if number == 0:
            raise ValueError("The album has no images. Use at least one.")
        if len(set(self.image_ids)) < number:
            twice = next(i for n, i in enumerate(self.image_ids) if i in self.image_ids[:n])
            raise ValueError(f"Two images are called {twice!r}. Use different image ids.")

    def first(self, number: int) -> AlbumSource:
        """The first images."""
        rows = range(min(number, len(self.images)))
        kept = (self.image_ids[:number], self.captions[:number], self.paths[:number])
        return AlbumSource(ChosenImages(self.images, rows), *kept, self.root)

    def stamps(self, progress: Callable[[int], Any] | None = None) -> list[str]:
        """What tells an image from another one of the same name: size and time of change of a file, else the hash of the bytes.

        `progress` gets the number of images whose bytes were read.
        """
        return [_stamp(path, self.images, row, progress) for row, path in enumerate(self.paths)]


def _stamp(path: str | None, images: Sequence[Any], row: int, progress: Callable[[int], Any] | None) -> str:
    try:
        if path is not None:
            facts = os.stat(path)
            return f"{facts.st_size}-{facts.st_mtime_ns}"
        found = source_key(images[row])
    except (ImageError, OSError):
        return "unreadable"  # the stage that reads the image says why
    if progress is not None:
        progress(1)
    return found


class _Column(Sequence[Any]):
    """The undecoded image column of a data set, read row by row."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: Any) -> Any:
        return self.column[row]["image"]


def sidecar_of(path: str) -> Path:
    """The text file beside an image."""
    return Path(path).with_suffix(".txt")


def load_album_source(
    name: Any, *, sidecars: bool = True, ignore_metadata: bool = False, **source: Any
) -> AlbumSource:
    """Find the images of an album.

    Args:
        name (`str`, `Path` or `datasets.Dataset`): A folder, searched with its subfolders; a list of files (`.txt`, one path
            per line, relative to the list, or separated by NUL as `find -print0` writes them); a `.jsonl`, `.csv` or
            `.parquet` file with image paths; `scenes`; a data set on the Hub or in memory.
        sidecars: Whether to read a caption from the `.txt` file beside an image that has no other.
        ignore_metadata: Take every image of a folder, whatever its metadata name.
        source: Options of [`load_captions`]: `split`, `image_root`, `image_column`, ...
    """
    path = Path(name) if isinstance(name, str | os.PathLike) else None
    if path is not None and path.suffix.lower() == ".txt" and path.is_file():
        found = _listed(path, source.get("image_root"))
    elif path is not None and path.is_dir() and ignore_metadata:
        listing = list_images(path)
        files = [str(path / image) for image in listing.images]
        found = AlbumSource(files, listing.images, paths=list(files), root=path)
    else:
        if path is not None and path.is_dir() and all(found.is_dir() for found in path.rglob("*")):
            raise ValueError(f"The folder {str(path)!r} contains no files. Use a folder that contains images.")
        found = _data_set(name, path, source)
    if sidecars:
        for row, image in enumerate(found.paths):
            if image is not None and not found.captions[row] and (text := _read_sidecar(sidecar_of(image))):
                found.captions[row] = [text]
    return found


def _listed(path: Path, image_root: str | None) -> AlbumSource:
    root = path.parent if image_root is None else Path(image_root)
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    parts = data.split(b"\0") if b"\0" in data else data.splitlines()
    try:
        names = [part.decode("utf-8") for part in parts if part.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Write the list of image paths in UTF-8.") from None
    names = list(dict.fromkeys(names))
    files = [str(root / name) for name in names]
    if not files:
        raise ValueError(f"{path} lists no images. Write one path per line.")
    refuse_outside(files, root, str(path))
    return AlbumSource(files, names, paths=list(files), root=root)


def _data_set(name: Any, path: Path | None, source: dict[str, Any]) -> AlbumSource:
    from hf_captionrl.data import choose_split
    from hf_captionrl.data.caption_columns import caption_lists, undecoded

    split = source.pop("split", None)
    if name == "scenes":
        source = {}
    else:
        source.setdefault("require_captions", False)
        split = split or "all"
    rows = choose_split(name if path is None else str(name), split, **source).dataset
    column = undecoded(rows.with_format(None)).select_columns("image")
    files: list[str | None] = [None] * len(rows)
    root = None
    if path is not None and path.exists():  # else files are in the cache of the Hub
        files = _files_of(column)
        root = path if path.is_dir() else Path(source.get("image_root") or path.parent)
    return AlbumSource(
        _Column(column),
        [str(image_id) for image_id in rows["image_id"][:]],
        [[text for text in texts if text and text.strip()] for texts in caption_lists(rows)],
        files,
        root,
    )


def _files_of(column: Any) -> list[str | None]:
    """The file of each image; None for images inside a table and for files that do not exist."""
    paths = paths_without_bytes(column.with_format("arrow")["image"][:]).to_pylist() or [None] * len(column)
    return [path if path and os.path.isfile(path) else None for path in paths]


def _read_sidecar(path: Path) -> str:
    """The caption of a text file; lines are joined."""
    try:
        return " ".join(path.read_text(encoding="utf-8-sig").split())
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Convert it, or use --no-sidecar_captions.") from None


def read_captions_for(source: AlbumSource, path: str | os.PathLike[str]) -> list[list[str]]:
    """Captions of a file for the images of an album: JSON lines as `captionrl caption` writes them, or a table.

    A table (`.csv`) has a column `image_id` or `file_name` and one of captions.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        captions = _table(path)
    else:
        captions = dict(read_caption_file(path, is_repeatable=True).captions)
    known = set(source.image_ids)
    unknown = [name for name in captions if name not in known]
    if len(unknown) == len(captions):
        raise ValueError(
            f"None of the {len(captions)} captions of {path} belongs to an image of the album: it has ids such as "
            f"{unknown[0]!r}, and the album such as {source.image_ids[0]!r}. Check the folder and the file."
        )
    return [captions.get(image_id, []) for image_id in source.image_ids]


def _table(path: Path) -> dict[str, list[str]]:
    from hf_captionrl.data.row_files import CAPTION_COLUMNS, read_rows

    rows = read_rows(path)
    names = list(rows[0]) if rows else []
    key = next((name for name in ("image_id", "file_name", "image", "path") if name in names), None)
    text = next((name for name in CAPTION_COLUMNS if name in names), None)
    if key is None or text is None:
        raise ValueError(
            f"{path} has the columns {names}. Use a column image_id or file_name, and one called {CAPTION_COLUMNS[0]!r}."
        )
    found: dict[str, list[str]] = {}
    for row in rows:
        value = row[text]
        texts = [value] if isinstance(value, str) else list(value or [])
        found.setdefault(_unquoted(str(row[key])), []).extend(
            _unquoted(t) for t in texts if isinstance(t, str) and t.strip()
        )
    return found


def _unquoted(text: str) -> str:
    """A cell without the apostrophe that `Album.to_csv` puts before formulas."""
    return text[1:] if FORMULA.match(text) and text[0] == "'" else text
