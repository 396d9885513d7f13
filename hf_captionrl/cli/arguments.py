"""Arguments that subcommands share, and the data set they name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

__all__ = ["LoadedSplit", "add_common", "add_dataset", "load_split", "positive"]


def positive(text: str) -> int:
    """A whole number of at least 1, as argparse wants its types.

    Args:
        text: What was typed.

    Returns:
        `int`: The number.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def add_common(parser: argparse.ArgumentParser) -> None:
    """Arguments of every subcommand.

    Args:
        parser: The subcommand's.
    """
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object; all else goes to stderr"
    )
    parser.add_argument("--traceback", action="store_true", help="on an error, show where it happened")


def add_dataset(parser: argparse.ArgumentParser, *, split_help: str = "which split (default: %(default)s)") -> None:
    """Arguments that say which images.

    Args:
        parser: The subcommand's.
        split_help: What `--split` means where it is not only what is looked at.
    """
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset",
        default="scenes",
        metavar="NAME",
        help="'scenes' (the embedded world), 'imagefolder' with --data_dir, a Karpathy-split JSON with --image_root, a "
        ".jsonl/.csv/.parquet file, or any data set on the Hub (default: %(default)s)",
    )
    group.add_argument("--split", default="test", help=split_help)
    group.add_argument("--dataset_config", metavar="NAME", help="configuration of a data set on the Hub")
    group.add_argument("--dataset_revision", metavar="REV", help="branch, tag or commit of it")
    group.add_argument("--data_dir", metavar="DIR", help="folder of 'imagefolder'")
    group.add_argument("--image_root", metavar="DIR", help="folder that image paths are relative to")
    group.add_argument("--image_column", default="image", metavar="NAME", help="column with the images")
    group.add_argument("--caption_column", default="captions", metavar="NAME", help="column with the references")
    group.add_argument("--image_id_column", metavar="NAME", help="column with the ids")
    group.add_argument("--max_images", type=positive, metavar="N", help="only the first N images")
    group.add_argument(
        "--max_bad_fraction",
        type=float,
        default=0.05,
        metavar="X",
        help="largest share of unusable rows, in [0, 1]; they are left out and listed (default: %(default)s)",
    )


class LoadedSplit:
    """One split, checked and cut.

    Args:
        dataset: The images that are used.
        all_ids: Ids of the whole split, also of what `--max_images` cut off and of unusable rows.
    """

    def __init__(self, dataset: datasets.Dataset, all_ids: set[str]) -> None:
        self.dataset = dataset
        self.all_ids = all_ids


def load_split(arguments: argparse.Namespace, *, quarantine_path: str | os.PathLike[str]) -> LoadedSplit:
    """Load the split that the arguments name; bad rows are listed in a file.

    Args:
        arguments: With what `add_dataset` added.
        quarantine_path: Where bad rows are listed; written only where rows are bad.

    Returns:
        `LoadedSplit`: The images.

    Raises:
        FileNotFoundError: If the source is not there.
        ValueError: If it cannot be read, the split is missing, or too many rows are bad.
    """
    from hf_captionrl.data import SPLITS, check_captions, load_captions

    rows: Any
    if arguments.dataset == "scenes":
        from hf_captionrl.scenes import load_scenes

        if arguments.split not in SPLITS:
            raise ValueError(f"'scenes' has no split {arguments.split!r}; it has {list(SPLITS)}.")
        # The test split is drawn first, so it is the same without the others, and ready ten times sooner.
        splits = load_scenes(num_train=0, num_validation=0) if arguments.split == "test" else load_scenes()
        rows = splits[arguments.split]
    else:
        rows = load_captions(
            arguments.dataset,
            split=arguments.split,
            dataset_config=arguments.dataset_config,
            revision=arguments.dataset_revision,
            data_dir=arguments.data_dir,
            image_root=arguments.image_root,
            image_column=arguments.image_column,
            caption_column=arguments.caption_column,
            image_id_column=arguments.image_id_column,
        )
    all_ids = set(map(str, rows["image_id"][:]))
    if arguments.max_images is not None:
        rows = rows.select(range(min(arguments.max_images, len(rows))))
    if arguments.dataset != "scenes":
        path = Path(quarantine_path)
        rows, report = check_captions(rows, quarantine_path=path, max_bad_fraction=arguments.max_bad_fraction)
        if not report.entries:
            path.unlink(missing_ok=True)
    return LoadedSplit(rows, all_ids)
