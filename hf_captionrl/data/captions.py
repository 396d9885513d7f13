"""Load images with captions from anywhere into one shape."""

from __future__ import annotations

import hashlib
import itertools
import logging
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data.columns import replace_column, to_caption_columns, undecoded, with_split
from hf_captionrl.data.sources import read_source
from hf_captionrl.data.video import VIDEO_FRAMES

__all__ = ["SPLITS", "hash_split", "load_caption_splits", "load_captions"]

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
"""The splits that every recipe uses."""

# Enough to tell two numberings apart, without reading a data set of images through.
_OVERLAP_PROBES = 100


def hash_split(ds: datasets.Dataset, fractions: dict[str, float], *, seed: int = 0) -> dict[str, datasets.Dataset]:
    """Divide a data set by the hash of its image ids.

    Images are ranked by hash and cut at the fractions: the sizes are exact, the order of the rows does not matter, and
    adding images moves only those at the cuts. A fraction above 0 gets one image at least, if there are enough; one of 0
    gets none.

    Args:
        ds (`datasets.Dataset`): Data set with unique `image_id`s.
        fractions (`dict[str, float]`): Share of each part in [0, 1]; they add up to 1. The first above 0 takes the remainder.
        seed (`int`): Seed of the hash.

    Returns:
        `dict[str, datasets.Dataset]`: The parts that are not empty, rows in the order they had.

    Raises:
        ValueError: If the fractions are not in [0, 1] or do not add up to 1.
    """
    _check_fractions(fractions)

    def rank(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{ids[row]}".encode("utf-8", "surrogatepass"), digest_size=16).digest()

    ids = ds["image_id"][:]
    order = sorted(range(len(ds)), key=rank)
    names = [name for name, share in fractions.items() if share > 0]
    parts = {}
    start = 0
    for name in reversed(names[1:]):
        size = min(round(fractions[name] * len(ds)) or 1, max(0, len(order) - start - 1))
        parts[name] = order[start : start + size]
        start += size
    parts[names[0]] = order[start:]
    return {name: ds.select(sorted(parts[name])) for name in names if parts[name]}


def _check_fractions(fractions: dict[str, float]) -> None:
    if not all(0 <= share <= 1 for share in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"Split fractions {fractions} must lie in [0, 1] and add up to 1. Correct split_fractions.")


def _carve_missing(
    splits: dict[str, datasets.Dataset], fractions: tuple[float, float, float], seed: int, where: str
) -> dict[str, datasets.Dataset]:
    """Take `validation` and `test`, where the source has none, out of its `train`."""
    shares = dict(zip(SPLITS, fractions, strict=True))
    missing = [name for name in SPLITS[1:] if name not in splits]
    if "train" not in splits or not any(shares[name] for name in missing):
        return splits
    _check_fractions(shares)
    wanted = {name: shares[name] for name in missing}
    # The share of a split that is there stays in train.
    train = shares["train"] + sum(shares[name] for name in SPLITS[1:] if name not in missing)
    parts = hash_split(splits["train"], {"train": train, **wanted}, seed=seed)
    sizes = {name: len(part) for name, part in parts.items()}
    logger.info("%s lacks %s: taken out of train by the hash of image_id: %s.", where, missing, sizes)
    # With a share of 0 nothing is left in train.
    return {**{name: split for name, split in splits.items() if name != "train"}, **parts}


def _tell_splits_apart(splits: dict[str, datasets.Dataset], where: str) -> dict[str, datasets.Dataset]:
    """Make ids unique over the splits: cached features and reports know an image by its id alone."""
    rows = {name: {image_id: row for row, image_id in enumerate(ds["image_id"][:])} for name, ds in splits.items()}
    shared = {}
    for one, other in itertools.combinations(splits, 2):
        common = [image_id for image_id in rows[one] if image_id in rows[other]]
        if common:
            shared[one, other] = common
    for (one, other), common in shared.items():
        left, right = (undecoded(splits[name]).select_columns("image") for name in (one, other))
        if any(left[rows[one][i]] != right[rows[other][i]] for i in common[:_OVERLAP_PROBES]):
            logger.warning("%s: splits number their images alike; image_id becomes '<split>/<id>'.", where)
            return {
                name: replace_column(
                    ds, "image_id", [f"{name}/{i}" for i in ds["image_id"][:]], datasets.Value("string")
                )
                for name, ds in splits.items()
            }
        logger.warning(
            "%s: %d images are in %s and in %s (%s, ...): what is measured on one was seen in the other.",
            *(where, len(common), one, other, common[0]),
        )
    return splits


def _scenes_captions(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """The embedded data with its detailed captions in place of the annotators', if that column is asked for."""
    if column == "captions":
        return rows
    if column != "full_caption":
        raise ValueError(
            f"caption_column is {column!r}, but the embedded data have 'captions' (five annotators) and 'full_caption'."
        )
    texts = [[text] for text in rows[column]]
    return rows.remove_columns("captions").add_column("captions", texts, feature=rows.features["captions"])


def _with_frames(splits: datasets.DatasetDict, num_frames: int) -> datasets.DatasetDict:
    """Splits of videos that are looked at in so many frames."""
    return datasets.DatasetDict(
        {
            name: replace_column(rows, VIDEO_FRAMES, [num_frames] * len(rows), datasets.Value("int32"))
            for name, rows in splits.items()
        }
    )


def load_caption_splits(
    dataset_name: str = "scenes",
    *,
    dataset_config: str | None = None,
    revision: str | None = None,
    data_dir: str | Path | None = None,
    image_root: str | Path | None = None,
    image_column: str = "image",
    caption_column: str = "captions",
    image_id_column: str | None = None,
    split_fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    num_frames: int = 0,
) -> datasets.DatasetDict:
    """Load every split of a caption data set. No code of a data set is ever run, and no image is decoded or fetched.

    `dataset_name` is one of:

    - `"scenes"`: the embedded data, or `"moving_scenes"`, its clips, with `num_frames`;
      `caption_column="full_caption"` takes its detailed captions.
    - `"imagefolder"` with `data_dir`, or the folder itself: `metadata.jsonl` (or .csv, .parquet) with a `file_name`
      and captions a line, in the folder or in `train/`, `validation/`, `test/`.
    - a Karpathy-split JSON (`dataset_coco.json`) with `image_root`; its split `restval` counts as train.
    - a .jsonl, .json, .csv or .parquet file with image paths (relative to `image_root`, else to the file; parquet may
      also hold the images), or a folder of `save_to_disk`.
    - a data set on the Hub.
    - `"tgif"` or `"msr-vtt"` with `data_dir`, or their `.tsv` or `videodata*.json` itself: see `video_sources`.

    With `num_frames` what stands in the image column is a video, in any of them.

    Args:
        dataset_name (`str`): See above.
        dataset_config (`str`, *optional*): Configuration of a Hub data set.
        revision (`str`, *optional*): Revision of a Hub data set.
        data_dir (`str` or `Path`, *optional*): Folder of `"imagefolder"`.
        image_root (`str` or `Path`, *optional*): Folder that paths in the image column are relative to, and that none
            may leave, be it by `..`, a link or from the top.
        image_column (`str`): Column with images, bytes or paths. Where the default is missing, the one column with a
            usual name (`file_name`, `img`, ...) is taken.
        caption_column (`str`): Column with a caption or a list of captions; for the default likewise (`caption`,
            `text`, ...).
        image_id_column (`str`, *optional*): Column with ids. Default: a column `image_id`, else the path, else
            `"<split>-<row>"`. Rows of one image are joined; one id for two images is an error.
        split_fractions (`tuple[float, float, float]`): Shares of train, validation and test, used for those of the
            last two that the source lacks: they are taken out of train by the hash of the image id. `(1, 0, 0)` takes
            none.
        seed (`int`): Seed of that hash.
        num_frames (`int`): 0 for images. For videos the frames of each that are looked at, see `sample_frames`: the
            splits then have a column `video_frames` with that number, and `image` is not decoded on access.

    Returns:
        `datasets.DatasetDict`: Splits with the columns `image` (`datasets.Image`), `image_id` (`str`), `captions`
        (`list[str]`, `None` where the source held no string) and any others. Not checked: see `check_captions`.

    Raises:
        FileNotFoundError: If a file or folder is not there.
        ValueError: If the source cannot be read, a column is missing, a path leads out of the folder of the data, or
            ids are ambiguous.
    """
    if num_frames < 0:
        raise ValueError(f"num_frames is {num_frames}. Use 0 for images, or the frames to look at of each video.")
    if dataset_name in ("scenes", "moving_scenes"):
        moving = dataset_name == "moving_scenes"
        if moving != bool(num_frames):
            raise ValueError(
                f"num_frames is {num_frames}, but {dataset_name!r} are {'clips of 6 frames' if moving else 'images'}. "
                f"Use {'4' if moving else '0'}."
            )
        from hf_captionrl.scenes import load_moving_scenes, load_scenes  # late: only this branch needs the artwork

        made = load_moving_scenes() if moving else load_scenes()
        made = datasets.DatasetDict({n: _scenes_captions(rows, caption_column) for n, rows in made.items()})
        return _with_frames(made, num_frames) if moving else made
    source = read_source(
        dataset_name, dataset_config=dataset_config, revision=revision, data_dir=data_dir, image_root=image_root
    )
    if source.holds_videos and not num_frames:
        raise ValueError(f"{dataset_name!r} holds videos. Set num_frames to the frames to look at of each (8, say).")
    if image_column == "image" and source.image_column is not None:
        # What this kind of source always calls it; a file of another making falls back to the usual names.
        head = next(iter(source.splits.values()))
        names = head.column_names if isinstance(head, datasets.Dataset) else set().union(*head)
        image_column = source.image_column if source.image_column in names else image_column
    splits = {
        name: to_caption_columns(
            rows,
            split=name,
            where=source.name,
            image_root=source.root,
            image_column=image_column,
            caption_column=caption_column,
            image_id_column=image_id_column,
            num_frames=num_frames,
        )
        for name, rows in source.splits.items()
    }
    splits = _tell_splits_apart(splits, source.name)
    splits = _carve_missing(splits, split_fractions, seed, source.name)
    order = [*(name for name in SPLITS if name in splits), *(name for name in splits if name not in SPLITS)]
    return datasets.DatasetDict({name: with_split(splits[name], name) for name in order})


def load_captions(
    dataset_name: str = "scenes", *, split: str | None = "train", **source: Any
) -> datasets.Dataset | datasets.DatasetDict:
    """Load one split of a caption data set, or all.

    Args:
        dataset_name (`str`): As for `load_caption_splits`.
        split (`str`, *optional*): `"train"`, `"validation"`, `"test"`, or another that the source has. `None` gives
            all, which reads the source once instead of once a split.
        source (`Any`): `data_dir`, `image_root`, `image_column` and the other arguments of `load_caption_splits`.

    Returns:
        `datasets.Dataset | datasets.DatasetDict`: The split, or every split if `split` is `None`.

    Raises:
        FileNotFoundError: If a file or folder is not there.
        ValueError: If the source cannot be read, a column or the split is missing, or ids are ambiguous.
    """
    splits = load_caption_splits(dataset_name, **source)
    if split is None:
        return splits
    if split not in splits:
        raise ValueError(
            f"{dataset_name!r} has no split {split!r}; it has {list(splits)}. Choose one of them, or give "
            f"split_fractions a share for it."
        )
    return splits[split]
