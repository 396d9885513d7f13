"""Checks every row before training: invalid rows are quarantined and reported; too many of them stop the run."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from PIL import Image

from hf_captionrl.data.columns import (
    CAPTION_REMEDIES,
    CAPTIONS,
    MAX_CAPTION_WORDS,
    TEXTS,
    VIDEO_FRAMES,
    ColumnView,
    arrow_column,
    caption_fault,
    id_column,
    replace_column,
    select_rows,
    to_caption_list,
    undecoded,
)
from hf_captionrl.data.features import source_keys
from hf_captionrl.data.images import (
    IMAGE_REMEDIES,
    MAX_PIXELS,
    ImageError,
    checked_images,
    in_threads,
    open_image,
    or_error,
    verify_image,
    workers,
)
from hf_captionrl.data.video import VIDEO_REMEDIES, verify_video
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.utils.io import atomic_write_text

logger = logging.getLogger(__name__)


_ROWS_AT_ONCE = 256
_REMEDIES = {**IMAGE_REMEDIES, **VIDEO_REMEDIES, **CAPTION_REMEDIES}


@dataclass(frozen=True)
class QuarantineEntry:
    """A row or caption that was removed."""

    row: int  # of the data set that was checked, from 0
    image_id: str
    split: str
    column: str  # "image" or "captions"
    reason: str  # a key of `IMAGE_REMEDIES`, `VIDEO_REMEDIES` or `CAPTION_REMEDIES`
    detail: str  # the value and the rule it broke
    remedy: str
    dropped: Literal["row", "caption"]  # "caption" if the row has valid captions and is kept


@dataclass(frozen=True)
class QuarantineReport:
    """Result of `check_captions`.

    Args:
        rows (`dict[str, int]`): Number of checked rows of each split.
        entries (`tuple[QuarantineEntry, ...]`): Everything that was removed; one entry per invalid row.
        path (`Path`, *optional*): Where the entries were written.
    """

    rows: dict[str, int]
    entries: tuple[QuarantineEntry, ...]
    path: Path | None = None

    def bad_rows(self, split: str | None = None) -> int:
        """Number of rows that were removed, of one split or all."""
        return sum(self.counts("row", split).values())

    @property
    def bad_captions(self) -> int:
        """Number of captions removed from rows that are kept."""
        return sum(self.counts("caption").values())

    def bad_fraction(self, split: str | None = None) -> float:
        """Share of rows that were removed, of one split or all; 0 if there are no rows."""
        total = sum(self.rows.values()) if split is None else self.rows[split]
        return self.bad_rows(split) / total if total else 0.0

    def counts(self, dropped: Literal["row", "caption"] = "row", split: str | None = None) -> dict[str, int]:
        """Removed rows, or captions removed from rows that are kept, by reason; the most frequent first."""
        found = Counter(e.reason for e in self.entries if e.dropped == dropped and split in (None, e.split))
        return dict(found.most_common())

    def summary(self) -> str:
        """One sentence for a log: counts by reason, and the path of the list."""
        total = sum(self.rows.values())
        if not self.entries:
            return f"All {total} rows are valid."
        parts = []
        if self.bad_rows():
            parts.append(f"{self.bad_rows()} of {total} rows are left out ({_spell(self.counts())})")
        if self.bad_captions:
            counts = _spell(self.counts("caption"))
            parts.append(f"{self.bad_captions} captions are left out of rows that are kept ({counts})")
        return "; ".join(parts) + (f". Each with its remedy: {self.path}." if self.path else ".")

    __str__ = summary

    def write(self) -> None:
        """Write one JSON object per entry to `path`, if there is one."""
        if self.path is not None:
            # ASCII escapes, because U+2028 and half surrogates in a caption would break lines or the encoding.
            atomic_write_text(self.path, "".join(json.dumps(asdict(entry)) + "\n" for entry in self.entries))


def _spell(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


class QuarantineError(ValueError):
    """Too many invalid rows to train on: counts by reason and the remedy, with the complete report."""

    def __init__(self, message: str, report: QuarantineReport) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[QuarantineError], tuple[str, QuarantineReport]]:
        return type(self), (str(self), self.report)


def _image_faults(
    ds: datasets.Dataset, mode: Any, max_pixels: int, num_workers: int, cache_dir: str | os.PathLike[str] | None
) -> Iterator[ImageError | None]:
    is_video = VIDEO_FRAMES in ds.column_names
    verify = functools.partial(verify_video if is_video else verify_image, mode=mode, max_pixels=max_pixels)
    fault: Callable[[Any], ImageError | None] = functools.partial(or_error, verify)
    images = undecoded(ds).select_columns("image")
    if cache_dir is None or mode != "full" or is_video or not len(ds):
        # Threads: Pillow's decoders release the interpreter lock, and nothing has to be copied to other processes.
        with ThreadPoolExecutor(max(num_workers, 1)) as pool:
            for batch in images.iter(_ROWS_AT_ONCE):
                yield from (map if num_workers < 2 else pool.map)(fault, batch["image"])
        return
    # Images that were found good before are known by the bytes of their files, and are not decoded.
    keys = source_keys(images, cache_dir, progress="Checking image files", skip_unreadable=True)
    with workers() as pool:

        def is_good(rows: list[int]) -> np.ndarray:
            found = pool.map(fault, images[rows]["image"])
            return np.array([[error is None] for error in found], np.uint8)

        known = checked_images(cache_dir, max_pixels)
        verdicts = known.get_or_compute(keys, is_good, batch_size=_ROWS_AT_ONCE, progress="Checking images")
    for row in range(len(images)):
        # A bad image is read again, for the reason.
        yield None if verdicts[row][0] else fault(images[row]["image"])


def _check_split(
    ds: datasets.Dataset,
    split: str,
    max_caption_words: int,
    require_captions: bool,
    image_faults: Callable[[datasets.Dataset], Iterator[ImageError | None]],
) -> tuple[datasets.Dataset, list[QuarantineEntry]]:
    if missing := sorted({"image", "image_id", "captions"} - set(ds.column_names)):
        raise ValueError(
            f"Split {split!r} has no columns {missing}; it has {ds.column_names}. Load it with load_captions, and set "
            "image_column, caption_column or image_id_column."
        )
    ds = ds.with_format(None)
    ids = id_column(ds)
    times = np.bincount(RowLookup(ids).first_rows())
    if len(ds) and times.max() > 1:
        row = int(times.argmax())
        raise ValueError(
            f"Split {split!r}: image_id {ids[row]!r} is in {times[row]} rows. Use load_captions, which joins such "
            "rows."
        )
    is_kept: np.ndarray = np.zeros(len(ds), bool)
    changed = False
    entries: list[QuarantineEntry] = []

    def good_captions() -> Iterator[list[str | None]]:
        nonlocal changed
        for row, (value, fault) in enumerate(zip(ColumnView[Any](ds, "captions"), image_faults(ds), strict=True)):
            texts = to_caption_list(value)
            faults = [caption_fault(text, max_words=max_caption_words) for text in texts]
            good = [text for text, found in zip(texts, faults, strict=True) if found is None]
            bad = [(found[0], f"captions[{n}]: {found[1]}") for n, found in enumerate(faults) if found is not None]
            changed |= good != value
            is_kept[row] = fault is None and bool(good or not require_captions)
            entry = functools.partial(quarantine_entry, row, ids[row], split)
            if fault is not None:
                entries.append(entry("image", fault.reason, fault.detail, "row"))
            elif is_kept[row]:
                entries.extend(entry("captions", reason, detail, "caption") for reason, detail in bad)
            else:
                reason = bad[0][0] if bad else "caption_missing"
                detail = "; ".join(detail for _, detail in bad) or "the row has no caption"
                entries.append(entry("captions", reason, detail, "row"))
            yield good

    captions = arrow_column(good_captions(), TEXTS)
    if changed:
        ds = replace_column(ds, "captions", captions, CAPTIONS)
    return (ds if is_kept.all() else select_rows(ds, np.flatnonzero(is_kept))), entries


def quarantine_entry(
    row: int, image_id: str, split: str, column: str, reason: str, detail: str, dropped: Literal["row", "caption"]
) -> QuarantineEntry:
    """An entry with the remedy for its reason."""
    return QuarantineEntry(row, image_id, split, column, reason, detail, _REMEDIES[reason], dropped)


def check_captions(
    ds: Any,
    *,
    quarantine_path: str | Path | None = None,
    max_bad_fraction: float = 0.05,
    max_caption_words: int = MAX_CAPTION_WORDS,
    check_images: bool | Literal["header", "full"] = True,
    max_pixels: int = MAX_PIXELS,
    num_workers: int = 0,
    require_captions: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Any, QuarantineReport]:
    """Remove invalid rows and captions from a data set, and report each with its reason.

    A row is invalid if its image cannot be opened or it has no valid caption. In a row with valid captions, only the
    invalid ones are removed. Valid captions are cleaned (`clean_caption`). Images and videos are decoded once and not
    stored.

    Args:
        ds (`datasets.Dataset` or `datasets.DatasetDict`): Data of `load_captions` or `load_caption_splits`.
        quarantine_path (`str` or `Path`, *optional*): File with one JSON object per entry, rewritten by every call and
            empty without entries. With a `DatasetDict` it holds all splits.
        max_bad_fraction (`float`): Largest share of invalid rows in any split, in [0, 1].
        max_caption_words (`int`): Longest valid caption in whitespace words (and 20 times that in characters).
        check_images (`bool`, `"header"` or `"full"`): `True` and `"full"` decode every image; `"header"` reads only
            format and size and does not detect truncated files; `False` does not check images.
        max_pixels (`int`): Largest width * height of a valid image.
        num_workers (`int`): Threads that decode images; 0 and 1 use the caller's thread.
        require_captions (`bool`): False also keeps rows without a valid caption; invalid captions are still removed.
        cache_dir (`str` or `Path`, *optional*): Root of the feature caches. Images that decode are remembered there by the bytes
            of their files, so that the next check does not decode them; missing ones are decoded in as many threads as there are
            cores, whatever `num_workers` is. None: nothing is remembered.

    Returns:
        `tuple[datasets.Dataset | datasets.DatasetDict, QuarantineReport]`: The valid rows, and the report.

    Raises:
        QuarantineError: If the share of invalid rows of a split is too large, or it has no valid row. The file is
            written first.
    """
    if not 0 <= max_bad_fraction <= 1:
        raise ValueError(f"max_bad_fraction is {max_bad_fraction}, but is a share in [0, 1]. Use 0.05, for example.")
    if max_caption_words < 1 or num_workers < 0:
        raise ValueError(
            f"max_caption_words is {max_caption_words} and num_workers {num_workers}. Use at least 1 and 0."
        )
    if check_images not in (True, False, "header", "full"):
        raise ValueError(f"check_images is {check_images!r}. Use True, False, 'header' or 'full'.")

    def image_faults(rows: datasets.Dataset) -> Iterator[ImageError | None]:
        if not check_images:
            return iter([None] * len(rows))
        mode: Any = "full" if check_images is True else check_images
        return _image_faults(rows, mode, max_pixels, num_workers, cache_dir)

    single = isinstance(ds, datasets.Dataset)
    splits = {str(ds.split or "train"): ds} if single else dict(ds)
    good: dict[str, datasets.Dataset] = {}
    entries: list[QuarantineEntry] = []
    for name, rows in splits.items():
        good[name], found = _check_split(rows, name, max_caption_words, require_captions, image_faults)
        entries += found
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
    total, bad, fraction = report.rows[split], report.bad_rows(split), report.bad_fraction(split)
    if total and bad < total and fraction <= max_bad_fraction:
        return
    if not total:
        raise QuarantineError(f"Split {split!r} has no rows. Check dataset_name and split_fractions.", report)
    first = next(entry for entry in report.entries if entry.dropped == "row" and entry.split == split)
    limit = "so nothing is left" if bad == total else f"more than max_bad_fraction ({max_bad_fraction}) allows"
    listed = f"All are in {report.path}" if report.path else "Set quarantine_path to list them all"
    raise QuarantineError(
        f"{bad} of {total} rows of split {split!r} are bad ({fraction:.3f}), {limit}: "
        f"{_spell(report.counts('row', split))}. The first is row {first.row}, image_id {first.image_id!r}: "
        f"{first.detail}; remedy: {first.remedy}. {listed}. "
        f"Correct the data{'' if bad == total else ' or raise max_bad_fraction'}.",
        report,
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
        found = {}
        for row, result in zip(rows, in_threads(open_image)(self._images[list(rows)]["image"]), strict=True):
            if isinstance(result, ImageError):
                place = row, self.ids[row], self._split
                self._entries[row] = quarantine_entry(*place, "image", result.reason, result.detail, "row")
            else:
                found[row] = result
        return found

    def report(self) -> QuarantineReport:
        """The images that could not be read so far; not written yet."""
        entries = tuple(self._entries[row] for row in sorted(self._entries))
        return QuarantineReport({self._split: len(self.ids)}, entries, self._path)
