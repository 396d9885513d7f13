"""Checks every row before training: invalid rows are quarantined and reported; too many of them stop the run."""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Sequence
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


@dataclass(frozen=True)
class QuarantineReport:
    """Result of `check_captions`: the number of checked rows of each split, and everything that was left out."""

    rows: dict[str, int]
    entries: tuple[QuarantineEntry, ...]  # one per invalid row
    path: Path | None = None  # where they are written

    def counts(self, dropped: str = "row", split: str | None = None) -> dict[str, int]:
        """Left-out rows, or captions of rows that stay, by reason; the most frequent first."""
        reasons = (e.reason for e in self.entries if e.dropped == dropped and split in (None, e.split))
        return dict(Counter(reasons).most_common())

    def bad_rows(self, split: str | None = None) -> int:
        """Number of rows that were left out, of one split or all."""
        return sum(self.counts("row", split).values())

    def summary(self) -> str:
        """One sentence for a log: counts by reason, and the path of the list."""
        total, counts = sum(self.rows.values()), {kind: self.counts(kind) for kind in ("row", "caption")}
        parts = [
            f"{sum(counts[kind].values())} {what} are left out ({_spell(counts[kind])})"
            for kind, what in (("row", f"of {total} rows"), ("caption", "captions of other rows"))
            if counts[kind]
        ]
        return "; ".join(parts or [f"All {total} rows are valid"]) + (
            f". All are in {self.path}." if parts and self.path else "."
        )

    def write(self) -> None:
        """Write one JSON object per entry to `path`, if there is one."""
        if self.path is not None:
            # ASCII escapes, because U+2028 and half surrogates in a caption would break lines or the encoding.
            atomic_write_text(self.path, "".join(json.dumps(asdict(entry)) + "\n" for entry in self.entries))


def _spell(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


class QuarantineError(ValueError):
    """Too many invalid rows to train on."""


def _check_split(
    ds: datasets.Dataset,
    split: str,
    faults: Sequence[ImageError | None],
    require_captions: bool,
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
) -> tuple[Any, QuarantineReport]:
    """Remove invalid rows and captions from a data set, and report each with its reason.

    A row is invalid if its image cannot be opened or it has no valid caption. In a row with valid captions, only the
    invalid ones are removed. Valid captions are cleaned (`clean_caption`). Images and videos are decoded once, in
    threads.

    Args:
        ds (`datasets.Dataset` or `datasets.DatasetDict`): Data of `load_captions` or `load_caption_splits`.
        quarantine_path (`str` or `Path`, *optional*): File with one JSON object per entry, rewritten by every call and
            empty without entries. With a `DatasetDict` it holds all splits.
        max_bad_fraction (`float`): Largest share of invalid rows in any split, in [0, 1].
        check_images (`bool`): False does not open the images.
        require_captions (`bool`): False also keeps rows without a valid caption; invalid captions are still removed.

    Returns:
        `tuple[datasets.Dataset | datasets.DatasetDict, QuarantineReport]`: The valid rows, and the report.

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
            check = in_threads(verify_video if VIDEO_FRAMES in rows.column_names else verify_image)
            batches = undecoded(rows).select_columns("image").iter(_ROWS_AT_ONCE)
            faults = [fault for batch in batches for fault in check(batch["image"])]
        good[name], more = _check_split(rows, name, faults, require_captions)
        entries += more
    path = None if quarantine_path is None else Path(quarantine_path)
    report = QuarantineReport({name: len(rows) for name, rows in splits.items()}, tuple(entries), path)
    report.write()
    for name in splits:
        stop_if_too_many(report, name, max_bad_fraction)
    if entries:
        logger.warning("%s", report.summary())
    return (good[next(iter(good))] if single else datasets.DatasetDict(good)), report


def stop_if_too_many(report: QuarantineReport, split: str, max_bad_fraction: float) -> None:
    """Refuse a split with a share of invalid rows above `max_bad_fraction`, in [0, 1]."""
    total, bad = report.rows[split], report.bad_rows(split)
    if not total:
        raise QuarantineError(f"Split {split!r} has no rows. Check dataset_name and split_fractions.")
    if bad == total or bad / total > max_bad_fraction:
        first = next(entry for entry in report.entries if entry.dropped == "row" and entry.split == split)
        raise QuarantineError(
            f"{bad} of {total} rows of split {split!r} are bad, and max_bad_fraction is {max_bad_fraction}: "
            f"{_spell(report.counts('row', split))}. The first is row {first.row}, image_id {first.image_id!r}: "
            f"{first.detail}. {f'All are in {report.path}. ' if report.path else ''}Correct the data or raise max_bad_fraction."
        )


class ImageReader:
    """Opens each image of a data set once, and records the images that cannot be read."""

    def __init__(self, ds: datasets.Dataset, *, split: str, quarantine_path: str | Path | None = None) -> None:
        self.ids = id_column(ds)
        self._images = undecoded(ds.with_format(None)).select_columns("image")
        self._split = split
        self._path = None if quarantine_path is None else Path(quarantine_path)
        self._entries: dict[int, QuarantineEntry] = {}

    def open_all(self, rows: Sequence[int]) -> dict[int, Image.Image]:
        """The readable images of several rows as RGB, decoded in threads."""
        images = {}
        for row, result in zip(rows, in_threads(open_image)(self._images[list(rows)]["image"]), strict=True):
            if isinstance(result, ImageError):
                self._entries[row] = QuarantineEntry(row, self.ids[row], self._split, result.reason, result.detail)
            else:
                images[row] = result
        return images

    def report(self) -> QuarantineReport:
        """The images that could not be read so far; not written yet."""
        entries = tuple(self._entries[row] for row in sorted(self._entries))
        return QuarantineReport({self._split: len(self.ids)}, entries, self._path)
