"""Arguments of a source of captions, its raw splits before their columns are converted, and the names of splits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_captionrl.data.arrow_columns import ColumnView, select_rows
from hf_captionrl.data.row_files import Row

__all__ = ["SPLIT_NAMES", "Source", "SourceArguments", "by_split_column", "source_of_rows", "split_name"]

SPLIT_NAMES: dict[str, str] = {
    "train": "train",
    "training": "train",
    "restval": "train",  # Karpathy's 30,504 validation images, which are used for training
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "validate": "validation",  # MSR-VTT
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""Names of splits in data sets, and our name for each."""


@dataclass(frozen=True)
class SourceArguments:
    """Location and columns of a caption data set.

    Args:
        dataset_config (`str`, *optional*): Configuration of a Hub data set, or of the embedded one.
        revision (`str`, *optional*): Revision of a Hub data set.
        data_dir (`str` or `Path`, *optional*): Folder of `"imagefolder"`.
        image_root (`str` or `Path`, *optional*): Folder that paths in the image column are relative to. Paths that
            leave it, by `..`, by a link, or as an absolute path, are refused.
        image_column (`str`): Column with images, bytes or paths. If the default is missing, the only column with a
            usual name (`file_name`, `img`, ...) is used.
        caption_column (`str`): Column with a caption or a list of captions; the default likewise (`caption`, `text`,
            `sentences`, ...). Several usual names are an error.
        image_id_column (`str`, *optional*): Column with ids. Default: a column `image_id`, else the path, else
            `"<split>-<row>"`. Rows of one image are joined; one id for two images is an error.
        num_frames (`int`): 0 for images. For videos the number of frames of each, see `sample_frames`: the splits then
            have a column `video_frames` with that number, and `image` is not decoded on access.
        require_captions (`bool`): False also accepts data without captions; `captions` is then empty.
    """

    dataset_config: str | None = None
    revision: str | None = None
    data_dir: str | Path | None = None
    image_root: str | Path | None = None
    image_column: str = "image"
    caption_column: str = "captions"
    image_id_column: str | None = None
    num_frames: int = 0
    require_captions: bool = True

    def __post_init__(self) -> None:
        if self.num_frames < 0:
            raise ValueError(f"num_frames is {self.num_frames}. Use 0 for images, or the number of frames per video.")


@dataclass
class Source:
    """Raw splits of a source."""

    name: str  # name of the source in messages
    splits: dict[str, datasets.Dataset | list[Row]]  # split name to rows
    root: Path | None = None  # folder that the paths in the image column are relative to, and must not leave
    image_column: str | None = None  # the image column of this kind of source
    has_videos: bool = False  # True if the source is known to contain videos
    has_named_splits: bool = True  # False if the source does not name splits; all rows are then `train`
    has_captions: bool = True  # False for a folder of images without metadata


def split_name(name: Any) -> str | None:
    """Our name for a split."""
    return SPLIT_NAMES.get(name.strip().lower()) if isinstance(name, str) else None


def source_of_rows(
    name: str, rows: list[Row], where: str, root: Path | None, image_column: str | None = None
) -> Source:
    """A source whose rows may name their splits."""
    splits = _by_split(rows, where)
    named = any(split_name(row.get("split")) is not None for row in rows)
    return Source(name, splits, root, image_column, has_named_splits=named)


def _by_split(rows: Iterable[Row], where: str) -> dict[str, datasets.Dataset | list[Row]]:
    """Rows by our split names; all are `train` if no row names a split."""
    rows = list(rows)
    if not rows:
        raise ValueError(f"{where} holds no rows. Check that it is the right file.")
    known = [split_name(row.get("split")) is not None for row in rows]
    if not any(known):
        return {"train": rows}
    if not all(known):
        odd = known.index(False)
        raise ValueError(
            f"{where}: row {odd + 1} (the first is 1) has the split {rows[odd].get('split')!r}; other rows name one of "
            f"{sorted(SPLIT_NAMES)}. Name a split in every row, or rename the column."
        )
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    for row in rows:
        split = splits.setdefault(str(split_name(row["split"])), [])
        split.append({key: value for key, value in row.items() if key != "split"})  # type: ignore[union-attr]
    return splits


def by_split_column(rows: Any) -> dict[str, datasets.Dataset | list[Row]]:
    """The splits named by a column `split`, as in Flickr30k on the Hub."""
    if getattr(rows.features.get("split"), "dtype", None) != "string":
        return {}
    names: ColumnView[Any] = ColumnView(rows, "split")
    ours = {name: split_name(name) for name in dict.fromkeys(names)}
    found = list(dict.fromkeys(ours.values()))
    if None in found or len(found) < 2:
        return {}
    numbers = np.fromiter((found.index(ours[name]) for name in names), np.int8, len(names))  # of the split of each row
    rest = rows.remove_columns("split")
    return {str(name): select_rows(rest, np.flatnonzero(numbers == n)) for n, name in enumerate(found)}
