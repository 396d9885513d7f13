"""Lists the files of image folders, with or without metadata.

The reader of `datasets` (`imagefolder`) is not used because it reads folder names as labels, follows links, drops files
without metadata silently, and does not report why it skips a file."""

from __future__ import annotations

import functools
import logging
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from hf_captionrl.data.images import image_formats
from hf_captionrl.data.row_files import Row, read_rows

__all__ = [
    "METADATA_FILES",
    "FolderListing",
    "image_suffixes",
    "list_images",
    "metadata_file",
    "metadata_rows",
    "report_unnamed",
]

logger = logging.getLogger(__name__)

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Metadata files of a folder of images."""

# Files that systems add: resource forks of macOS, thumbnails of network drives, the recycle bin of Windows.
_SYSTEM_NAMES = {"__macosx", "@eadir", "$recycle.bin", "system volume information", "thumbs.db", "desktop.ini"}
_SHOWN = 5


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Suffixes of the files that `open_image` can open."""
    known = set(image_formats())
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in known)


@dataclass
class FolderListing:
    """Files of a folder and its subfolders; none of them has been opened."""

    images: list[str] = field(default_factory=list)  # paths relative to the folder, sorted, with `/`
    metadata: list[str] = field(default_factory=list)  # paths of metadata files
    # Number of other files by suffix; hidden files and those of systems are not counted.
    others: Counter[str] = field(default_factory=Counter)
    # Files and folders that could not be read, by the reason.
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def describe_others(self) -> str:
        """Describe the other files."""
        order = sorted(self.others.items(), key=lambda item: (-item[1], not item[0], item[0]))
        kinds = ", ".join(f"{number} {kind or 'without a suffix'}" for kind, number in order[:_SHOWN])
        more = ", ..." if len(self.others) > _SHOWN else ""
        return f"{sum(self.others.values())} other files ({kinds}{more})" if self.others else "no other files"

    def report(self, where: str) -> None:
        """Log the files that are not used."""
        for reason, names in self.left_out.items():
            logger.warning("%s: %d %s, such as %s.", where, len(names), reason, names[0])
        if self.others:
            logger.warning("%s: %s are not images and are not used.", where, self.describe_others())


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def list_images(folder: Path) -> FolderListing:
    """List the files of a folder and its subfolders.

    Hidden files and folders and those of systems (`__MACOSX`, `Thumbs.db`, ...) are skipped. Links to files are listed;
    the code that opens them checks their targets. Links to folders are reported and not followed.
    """
    found = FolderListing()
    suffixes = image_suffixes()
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(folder / below) as scanned:
                entries = list(scanned)
        except OSError as error:
            found.left_out.setdefault("folders cannot be read", []).append(f"{below!r} ({error.strerror})")
            continue
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            path = below + entry.name
            if not _is_text(path):
                found.left_out.setdefault("names are not UTF-8 (rename them)", []).append(ascii(path))
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path + "/")
            elif entry.is_symlink() and entry.is_dir():
                found.left_out.setdefault("links to folders are not followed", []).append(repr(path))
            elif entry.name in METADATA_FILES:
                found.metadata.append(path)
            elif (suffix := os.path.splitext(entry.name)[1].lower()) in suffixes:
                found.images.append(path)
            else:
                found.others[suffix] += 1
    found.images.sort()
    found.metadata.sort()
    return found


def _is_text(path: str) -> bool:
    # A name of other bytes has no place in a table of text.
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def metadata_file(folder: Path) -> Path | None:
    """The metadata file of a folder."""
    found = [folder / name for name in METADATA_FILES if (folder / name).is_file()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ValueError(f"{folder} has {names}, and only one can be read. Keep one of them.")
    return found[0] if found else None


def report_unnamed(folder: Path, rows_of: Mapping[Path, Iterable[Row]]) -> None:
    """Log images of a folder that no row of its metadata names, and metadata files that are not read."""
    listing = list_images(folder)
    texts = {value for rows in rows_of.values() for row in rows for value in row.values() if isinstance(value, str)}
    named = {posixpath.normpath(text) for text in texts}
    unnamed = [path for path in listing.images if path not in named]
    if unnamed:
        logger.warning(
            "%s: %d of %d images are not named by any row of %s and are not used, such as %r.",
            *(folder, len(unnamed), len(listing.images)),
            *(" and ".join(str(path.relative_to(folder)) for path in rows_of), unnamed[0]),
        )
    used = {path.relative_to(folder).as_posix() for path in rows_of}
    if unread := [path for path in listing.metadata if path not in used]:
        logger.warning("%s: %s is not read. Set data_dir to its folder to use it.", folder, " and ".join(unread))
    for reason, names in listing.left_out.items():
        logger.warning("%s: %d %s, such as %s.", folder, len(names), reason, names[0])


def metadata_rows(path: Path) -> list[Row]:
    """The rows of a metadata file."""
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path} holds no rows. Check that it is the right file.")
    return rows
