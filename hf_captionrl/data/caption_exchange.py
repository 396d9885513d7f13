"""Replaces the captions of a data set by those of a file: boosted, simplified, or from another captioner.

Legend: N rows of the data set, M rows of the file.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from hf_captionrl.data.arrow_columns import arrow_column, caption_column, id_column, select_rows
from hf_captionrl.data.caption_columns import replace_column
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = ["exchange_captions"]

logger = logging.getLogger(__name__)
_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
_ROWS_AT_ONCE = 1024


def exchange_captions(
    dataset: datasets.Dataset,
    file: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    column: str = "captions",
) -> datasets.Dataset:
    """Replace the captions of a data set by those of a file, image by image. Ids and captions stay in Arrow.

    Args:
        dataset (`datasets.Dataset`): Columns `image_id` and `captions`.
        file (path or sequence of paths): Parquet or JSON lines with `image_id`, such as `captions.parquet` of `captionrl
            boost`; or several files of one format, such as the shards of `captionrl caption`.
        column (`str`): Column with the captions, a text or a list of texts per row.

    Returns:
        `datasets.Dataset`: The rows whose image is in the file, in order; the others are removed and counted in a warning.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has another format, lacks a column, repeats an image, or has none of the images.
    """
    paths = [Path(file)] if isinstance(file, str | os.PathLike) else [Path(each) for each in file]
    name = paths[0].name if len(paths) == 1 else f"{paths[0].parent.name} ({len(paths)} files)"
    for path in paths:
        if path.suffix not in _READERS:
            raise ValueError(
                f"{str(path)!r} is neither Parquet nor JSON lines. Pass captions.parquet of `captionrl boost`."
            )
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r} with captions.")
    rows = datasets.load_dataset(
        _READERS[paths[0].suffix], data_files=[glob.escape(str(path)) for path in paths], split="train"
    )
    missing = [name for name in ("image_id", column) if name not in rows.column_names]
    if missing:
        raise ValueError(f"{name} lacks the column(s) {missing}; it has {rows.column_names}. Use one of these.")
    found = RowLookup(id_column(rows))
    if number := int((found.first_rows() != np.arange(len(rows))).sum()):
        raise ValueError(f"{name} holds {len(rows)} rows for {len(rows) - number} images. Keep one row per image.")
    texts = caption_column(rows, column)
    has_captions: np.ndarray = np.zeros(len(rows) + 1, bool)  # (M + 1,); the last is row -1
    has_captions[:-1] = np.fromiter(map(bool, texts), bool, len(rows))
    own = id_column(dataset)
    at = found.rows(own)  # (N,)
    kept = np.flatnonzero(has_captions[at])
    if not len(kept):
        raise ValueError(
            f"{name} has none of the {len(own)} images (its ids are like {found.ids[:1]}, theirs like {own[:1]}). Use the captions "
            "of the same split."
        )
    if len(kept) < len(own):
        logger.warning("%s has captions for %d of %d images; the others are left out.", name, len(kept), len(own))

    def new_captions() -> Iterator[list[str]]:
        for start in range(0, len(kept), _ROWS_AT_ONCE):
            yield from texts[at[kept[start : start + _ROWS_AT_ONCE]].tolist()]

    feature = dataset.features["captions"]
    kind = datasets.Features({"captions": feature}).arrow_schema.field("captions").type
    captions: pa.ChunkedArray = arrow_column(new_captions(), kind)
    return replace_column(select_rows(dataset, kept), "captions", captions, feature)
