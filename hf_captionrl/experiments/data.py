"""The images and scorers of a recipe."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data import SPLITS, check_captions, exchange_captions, load_caption_splits
from hf_captionrl.data.caption_simplifying import scene_simplifier, simplify_captions, spacy_simplifier
from hf_captionrl.engine import shard_files
from hf_captionrl.evaluation.arguments import EMBEDDED
from hf_captionrl.evaluation.paper_columns import MORE_REFERENCES
from hf_captionrl.experiments.arguments import DataArguments
from hf_captionrl.retrieval import default_cache_dir

__all__ = ["describe_data", "load_data"]

logger = logging.getLogger(__name__)


def load_data(
    arguments: DataArguments,
    *,
    output_dir: str | os.PathLike[str],
    seed: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    is_training: bool = True,
) -> datasets.DatasetDict:
    """Load, check and divide the data; invalid rows are written to `quarantine.jsonl`.

    Data without named splits are divided by `validation_share` and `test_share`; the sizes are logged.

    Args:
        arguments: Which data.
        output_dir: Folder of the quarantine file.
        seed: Seed of the division; by default `arguments.split_seed`.
        cache_dir: Root of the feature caches, which remember checked images; by default `default_cache_dir()`.
        is_training: Whether anything is trained. If not, `arguments.table_split` may be any split of the data.

    Returns:
        `datasets.DatasetDict`: `train`, `validation`, `test`; all three are the split of the table if it is another one.

    Raises:
        ValueError: If too many rows are invalid, or a column or split is missing.
    """
    if arguments.dataset_name in EMBEDDED and (arguments.data_dir or arguments.image_root):
        raise ValueError(
            f"data_dir or image_root is set, but dataset_name is {arguments.dataset_name!r}. Set --dataset_name imagefolder "
            "too."
        )
    validation, test = arguments.validation_share, arguments.test_share
    splits = load_caption_splits(
        arguments.dataset_name,
        data_dir=arguments.data_dir,
        image_root=arguments.image_root,
        image_column=arguments.image_column,
        caption_column=arguments.caption_column,
        dataset_config=arguments.dataset_config,
        revision=arguments.dataset_revision,
        split_fractions=(1 - validation - test, validation, test),
        seed=arguments.split_seed if seed is None else seed,
        num_frames=arguments.num_frames,
    )
    if not is_training and arguments.table_split not in SPLITS[1:]:
        # Data such as nocaps have nothing to train on, and nothing is trained.
        splits = datasets.DatasetDict(dict.fromkeys(SPLITS, _split_of_table(splits, arguments)))
    missing = [name for name in SPLITS if name not in splits or not len(splits[name])]
    if missing:
        sizes = {name: len(rows) for name, rows in splits.items()}
        raise ValueError(
            f"{arguments.dataset_name!r} has no images for {missing}; it has {sizes}. Give data with a train split, large "
            f"enough for the shares of validation ({validation:g}) and test ({test:g}), or raise --validation_share and "
            "--test_share."
        )
    if is_training and arguments.table_split not in SPLITS[1:]:
        raise ValueError(
            f"table_split is {arguments.table_split!r}. Use 'test' or 'validation'; an evaluation, num_train_epochs 0, can use "
            "any split of the data."
        )
    if arguments.table_split == "validation":
        splits["validation"], splits["test"] = splits["test"], splits["validation"]
    if arguments.train_captions is not None:
        files = _caption_files(arguments.train_captions)
        splits["train"] = exchange_captions(splits["train"], files, column=arguments.train_captions_column)
    logger.info("%s: %s.", arguments.dataset_name, ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items()))
    limits = {
        "train": arguments.max_train_images,
        "validation": arguments.max_eval_images,
        "test": arguments.max_test_images,
    }
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"The limit of images of {name} is {limit}. Use 1 or more, or leave it out.")
        if limit is not None and name in splits:
            splits[name] = splits[name].select(range(min(limit, len(splits[name]))))
    if arguments.dataset_name in EMBEDDED:
        return _with_test_references(
            _simplified(splits, arguments), arguments
        )  # made a moment ago, checked by the tests
    checked, report = check_captions(
        splits,
        quarantine_path=Path(output_dir) / "quarantine.jsonl",
        max_bad_fraction=arguments.max_bad_fraction,
        cache_dir=cache_dir or default_cache_dir(),
    )
    logger.info("%s", report)
    return _with_test_references(_simplified(checked, arguments), arguments)


def _split_of_table(splits: Mapping[str, datasets.Dataset], arguments: DataArguments) -> datasets.Dataset:
    """The images of `arguments.table_split`."""
    if arguments.table_split not in splits:
        raise ValueError(
            f"table_split is {arguments.table_split!r}, but {arguments.dataset_name!r} has {list(splits)}. Use one of them."
        )
    return splits[arguments.table_split]


def _caption_files(path: str) -> Any:
    """A file of captions, or the shards of a finished folder."""
    return shard_files(path) if Path(path).is_dir() else path


def _with_test_references(splits: datasets.DatasetDict, arguments: DataArguments) -> datasets.DatasetDict:
    """The splits; the test split has the references of `arguments.test_references` in the column `more_references`."""
    if arguments.test_references is None:
        return splits
    test = splits["test"]
    files = _caption_files(arguments.test_references)
    found = exchange_captions(test, files, column=arguments.test_references_column)
    if len(found) < len(test):
        raise ValueError(
            f"test_references has {len(found)} of the {len(test)} test images. Use a file of the whole test split, or "
            "max_test_images."
        )
    splits["test"] = test.add_column(MORE_REFERENCES, list(found["captions"]))
    return splits


def _simplified(splits: datasets.DatasetDict, arguments: DataArguments) -> datasets.DatasetDict:
    """The splits with captions shortened by `arguments.simplify`."""
    level: Any = arguments.simplify
    if level is None:
        return splits
    simplifier = scene_simplifier(level) if arguments.dataset_name in EMBEDDED else spacy_simplifier(level)
    return datasets.DatasetDict({name: simplify_captions(rows, simplifier) for name, rows in splits.items()})


def describe_data(arguments: DataArguments, splits: Mapping[str, datasets.Dataset]) -> str:
    """Description of the data for the model card.

    Args:
        arguments: Which data.
        splits: The splits as used.

    Returns:
        `str`: One or two sentences.
    """
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    shortened = {
        None: "",
        "simplest": " shortened to the subject",
        "simpler": " shortened to subject, verb and object",
    }[arguments.simplify]
    if arguments.dataset_name in EMBEDDED:
        what = "clips" if arguments.num_frames else "scenes"
        return (
            f"The embedded world of hf_captionrl: {what} of Noto Emoji sprites composed by rule, each with five captions "
            f"that leave most facts out{',' * bool(shortened)}{shortened} ({sizes} {'videos' if arguments.num_frames else 'images'})."
        )
    of_frames = f" ({arguments.num_frames} frames of each)" if arguments.num_frames else ""
    return f"{sizes} {'videos' if arguments.num_frames else 'images'} with their captions{shortened}{of_frames}."
