"""Replaces the captions of a data set by those of a file: boosted, simplified, or from another captioner."""

from __future__ import annotations

import glob
import logging
import os
from pathlib import Path

import datasets

from hf_captionrl.data.caption_columns import caption_lists, replace_column

__all__ = ["exchange_captions"]

logger = logging.getLogger(__name__)
_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def exchange_captions(
    dataset: datasets.Dataset, file: str | os.PathLike[str], *, column: str = "captions"
) -> datasets.Dataset:
    """Replace the captions of a data set by those of a file, image by image.

    Args:
        dataset (`datasets.Dataset`): Columns `image_id` and `captions`.
        file: Parquet or JSON lines, such as `captions.parquet` of `captionrl boost`; with `image_id`.
        column (`str`): Column with the captions, a text or a list of texts per row.

    Returns:
        `datasets.Dataset`: The rows whose image is in the file, in order; the others are removed and counted in a warning.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has another format, lacks a column, repeats an image, or has none of the images.
    """
    path = Path(file)
    if path.suffix not in _READERS:
        raise ValueError(
            f"{str(path)!r} is neither Parquet nor JSON lines. Pass captions.parquet of `captionrl boost`."
        )
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r} with captions.")
    rows = datasets.load_dataset(_READERS[path.suffix], data_files=glob.escape(str(path)), split="train")
    missing = [name for name in ("image_id", column) if name not in rows.column_names]
    if missing:
        raise ValueError(f"{path.name} lacks the column(s) {missing}; it has {rows.column_names}. Use one of these.")
    ids = [str(image_id) for image_id in rows["image_id"]]
    captions = dict(zip(ids, caption_lists(rows, column), strict=True))
    if len(captions) < len(ids):
        raise ValueError(f"{path.name} holds {len(ids)} rows for {len(captions)} images. Keep one row per image.")
    own = [str(image_id) for image_id in dataset["image_id"]]
    kept = [row for row, image_id in enumerate(own) if captions.get(image_id)]
    if not kept:
        raise ValueError(
            f"{path.name} has none of the {len(own)} images (its ids are like {ids[:1]}, theirs like {own[:1]}). Use the captions "
            "of the same split."
        )
    if len(kept) < len(own):
        logger.warning("%s has captions for %d of %d images; the others are left out.", path.name, len(kept), len(own))
    chosen = dataset.select(kept)
    texts = [captions[own[row]] for row in kept]
    return replace_column(chosen, "captions", texts, dataset.features["captions"])
