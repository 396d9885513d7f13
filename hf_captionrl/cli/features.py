"""Work on every image of a data set in Parquet parts, and features that parts put into the feature store."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.data.options import LoadedSplit, load_split
from hf_captionrl.utils.parts import MakePart, read_parts

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from hf_captionrl.data import ImageReader
    from hf_captionrl.retrieval import FeatureCache


class ImageParts(MakePart, ABC):
    """Parts with one row per image: `image_id`, [`columns`], and `reason` and `detail` if it is unreadable.

    `ids` is [`ids_digest`] of the images; a process that finds other images stops.
    """

    def __init__(self, options: Any, ids: str, *, only: np.ndarray | None = None) -> None:
        self.options, self.ids, self.only = copy.copy(options), ids, only
        self.batch_size = int(getattr(options, "batch_size", 64))

    def load(self) -> dict[str, Any]:
        split = load_split(
            self.options, quarantine_path=None, require_captions=False, expected_ids=self.ids, only=self.only
        )
        self.reader, made_by = self.load_model(split)
        return made_by

    @abstractmethod
    def load_model(self, split: LoadedSplit) -> tuple[ImageReader, dict[str, Any]]:
        """Load the model; returns the reader of the images, and what the model is."""

    @abstractmethod
    def columns(self) -> Mapping[str, pa.DataType]:
        """Names and types of the columns of a readable image."""

    @abstractmethod
    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        """Columns of the readable images of one batch."""

    def __call__(self, rows: range) -> pa.Table:
        import pyarrow as pa

        found: dict[int, dict[str, Any]] = {}
        for start in range(rows.start, rows.stop, size := self.batch_size):
            found |= self.batch(list(range(start, min(start + size, rows.stop))))
        faults = {entry.row: entry for entry in self.reader.report().entries}
        values = [
            {"image_id": image_id}
            | (found[row] if row in found else {"reason": faults[row].reason, "detail": faults[row].detail})
            for row, image_id in zip(rows, self.reader.ids[rows.start : rows.stop], strict=True)
        ]
        text = pa.string()
        schema = pa.schema({"image_id": text, **self.columns(), "reason": text, "detail": text})
        return pa.Table.from_pylist(values, schema=schema)


# --- Features of a scorer in parts, and from them in the feature store of this machine --------------------------------

_CACHED_ROWS_AT_ONCE = 256


def fill_cache(cache: FeatureCache, keys: Iterable[str], folder: Path) -> None:
    """Put the features of finished parts into a cache, by the keys of their images; unreadable images have none."""
    import numpy as np

    rows = zip(keys, read_parts(folder, ["image"]), strict=True)
    readable = ((key, row["image"]) for key, row in rows if row["image"] is not None)
    while some := list(itertools.islice(readable, _CACHED_ROWS_AT_ONCE)):
        names = [key for key, _ in some]
        if new := cache.missing(names):
            cache.put([names[at] for at in new], np.array([some[at][1] for at in new], np.float32))


class FeatureParts(ImageParts):
    """Features of images by the scorer that evaluates, in the column `image`."""

    def load_model(self, split: LoadedSplit) -> tuple[ImageReader, dict[str, Any]]:
        from hf_captionrl.data import ImageReader
        from hf_captionrl.evaluation.options import held_out_scorer_name, optional_scorer

        self._scorer: Any = optional_scorer(held_out_scorer_name(self.options.dataset, self.options.scorer))
        return ImageReader(split.dataset, split=split.split), {"scorer": self._scorer.signature}

    def columns(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"image": pa.list_(pa.float32())}

    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        images = self.reader.open_all(rows)
        if not images:
            return {}
        features = self._scorer.image_features(list(images.values())).float().cpu().numpy()  # (B, D)
        return {row: {"image": values} for row, values in zip(images, features, strict=True)}
