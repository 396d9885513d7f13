"""Loads images with captions from any source, with the same columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data.caption_columns import replace_column, to_caption_columns, with_split
from hf_captionrl.data.raw_splits import SPLIT_NAMES, Source, SourceArguments, by_split_column
from hf_captionrl.data.source_reading import read_source
from hf_captionrl.data.splits import (
    ALL,
    SPLITS,
    carve_missing,
    hash_split,
    join_splits,
    parse_split,
    tell_splits_apart,
)
from hf_captionrl.data.video import VIDEO_FRAMES

__all__ = [
    "SPLITS",
    "SPLIT_SHARES",
    "ChosenSplit",
    "choose_split",
    "hash_split",
    "load_caption_splits",
    "load_captions",
]

SPLIT_SHARES = (0.8, 0.1, 0.1)
"""Shares of train, validation and test for training on data without splits."""

_WHOLE = (1.0, 0.0, 0.0)
_EMBEDDED = ("scenes", "moving_scenes")


def _scenes_captions(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """The embedded data, with the detailed captions instead of the annotators' if `column` is `full_caption`."""
    if column == "captions":
        return rows
    if column != "full_caption":
        raise ValueError(
            f"caption_column is {column!r}, but the embedded data have 'captions' (five annotators) and 'full_caption'."
        )
    texts = [[text] for text in rows[column]]
    return rows.remove_columns("captions").add_column("captions", texts, feature=rows.features["captions"])


def _with_frames(splits: datasets.DatasetDict, num_frames: int) -> datasets.DatasetDict:
    """Splits of videos with the column `VIDEO_FRAMES`."""
    return datasets.DatasetDict(
        {
            name: replace_column(rows, VIDEO_FRAMES, [num_frames] * len(rows), datasets.Value("int32"))
            for name, rows in splits.items()
        }
    )


@dataclass
class _Splits:
    """Every split as the source has it, in our columns; `train` is not divided."""

    name: str
    splits: dict[str, datasets.Dataset]
    has_named_splits: bool = True
    has_captions: bool = True
    in_memory: bool = False


def _load_embedded(name: str, arguments: SourceArguments, splits: tuple[str, ...]) -> _Splits:
    from hf_captionrl.scenes import load_moving_scenes, load_scenes  # late: only this branch needs the artwork
    from hf_captionrl.scenes.dataset import CONFIGURATIONS

    num_frames, caption_column = arguments.num_frames, arguments.caption_column
    config = arguments.dataset_config or "captions"
    moving = name == "moving_scenes"
    if config not in (["captions"] if moving else CONFIGURATIONS):
        raise ValueError(
            f"dataset_config is {config!r}, but {name!r} has {'only captions' if moving else sorted(CONFIGURATIONS)}. Use one of "
            "these, or leave it out."
        )
    if moving != bool(num_frames):
        raise ValueError(
            f"num_frames is {num_frames}, but {name!r} are {'clips of 6 frames' if moving else 'images'}. "
            f"Use {'4' if moving else '0'}."
        )
    if moving:
        made = load_moving_scenes()
    else:
        # The test split is drawn first, so it is the same without the others, and 10 times faster.
        sizes: dict[str, Any] = {"num_train": 0, "num_validation": 0} if splits == ("test",) else {}
        made = load_scenes(**CONFIGURATIONS[config], **sizes)
    made = datasets.DatasetDict({n: _scenes_captions(rows, caption_column) for n, rows in made.items()})
    return _Splits(name, dict(_with_frames(made, num_frames) if moving else made))


def _source_in_memory(data: Any, image_root: str | Path | None) -> Source:
    """A data set in memory; the parts of a `DatasetDict` under our names."""
    root = None if image_root is None else Path(image_root)
    if isinstance(data, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise ValueError(
            f"The data are an {type(data).__name__}, which is read row by row, but all rows are needed at once. Pass it to "
            "SmileTrainer with max_steps, or convert it to a Dataset: Dataset.from_list(list(data.take(n)))."
        )
    if isinstance(data, datasets.Dataset):
        parts = by_split_column(data)
        return Source("the data set", parts or {"train": data}, root, has_named_splits=bool(parts))
    if not isinstance(data, datasets.DatasetDict):
        raise ValueError(
            f"The data are a {type(data).__name__}. Use a datasets.Dataset or DatasetDict, a folder, a file or a name."
        )
    splits: dict[str, Any] = {}
    for name, rows in data.items():
        ours = SPLIT_NAMES.get(str(name), str(name))
        if ours in splits:
            raise ValueError(f"The data have two splits for {ours!r}: {list(data)}. Rename or join them.")
        splits[ours] = rows
    if len(splits) == 1:
        splits = by_split_column(*splits.values()) or splits
    return Source("the data set", splits, root)


def _read_splits(data: Any, arguments: SourceArguments, wanted: tuple[str, ...] = ()) -> _Splits:
    """Every split as the source has it; of the embedded data perhaps only those `wanted`."""
    if isinstance(data, str) and data in _EMBEDDED:
        return _load_embedded(data, arguments, wanted)
    in_memory = not isinstance(data, str | Path)
    source = _source_in_memory(data, arguments.image_root) if in_memory else read_source(str(data), arguments)
    if source.has_videos and not arguments.num_frames:
        raise ValueError(f"{str(data)!r} holds videos. Set num_frames to the number of frames per video, e.g. 8.")
    arguments = replace(arguments, image_root=source.root)
    if arguments.image_column == "image" and source.image_column is not None:
        # The usual name in this kind of source; files without it fall back to the other usual names.
        head = next(iter(source.splits.values()))
        names = head.column_names if isinstance(head, datasets.Dataset) else set().union(*head)
        if source.image_column in names:
            arguments = replace(arguments, image_column=source.image_column)
    splits = {
        name: to_caption_columns(rows, arguments, split=name, where=source.name, in_memory=in_memory)
        for name, rows in source.splits.items()
    }
    splits = tell_splits_apart(splits, source.name)
    return _Splits(source.name, _in_order(splits), source.has_named_splits, source.has_captions, in_memory)


def _in_order(splits: Mapping[str, datasets.Dataset]) -> dict[str, datasets.Dataset]:
    """Train, validation and test first."""
    names = [*(name for name in SPLITS if name in splits), *(name for name in splits if name not in SPLITS)]
    return {name: splits[name] for name in names}


def load_caption_splits(
    dataset_name: Any = "scenes",
    *,
    split_fractions: tuple[float, float, float] | None = None,
    seed: int = 0,
    **source: Any,
) -> datasets.DatasetDict:
    """Load every split of a caption data set. Code of data sets is never run, and no image is decoded or fetched.

    `dataset_name` is one of:

    - `"scenes"`: the embedded data, or `"moving_scenes"`, its clips, with `num_frames`;
      `caption_column="full_caption"` selects the detailed captions, and `dataset_config="alt_text"` or `"shapes"` another
      domain.
    - `"imagefolder"` with `data_dir`, or the folder itself: `metadata.jsonl` (or .csv, .parquet) with a `file_name`
      and captions per line, in the folder or in `train/`, `validation/`, `test/`. With `require_captions=False` also a
      folder that holds only images, with subfolders; ids are the relative paths.
    - a Karpathy-split JSON (`dataset_coco.json`) with `image_root`; its split `restval` becomes part of train.
    - a .jsonl, .json, .csv or .parquet file with image paths (relative to `image_root`, else to the file; parquet may
      also hold the images), or a folder of `save_to_disk`. In CSV several columns `caption` are several captions.
    - a data set on the Hub.
    - a `datasets.Dataset` or `DatasetDict` in memory. Files of an image column are opened wherever they are; paths in a
      text column need `image_root`.
    - `"tgif"` or `"msr-vtt"` with `data_dir`, or their `.tsv` or `videodata*.json` itself: see `data/tgif_msrvtt.py`.

    With `num_frames`, the image column of any source contains videos.

    Args:
        dataset_name (`str`, `Path`, `datasets.Dataset` or `datasets.DatasetDict`): See above.
        split_fractions (`tuple[float, float, float]`, *optional*): Shares of train, validation and test. A validation or
            test split that the source lacks is split off train by the hash of the image id, and the sizes are logged;
            `(1, 0, 0)` leaves train unchanged. None: (0.8, 0.1, 0.1), and (1, 0, 0) for data in memory.
        seed (`int`): Seed of that hash.
        source (`Any`): Fields of [`SourceArguments`]: `data_dir`, `image_root`, `image_column`, ...

    Returns:
        `datasets.DatasetDict`: Splits with the columns `image` (`datasets.Image`), `image_id` (`str`), `captions`
        (`list[str]`, `None` where the source held no string) and any others. Not checked: see `check_captions`.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: If the source cannot be read, a column is missing or ambiguous, a path leaves the folder of the data,
            or ids are ambiguous.
    """
    return _carved(_read_splits(dataset_name, SourceArguments(**source)), split_fractions, seed)


def _carved(found: _Splits, split_fractions: tuple[float, float, float] | None, seed: int) -> datasets.DatasetDict:
    """Every split; missing ones are split off `train`."""
    if found.name in _EMBEDDED:
        return datasets.DatasetDict(found.splits)
    fractions = split_fractions or (_WHOLE if found.in_memory else SPLIT_SHARES)
    splits = carve_missing(found.splits, fractions, seed, found.name)
    return datasets.DatasetDict({name: with_split(rows, name) for name, rows in _in_order(splits).items()})


def load_captions(
    dataset_name: Any = "scenes",
    *,
    split: str | None = "train",
    split_fractions: tuple[float, float, float] | None = None,
    seed: int = 0,
    **source: Any,
) -> datasets.Dataset | datasets.DatasetDict:
    """Load one split of a caption data set, several joined, or all.

    Args:
        dataset_name (`str`, `Path`, `datasets.Dataset` or `datasets.DatasetDict`): As for `load_caption_splits`.
        split (`str`, *optional*): `"train"`, `"validation"`, `"test"`, or another that the source has; several joined by
            `+`, such as `"validation+test"`; `"all"` for every image, undivided. Without splits in the data, `"train"` is
            the share of `split_fractions`, which is logged. `None` gives a `DatasetDict` of the splits.
        split_fractions (`tuple[float, float, float]`, *optional*): As for `load_caption_splits`.
        seed (`int`): As for `load_caption_splits`.
        source (`Any`): Fields of [`SourceArguments`]: `data_dir`, `image_root`, `image_column`, ...

    Returns:
        `datasets.Dataset | datasets.DatasetDict`: The images, or every split if `split` is `None`.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: If the source cannot be read, a column or the split is missing, or ids are ambiguous.
    """
    if split is None:
        return load_caption_splits(dataset_name, split_fractions=split_fractions, seed=seed, **source)
    names = parse_split(split)  # before anything is read
    found = _read_splits(dataset_name, SourceArguments(**source), names)
    if not names:
        return join_splits(found.splits, (), found.name)
    return join_splits(_carved(found, split_fractions, seed), names, found.name)


@dataclass(frozen=True)
class ChosenSplit:
    """Images that a command uses.

    Args:
        dataset (`datasets.Dataset`): The images.
        split (`str`): Their name: a split, several joined by `+`, or `"all"`.
        sizes (`dict[str, int]`): Number of images of every split of the source; only `"all"` if it has no splits.
    """

    dataset: datasets.Dataset
    split: str
    sizes: dict[str, int]


def choose_split(
    dataset_name: Any,
    split: str | None,
    *,
    split_fractions: tuple[float, float, float] = SPLIT_SHARES,
    seed: int = 0,
    **source: Any,
) -> ChosenSplit:
    """Load images to caption, evaluate, mine or show. Unlike in training, data are only divided on request.

    Args:
        dataset_name (`Any`): As for `load_captions`.
        split (`str`, *optional*): As for `load_captions`. None: `"test"` of data with several splits, else `"all"`.
        split_fractions (`tuple[float, float, float]`): Shares for a requested split that the source does not have.
        seed (`int`): Seed of the hash that then divides the data; use that of the training run.
        source (`Any`): As for `load_captions`.

    Returns:
        `ChosenSplit`: The images.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: As `load_captions`, or if `split` is None and the data have several splits, but not `"test"`.
    """
    embedded = isinstance(dataset_name, str) and dataset_name in _EMBEDDED
    names = ("test",) if split is None and embedded else parse_split(split or ALL)
    found = _read_splits(dataset_name, SourceArguments(**source), names)
    splits = found.splits
    sizes = (
        {name: len(rows) for name, rows in splits.items()} if found.has_named_splits else {ALL: len(splits["train"])}
    )
    if split is None and found.has_named_splits and found.has_captions and len(splits) > 1:
        names = ("test",)
        if "test" not in splits:
            raise ValueError(
                f"{found.name} has the splits {sizes} and no 'test'. Set split (--split) to one of them, to several "
                "('a+b') or to 'all'; 'test' is split off train, as in training."
            )
    if embedded or not names:
        return ChosenSplit(join_splits(splits, names, found.name), "+".join(names) or ALL, sizes)
    if any(name not in splits for name in names) or not found.has_named_splits:
        splits = carve_missing(splits, split_fractions, seed, found.name)
    return ChosenSplit(join_splits(splits, names, found.name), "+".join(names), sizes)
