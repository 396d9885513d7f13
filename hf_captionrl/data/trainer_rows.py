"""Converts the data sets given to trainers to the columns that trainers read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_captionrl.data.arrow_columns import ColumnView, caption_column, id_column
from hf_captionrl.data.caption_cleaning import clean_caption
from hf_captionrl.data.caption_columns import USUAL_NAMES, replace_column
from hf_captionrl.data.loading import load_captions
from hf_captionrl.data.raw_splits import by_split_column
from hf_captionrl.data.streaming import StreamedCaptions
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = ["evaluation_rows", "training_rows"]

_COLUMNS = {"image", "image_id", "captions"}
_TEXT = ("string", "large_string")
_Stream = datasets.IterableDataset | datasets.IterableDatasetDict
_checked: set[str] = set()


def training_rows(dataset: Any, args: Any = None, *, whole_set_for: str | None = None) -> Any:
    """Training data in the columns that trainers read; every row is checked for captions before training.

    Args:
        dataset (`Any`): What `load_captions` accepts: a `datasets.Dataset`, also with other usual column names and
            without ids; a `DatasetDict`, of which `train` is used; a name or path. Or a `datasets.IterableDataset`.
            None stays None.
        args (`TrainingArguments`, *optional*): `max_steps` must be set for an iterable data set; its
            `accelerator_config.dispatch_batches` becomes False, because batches of captions differ in length.
        whole_set_for (`str`, *optional*): Why a trainer with rewards needs the whole data set; iterable data are
            then refused, and captions may be missing.

    Returns:
        `datasets.Dataset` with `image`, `image_id` and `captions`, the same object if it has them; or
        [`StreamedCaptions`].

    Raises:
        ValueError: If a column is missing or ambiguous, a row has no caption or an empty one, or iterable data cannot be
            used.
    """
    if dataset is None or isinstance(dataset, StreamedCaptions):
        return dataset
    if isinstance(dataset, _Stream):
        return _stream(dataset, args, whole_set_for)
    # Rewards check captions themselves; self-retrieval needs none.
    rewarded = whole_set_for is not None
    rows = _with_columns(dataset, "training", "train", require_captions=not rewarded)
    if not len(rows):
        raise ValueError("The training data hold no rows. Use a data set with at least one image.")
    if whole_set_for is not None:
        _refuse_repeated(rows, whole_set_for)
    if not rewarded and rows._fingerprint not in _checked:
        _refuse_empty(rows)
        _checked.add(rows._fingerprint)
    return rows


def evaluation_rows(dataset: Any) -> Any:
    """Evaluation data in the columns that trainers read; captions may be missing.

    Args:
        dataset (`Any`): As for `training_rows`; of a `DatasetDict`, `validation` is used. In a dict of several data sets,
            each is converted. None stays None.

    Returns:
        `datasets.Dataset`, or a dict of such.

    Raises:
        ValueError: If a column is missing or ambiguous, or the data are iterable.
    """
    if dataset is None or (isinstance(dataset, str) and not Path(dataset).exists()):
        return dataset  # transformers' `eval_dataset` may also be the name of one of several
    if isinstance(dataset, Mapping) and not isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        return {name: evaluation_rows(rows) for name, rows in dataset.items()}
    if isinstance(dataset, _Stream):
        raise ValueError(_refused("eval_dataset", dataset, "evaluation ranks each image among all others"))
    return _with_columns(dataset, "evaluation", "validation", require_captions=False)


def _with_columns(dataset: Any, data: str, split: str, **source: Any) -> datasets.Dataset:
    if isinstance(dataset, datasets.Dataset):
        if _is_ready(dataset):
            return dataset
        missing = [
            name
            for name, names in (("image", USUAL_NAMES["image_column"]), ("captions", USUAL_NAMES["caption_column"]))
            if not set(names) & set(dataset.column_names) and (name == "image" or source.get("require_captions", True))
        ]
        if missing:
            raise ValueError(
                f"The {data} data lack the column(s) {missing}; there are {dataset.column_names}. Rename the columns, or "
                "load the data with hf_captionrl.data.loading, which takes image_column and caption_column."
            )
        split = split if by_split_column(dataset) else "all"
    found: Any = load_captions(dataset, split=split, **source)
    given = dataset.get(split) if isinstance(dataset, datasets.DatasetDict) else dataset
    return _with_own_names(found, given) if isinstance(given, datasets.Dataset) else found


def _is_ready(rows: datasets.Dataset) -> bool:
    """Whether the columns have the types that `load_captions` returns: images instead of paths, texts instead of mappings."""
    if not set(rows.column_names) >= _COLUMNS:
        return False
    captions = rows.features["captions"]
    texts = getattr(captions, "feature", captions)
    return isinstance(texts, datasets.Value) and getattr(rows.features["image"], "dtype", None) not in _TEXT


def _with_own_names(rows: datasets.Dataset, given: datasets.Dataset) -> datasets.Dataset:
    """Rows with the captions also under the caller's name, because reward functions use the column names of the data."""
    names = [
        name for name in USUAL_NAMES["caption_column"] if name in set(given.column_names) - set(rows.column_names)
    ]
    if len(rows) != len(given):  # rows of one image were joined
        return rows
    for name in names:
        rows = replace_column(rows, name, ColumnView(given, name), given.features[name])
    return rows


def _refused(name: str, dataset: Any, reason: str) -> str:
    return (
        f"{name} is an {type(dataset).__name__}, which is read row by row, but {reason}. Use a Dataset: "
        "load_dataset without streaming=True, or Dataset.from_list(list(rows.take(n)))."
    )


def _stream(dataset: Any, args: Any, whole_set_for: str | None) -> StreamedCaptions:
    if isinstance(dataset, datasets.IterableDatasetDict):
        raise ValueError(
            f"train_dataset is an IterableDatasetDict of {list(dataset)}. Pass one of them, e.g. ['train']."
        )
    for name, verb in (("cache_image_features", "encodes"), ("cache_pixels", "prepares")):
        if getattr(args, name, None):
            whole_set_for = whole_set_for or f"{name} {verb} every image before training"
    if getattr(args, "image_decoder", "pillow") != "pillow":
        whole_set_for = whole_set_for or f"image_decoder={args.image_decoder!r} reads images by their row"
    if whole_set_for is not None:
        raise ValueError(_refused("train_dataset", dataset, whole_set_for))
    if args is None or args.max_steps <= 0:
        raise ValueError(
            "train_dataset is an IterableDataset, whose length is unknown, and max_steps is not set. Set max_steps to the "
            "number of optimizer steps."
        )
    if args.accelerator_config.dispatch_batches is None:
        # By default accelerate reads on the main process and joins batches, but their texts differ in length.
        args.accelerator_config.dispatch_batches = False
    seed = args.seed if args.data_seed is None else args.data_seed
    return StreamedCaptions(dataset, seed=seed)


def _refuse_repeated(rows: datasets.Dataset, whole_set_for: str) -> None:
    ids = id_column(rows)
    is_repeated = np.bincount(RowLookup(ids).first_rows()) > 1
    if is_repeated.any():
        raise ValueError(
            f"image_id {ids[int(is_repeated.argmax())]!r} occurs in several rows of the training data, and {whole_set_for}: an image "
            "would be its own distractor. Use one row per image, or load the data with load_captions, which joins such rows."
        )


def _refuse_empty(rows: datasets.Dataset) -> None:
    """Refuse rows without captions and empty captions, which would stop training in the middle of an epoch."""
    for row, texts in enumerate(caption_column(rows)):
        empty = next((n for n, text in enumerate(texts) if not isinstance(text, str) or not clean_caption(text)), None)
        if texts and empty is None:
            continue
        fault = "has no caption" if empty is None else f"has an empty caption: captions[{empty}] is {texts[empty]!r}"
        raise ValueError(
            f"train_dataset: row {row} (image_id {rows[row : row + 1]['image_id'][0]!r}) {fault}. Write one, or remove "
            "such rows and captions with hf_captionrl.data.check_captions."
        )
