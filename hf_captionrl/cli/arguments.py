"""Arguments that subcommands share, and the data set they name."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

__all__ = ["LoadedSplit", "add_common", "add_dataset", "load_split", "positive", "share"]


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


def share(text: str) -> float:
    """A share in [0, 1), as argparse wants its types.

    Args:
        text: What was typed.

    Returns:
        `float`: The share.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(
            f"must be a share of at least 0 and below 1, got {text!r}. Use 0.1 for a tenth"
        )
    return number


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which images.

    Args:
        parser: The subcommand's.
    """
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset",
        default="scenes",
        metavar="NAME",
        help="'scenes' (the embedded world), 'imagefolder' with --data_dir, a Karpathy-split JSON with --image_root, a "
        "folder, a .jsonl/.csv/.parquet file, or any data set on the Hub (default: %(default)s)",
    )
    group.add_argument(
        "--split",
        metavar="SPLIT",
        help="a split, several ('validation+test'), or 'all' (default: 'test' of data that name several splits, else 'all')",
    )
    group.add_argument(
        "--validation_share",
        type=share,
        default=0.1,
        metavar="X",
        help="where --split names one that the data lack: what of train is validation, by the hash of the ids "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--test_share", type=share, default=0.1, metavar="X", help="likewise what is test (default: %(default)s)"
    )
    group.add_argument(
        "--split_seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of that hash, as in training (default: %(default)s)",
    )
    group.add_argument("--dataset_config", metavar="NAME", help="configuration of a data set on the Hub")
    group.add_argument("--dataset_revision", metavar="REV", help="branch, tag or commit of it")
    group.add_argument("--data_dir", metavar="DIR", help="folder of 'imagefolder', with its subfolders")
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
    """Images of a split, checked, perhaps only the first.

    Args:
        dataset: The images that are used.
        all_ids: Ids of the whole split, also of what `--max_images` left out and of unusable rows.
        split: What they are: a split, several joined by `+`, or `all`.
        sizes: Images of every split that the source has; one entry, `all`, where it names none.
    """

    def __init__(self, dataset: datasets.Dataset, all_ids: set[str], split: str, sizes: dict[str, int]) -> None:
        self.dataset = dataset
        self.all_ids = all_ids
        self.split = split
        self.sizes = sizes


def load_split(
    arguments: argparse.Namespace,
    *,
    quarantine_path: str | os.PathLike[str] | None,
    require_captions: bool = True,
) -> LoadedSplit:
    """Load the images that the arguments name, and say on stderr which they are; bad rows are listed in a file.

    Args:
        arguments: With what `add_dataset` added. `split` is set to what was loaded where it is None.
        quarantine_path: Where bad rows are listed; written only where rows are bad. None: rows are not checked.
        require_captions: Refuse data without captions.

    Returns:
        `LoadedSplit`: The images.

    Raises:
        FileNotFoundError: If the source is not there.
        ValueError: If it cannot be read, the split is missing, or too many rows are bad.
    """
    from hf_captionrl.data import check_captions, choose_split

    embedded = arguments.dataset == "scenes"
    if embedded and (arguments.data_dir is not None or arguments.image_root is not None):
        raise ValueError(
            "--data_dir or --image_root is given, but --dataset is 'scenes', which needs no folder. Use --dataset imagefolder."
        )
    source: dict[str, Any] = {}
    if not embedded:
        source = {
            "dataset_config": arguments.dataset_config,
            "revision": arguments.dataset_revision,
            "data_dir": arguments.data_dir,
            "image_root": arguments.image_root,
            "image_column": arguments.image_column,
            "caption_column": arguments.caption_column,
            "image_id_column": arguments.image_id_column,
            "require_captions": require_captions,
        }
    # Programs that make the arguments themselves may leave these out.
    given = vars(arguments)
    validation, test = given.get("validation_share", 0.1), given.get("test_share", 0.1)
    if validation + test >= 1:
        raise ValueError(
            f"--validation_share {validation} and --test_share {test} leave nothing for train. Lower one of them."
        )
    chosen = choose_split(
        arguments.dataset,
        arguments.split,
        split_fractions=(1 - validation - test, validation, test),
        seed=given.get("split_seed", 0),
        **source,
    )
    arguments.split = chosen.split
    rows: Any = chosen.dataset
    all_ids = set(map(str, rows["image_id"][:]))
    if not embedded:
        print(f"captionrl: {_described(arguments, len(rows), chosen.sizes)}", file=sys.stderr)
    if arguments.max_images is not None:
        rows = rows.select(range(min(arguments.max_images, len(rows))))
    if not embedded and quarantine_path is not None:
        path = Path(quarantine_path)
        rows, report = check_captions(
            rows,
            quarantine_path=path,
            max_bad_fraction=arguments.max_bad_fraction,
            require_captions=require_captions,
        )
        if not report.entries:
            path.unlink(missing_ok=True)
    return LoadedSplit(rows, all_ids, chosen.split, chosen.sizes)


def _described(arguments: argparse.Namespace, number: int, sizes: dict[str, int]) -> str:
    """Which images are looked at, of how many."""
    name = Path(arguments.data_dir if arguments.dataset == "imagefolder" else arguments.dataset).name
    which = f"all {number:,} images" if arguments.split == "all" else f"{number:,} images, split {arguments.split!r}"
    of = ", ".join(f"{size:,} {split}" for split, size in sizes.items())
    whole = "" if list(sizes) == ["all"] and arguments.split == "all" else f" (there are {of})"
    first = "" if arguments.max_images is None else f"; --max_images takes the first {arguments.max_images:,}"
    return f"{name}: {which}{whole}{first}."
