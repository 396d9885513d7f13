"""Checks every row before training: invalid rows are quarantined and reported; too many of them stop the run."""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

from hf_captionrl.data.columns import (
    CAPTIONS,
    VIDEO_FRAMES,
    caption_fault,
    id_column,
    replace_column,
    to_caption_list,
    undecoded,
)
from hf_captionrl.data.images import ImageError, in_threads, open_image, verify_image
from hf_captionrl.data.video import verify_video
from hf_captionrl.utils.io import atomic_write_text

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class QuarantineEntry:
    """A row that was left out, or a caption of a row that stays."""

    row: int  # of the data set that was checked, from 0
    image_id: str
    split: str
    reason: str  # such as "image_truncated", see `ImageError`, or "caption_empty", see `caption_fault`
    detail: str  # the value and the rule it broke
    dropped: str = "row"  # or "caption"


class QuarantineError(ValueError):
    """Too many invalid rows to train on."""


def _check_split(
    ds: datasets.Dataset, split: str, faults: Sequence[ImageError | None], require_captions: bool
) -> tuple[datasets.Dataset, list[QuarantineEntry]]:
    ids, values = id_column(ds), ds["captions"][:]
    if len(set(ids)) < len(ids):
        image_id, times = Counter(ids).most_common(1)[0]
        raise ValueError(
            f"Split {split!r}: image_id {image_id!r} is in {times} rows. Use load_captions, which joins such rows."
        )
    good: list[list[str | None]] = []
    valid: list[int] = []
    entries: list[QuarantineEntry] = []
    for row, (value, fault) in enumerate(zip(values, faults, strict=True)):
        entry = functools.partial(QuarantineEntry, row, ids[row], split)
        texts = to_caption_list(value)
        bad = [(n, *wrong) for n, text in enumerate(texts) if (wrong := caption_fault(text))]
        numbers = {n for n, *_ in bad}
        good.append([text for n, text in enumerate(texts) if n not in numbers])
        if fault is not None:
            entries.append(entry(fault.reason, fault.detail))
        elif good[row] or not require_captions:
            valid.append(row)
            entries += [entry(reason, f"captions[{n}]: {detail}", "caption") for n, reason, detail in bad]
        elif bad:
            entries.append(entry(bad[0][1], "; ".join(f"captions[{n}]: {detail}" for n, _, detail in bad)))
        else:
            entries.append(entry("caption_missing", "the row has no caption"))
    if good != values:
        ds = replace_column(ds, "captions", good, CAPTIONS)
    return (ds if len(valid) == len(ds) else ds.select(valid)), entries


def check_captions(
    ds: Any,
    *,
    quarantine_path: str | Path | None = None,
    max_bad_fraction: float = 0.05,
    check_images: bool = True,
    require_captions: bool = True,
) -> tuple[Any, list[QuarantineEntry]]:
    """Remove invalid rows and captions from a data set, and list each with its reason.

    A row is invalid if its image cannot be opened or it has no valid caption. In a row with valid captions, only the invalid ones
    are removed. Valid captions are cleaned (`clean_caption`). Images and videos are decoded once, in threads.

    Args:
        ds (`datasets.Dataset` or `datasets.DatasetDict`): Data of `load_captions` or `load_caption_splits`.
        quarantine_path (`str` or `Path`, *optional*): File with one JSON object per entry, rewritten by every call and
            empty without entries. With a `DatasetDict` it holds all splits.
        max_bad_fraction (`float`): Largest share of invalid rows in any split, in [0, 1].
        check_images (`bool`): False does not open the images.
        require_captions (`bool`): False also keeps rows without a valid caption; invalid captions are still removed.

    Returns:
        `tuple[datasets.Dataset | datasets.DatasetDict, list[QuarantineEntry]]`: The valid rows, and what was left out.

    Raises:
        QuarantineError: If the share of invalid rows of a split is too large, or it has no valid row. The file is
            written first.
    """
    single = isinstance(ds, datasets.Dataset)
    splits = {str(ds.split or "train"): ds} if single else dict(ds)
    good: dict[str, datasets.Dataset] = {}
    entries: list[QuarantineEntry] = []
    for name, rows in splits.items():
        rows = rows.with_format(None)
        faults: list[ImageError | None] = [None] * len(rows)
        if check_images:
            verify = verify_video if VIDEO_FRAMES in rows.column_names else verify_image
            batches = undecoded(rows).select_columns("image").iter(_ROWS_AT_ONCE)
            faults = [fault for batch in batches for fault in in_threads(verify, batch["image"])]
        good[name], more = _check_split(rows, name, faults, require_captions)
        entries += more
    if quarantine_path is not None:
        write_entries(quarantine_path, entries)
    stop_if_too_many(entries, {name: len(rows) for name, rows in splits.items()}, max_bad_fraction, quarantine_path)
    for what in sorted({entry.dropped for entry in entries}):
        reasons = [entry.reason for entry in entries if entry.dropped == what]
        logger.warning("%ss that are left out: %d (%s).", what.capitalize(), len(reasons), _spell(reasons))
    return (good[next(iter(good))] if single else datasets.DatasetDict(good)), entries


def write_entries(path: str | Path, entries: Iterable[QuarantineEntry]) -> None:
    """Write one JSON object per entry."""
    # ASCII escapes, because U+2028 and half surrogates in a caption would break lines or the encoding.
    atomic_write_text(path, "".join(json.dumps(asdict(entry)) + "\n" for entry in entries))


def stop_if_too_many(
    entries: Iterable[QuarantineEntry], sizes: Mapping[str, int], max_bad_fraction: float, path: str | Path | None
) -> None:
    """Refuse splits of these sizes with a share of invalid rows above `max_bad_fraction`, in [0, 1]."""
    for split, total in sizes.items():
        bad = [entry for entry in entries if entry.dropped == "row" and entry.split == split]
        if not total:
            raise QuarantineError(f"Split {split!r} has no rows. Check dataset_name and split_fractions.")
        if len(bad) == total or len(bad) / total > max_bad_fraction:
            raise QuarantineError(
                f"{len(bad)} of {total} rows of split {split!r} are bad, and max_bad_fraction is {max_bad_fraction}: "
                f"{_spell([entry.reason for entry in bad])}. The first is row {bad[0].row}, image_id {bad[0].image_id!r}: "
                f"{bad[0].detail}. {f'All are in {path}. ' if path else ''}Correct the data or raise max_bad_fraction."
            )


def _spell(reasons: Iterable[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())


class ImageReader:
    """Opens each image of a data set once; `unreadable` has an entry for each row whose image could not be read so far."""

    def __init__(self, ds: datasets.Dataset, *, split: str) -> None:
        self.ids = id_column(ds)
        self.unreadable: dict[int, QuarantineEntry] = {}
        self._images = undecoded(ds.with_format(None)).select_columns("image")
        self._split = split

    def open_all(self, rows: Sequence[int]) -> dict[int, Image.Image]:
        """The readable images of several rows as RGB, decoded in threads."""
        images = {}
        for row, result in zip(rows, in_threads(open_image, self._images[list(rows)]["image"]), strict=True):
            if isinstance(result, ImageError):
                self.unreadable[row] = QuarantineEntry(row, self.ids[row], self._split, result.reason, result.detail)
            else:
                images[row] = result
        return images
