"""Opens the images of a data set one by one and records those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import datasets
from PIL import Image

from hf_captionrl.data.arrow_columns import id_column
from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.images import MAX_PIXELS, ImageError, open_image
from hf_captionrl.data.quarantine import (
    QuarantineEntry,
    QuarantineError,
    QuarantineReport,
    quarantine_entry,
    stop_if_too_many,
)
from hf_captionrl.data.source_keys import in_threads

__all__ = ["ImageReader"]

T = TypeVar("T")


class ImageReader:
    """Opens each image of a data set once, and records the images that cannot be read.

    Args:
        ds (`datasets.Dataset`): Columns `image` and `image_id`.
        split (`str`): Name of the split, for the report.
        quarantine_path (`str` or `Path`, *optional*): Where `report` writes its entries.
        max_bad_fraction (`float`): Largest share of unreadable images, in [0, 1].
        max_pixels (`int`): As for `open_image`.
    """

    def __init__(
        self,
        ds: datasets.Dataset,
        *,
        split: str,
        quarantine_path: str | Path | None = None,
        max_bad_fraction: float = 0.05,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.ids = id_column(ds)
        self._images = undecoded(ds.with_format(None)).select_columns("image")
        self._split = split
        self._path = None if quarantine_path is None else Path(quarantine_path)
        self._max_bad_fraction = max_bad_fraction
        self._max_pixels = max_pixels
        self._entries: dict[int, QuarantineEntry] = {}

    def open(self, row: int) -> Image.Image | None:
        """The image of a row.

        Args:
            row (`int`): From 0.

        Returns:
            `PIL.Image.Image | None`: RGB; `None` if it cannot be read (see `report`).

        Raises:
            QuarantineError: As `read`.
        """
        return self.read(row, self._open)

    def open_all(self, rows: Sequence[int]) -> dict[int, Image.Image]:
        """The readable images of several rows, which are decoded in as many threads as there are cores.

        Args:
            rows (`Sequence[int]`): From 0.

        Returns:
            `dict[int, PIL.Image.Image]`: RGB, by row, in the order of `rows`; without those that cannot be read (see `report`).

        Raises:
            QuarantineError: As `read`.
        """
        return self.read_all(rows, in_threads(self._open))

    def _open(self, value: Any) -> Image.Image:
        return open_image(value, max_pixels=self._max_pixels)

    def read(self, row: int, decode: Callable[[Any], T]) -> T | None:
        """Apply a function to the undecoded image of a row.

        Args:
            row (`int`): From 0.
            decode (`Callable`): From the undecoded image, a path or bytes; raises `ImageError` if it cannot be read.

        Returns:
            The result of `decode`; `None` if the image cannot be read (see `report`).

        Raises:
            QuarantineError: If more images cannot be read than `max_bad_fraction` allows. The list is written before.
        """
        try:
            return decode(self._images[row]["image"])
        except ImageError as error:
            self._add(row, error)
        return None

    def read_all(self, rows: Sequence[int], decode: Callable[[list[Any]], Sequence[T | ImageError]]) -> dict[int, T]:
        """Apply a function to the undecoded images of several rows.

        Args:
            rows (`Sequence[int]`): From 0.
            decode (`Callable`): From the undecoded images, paths or bytes, to one result each; an `ImageError` is the result of
                an image that cannot be read.

        Returns:
            `dict[int, T]`: Results by row, in the order of `rows`; without images that cannot be read (see `report`).

        Raises:
            QuarantineError: As `read`.
        """
        found = {}
        for row, result in zip(rows, decode(self._images[list(rows)]["image"]), strict=True):
            if isinstance(result, ImageError):
                self._add(row, result)
            else:
                found[row] = result
        return found

    def _add(self, row: int, error: ImageError) -> None:
        """Record an image that cannot be read; stops if there are too many."""
        self._entries[row] = quarantine_entry(
            row, self.ids[row], self._split, "image", error.reason, error.detail, "row"
        )
        report = self.report()
        try:
            stop_if_too_many(report, self._split, self._max_bad_fraction)
        except QuarantineError:
            report.write()
            raise

    def report(self) -> QuarantineReport:
        """The images that could not be read so far.

        Returns:
            `QuarantineReport`: Not written yet.
        """
        entries = tuple(self._entries[row] for row in sorted(self._entries))
        return QuarantineReport({self._split: len(self.ids)}, entries, self._path)
