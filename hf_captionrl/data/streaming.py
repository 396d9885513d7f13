"""Captions of iterable data sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
import torch

from hf_captionrl.data.caption_cleaning import clean_caption, to_caption_list
from hf_captionrl.data.caption_columns import pick_column
from hf_captionrl.data.caption_dataset import CaptionDraw

__all__ = ["StreamedCaptions"]


class StreamedCaptions(CaptionDraw, torch.utils.data.IterableDataset):
    """Images of an iterable data set with one caption each, as items of a `CaptionDataset`.

    Images are opened by the collator, because with several processes each reads the whole stream and keeps its rows.
    The workers of a DataLoader share the shards of the stream.

    Args:
        rows (`datasets.IterableDataset`): An image column and one of captions. Ids come from `image_id`, else they are the
            row numbers.
        seed (`int`): Seed of the draw of a caption.
        name (`str`): Name of the data in messages.

    Raises:
        ValueError: If a column is missing or ambiguous, or images are paths in a text column.
    """

    def __init__(self, rows: datasets.IterableDataset, *, seed: int = 0, name: str = "train_dataset") -> None:
        super().__init__(seed)
        names = rows.column_names
        if names is None:  # a generator without features: its first row shows them
            names = list(next(iter(rows.take(1)), {}))
        self._name = name
        self._image = pick_column(names, "image", "image_column", name)
        self._captions = pick_column(names, "captions", "caption_column", name)
        if isinstance((rows.features or {}).get(self._image), datasets.Image):
            rows = rows.cast_column(self._image, datasets.Image(decode=False))
        self._rows = rows

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._rows.set_epoch(int(epoch))  # the order of a shuffled stream depends on the epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, row in zip(itertools.count(), self._rows):
            yield self._item(number, row)

    def _item(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        image, image_id = row[self._image], row.get("image_id")
        image_id = str(number) if image_id is None else str(image_id)
        where = f"{self._name}: row {number} (image_id {image_id!r})"
        if isinstance(image, str):
            raise ValueError(
                f"{where} holds text as its image, but paths need an image_root, which streams do not have. Load the rows "
                "with load_captions and image_root, or cast the column to datasets.Image."
            )
        captions = [text for text in to_caption_list(row[self._captions]) if text is not None and clean_caption(text)]
        if not captions:
            raise ValueError(
                f"{where} has no caption: {row[self._captions]!r:.60}. Filter such rows out of the stream."
            )
        return {
            "image": image,
            "image_features": None,
            "caption": self.draw(captions, image_id),
            "image_id": image_id,
            "index": number,
        }
