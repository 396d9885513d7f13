"""Loads images with captions from any source, with the same columns."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import logging
import os
import posixpath
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

from hf_captionrl.data.columns import (
    SPLIT_NAMES,
    VIDEO_FRAMES,
    Row,
    Source,
    SourceArguments,
    by_split_column,
    concept_column,
    id_column,
    merge_rows_of_one_image,
    parse_json,
    read_rows,
    read_text,
    replace_column,
    source_of_rows,
    to_caption_columns,
    undecoded,
    with_concepts,
    with_split,
)
from hf_captionrl.data.images import HEIC_REMEDY, HEIC_SUFFIXES, image_formats, outside

logger = logging.getLogger(__name__)

# --- Folders of images -----------------------------------------------------------------------------------------------
# Not by `imagefolder` of `datasets`: it takes folder names for labels and words in file names for splits, follows links,
# and drops files without metadata silently.

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
# Files that systems add: resource forks of macOS, thumbnails of network drives, the recycle bin of Windows.
_SYSTEM_NAMES = {"__macosx", "@eadir", "$recycle.bin", "system volume information", "thumbs.db", "desktop.ini"}


def list_images(folder: Path) -> tuple[list[str], Counter[str]]:
    """Sorted relative paths of the images of a folder and its subfolders, none of them opened, and the number of other files by suffix.

    Hidden files and those of systems are left out; links to folders are not followed.
    """
    formats = set(image_formats())
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in formats}
    images: list[str] = []
    others: Counter[str] = Counter()

    def is_used(name: str) -> bool:
        return not name.startswith(".") and name.lower() not in _SYSTEM_NAMES

    for place, folders, files in os.walk(folder, onerror=lambda error: logger.warning("%s", error)):
        folders[:] = filter(is_used, folders)
        for name in filter(is_used, files):
            path, suffix = Path(place, name).relative_to(folder).as_posix(), os.path.splitext(name)[1].lower()
            if path.encode("utf-8", "ignore").decode() != path:  # other bytes have no place in a table of text
                logger.warning("%s: the name %a is not UTF-8, so the file is not used. Rename it.", folder, path)
            elif suffix in suffixes:
                images.append(path)
            elif name not in METADATA_FILES:
                others[suffix] += 1
    return sorted(images), others


def _describe(others: Counter[str]) -> str:
    kinds = ", ".join(f"{number} {kind or 'without a suffix'}" for kind, number in others.most_common(5)) or "none"
    return kinds + (f"; {HEIC_REMEDY}" if HEIC_SUFFIXES & others.keys() else "")


def _metadata_files(folder: Path) -> dict[str, Path]:
    """The metadata file of a folder, under an empty name, or those of its split folders."""
    names = sorted(child.name for child in folder.iterdir() if child.name in SPLIT_NAMES and child.is_dir())
    paths = [(name, folder / name / file) for name in ("", *names) for file in METADATA_FILES]
    paths = [(name, path) for name, path in paths if path.is_file()]
    files = dict(paths)
    if len(files) < len(paths) or ("" in files and len(files) > 1):
        shown = " and ".join(sorted(path.relative_to(folder).as_posix() for _, path in paths))
        raise ValueError(f"{folder} has {shown}, and only one can be read. Remove the others.")
    return files


def _read_image_folder(folder: Path, root: Path | None, arguments: SourceArguments) -> Source:
    if not folder.is_dir():
        raise FileNotFoundError(f"data_dir ({str(folder)!r}) is not a folder. Set it to a folder of images.")
    if not (files := _metadata_files(folder)):
        return _read_bare_folder(folder, root, arguments)
    splits: dict[str, list[Row]] = {}
    for name, path in files.items():
        rows = read_rows(path)
        for row in rows if name and root is None else ():
            # Paths are relative to their metadata file; the name of the folder makes them unique over splits.
            if isinstance(row.get("file_name"), str):
                row["file_name"] = f"{name}/{row['file_name']}"
        splits.setdefault(SPLIT_NAMES.get(name, ""), []).extend(rows)
    if root is None:
        texts = {value for rows in splits.values() for row in rows for value in row.values() if isinstance(value, str)}
        names = {unicodedata.normalize("NFC", posixpath.normpath(text)) for text in texts}
        images, _ = list_images(folder)
        if unnamed := [path for path in images if unicodedata.normalize("NFC", path) not in names]:
            text = "%s: %d of %d images are not named by any row of the metadata and are not used, such as %r."
            logger.warning(text, folder, len(unnamed), len(images), unnamed[0])
    if list(splits) == [""]:
        return source_of_rows(str(folder), splits[""], str(files[""]), root or folder, "file_name")
    return Source(str(folder), splits, root or folder, "file_name")


def _read_bare_folder(folder: Path, root: Path | None, arguments: SourceArguments) -> Source:
    """All images of a folder without metadata; they have no captions."""
    paths, others = list_images(folder)
    del others[arguments.text_files]  # a Counter: nothing if there are none
    leading_out = {row for row, _ in outside((str(folder / path) for path in paths), root or folder)}
    images = [path for row, path in enumerate(paths) if row not in leading_out]
    if not images or arguments.require_captions:
        raise ValueError(
            f"data_dir ({str(folder)!r}) has no {', '.join(METADATA_FILES)} in it or in train/, validation/, test/, so "
            f"there are no captions of its images ({len(images)}); other files: {_describe(others)}. Write "
            '{"file_name": "a.jpg", "captions": ["...", "..."]} per line.'
        )
    if leading_out:
        text = "%s: links that lead out of the folder are not used (%d), such as %r. Set image_root to a folder that holds both."
        logger.warning(text, folder, len(leading_out), paths[min(leading_out)])
    if others:
        logger.warning("%s: files that are not images are not used: %s.", folder, _describe(others))
    # image_root, to which links may lead, can differ from the folder that the names are relative to.
    rows: list[Row] = [
        {"file_name": path if root is None else str((folder / path).absolute()), "image_id": path} for path in images
    ]
    if {path.split("/")[0] if "/" in path else "" for path in images} <= set(SPLIT_NAMES):
        rows = [row | {"split": row["image_id"].partition("/")[0]} for row in rows]
    return source_of_rows(str(folder), rows, str(folder), root or folder, "file_name", has_captions=False)


# --- Files and data sets ---------------------------------------------------------------------------------------------

_ROW_FILES = {".json", ".jsonl", ".ndjson", ".csv"}
_SAVED_FILES = ("state.json", "dataset_dict.json")  # of `save_to_disk`
_DATA_SUFFIXES = {".parquet", ".arrow", ".tar"}  # files of a data set; a .csv or .zip may be anything


def read_source(dataset_name: str, arguments: SourceArguments) -> Source:
    """Determine the kind of `dataset_name` and read it."""
    data_dir = arguments.data_dir
    root = None if arguments.image_root is None else Path(arguments.image_root)
    if root is not None and not root.is_dir():
        raise FileNotFoundError(f"image_root ({str(root)!r}) is not a folder. Use the folder that holds the images.")
    path = Path(dataset_name).expanduser()
    if dataset_name == "imagefolder":
        if data_dir is None:
            raise ValueError("dataset_name 'imagefolder' needs a folder. Set data_dir to a folder of images.")
        return _read_image_folder(Path(data_dir).expanduser(), root, arguments)
    from hf_captionrl.data import benchmarks

    if dataset_name in benchmarks.PUBLISHED:
        return benchmarks.read_published(dataset_name, arguments)
    if path.suffix.lower() in _ROW_FILES and path.is_file():
        return _read_row_file(path, root or (None if data_dir is None else Path(data_dir)))
    if path.is_dir() and not any((path / name).is_file() for name in _SAVED_FILES):
        images, others = list_images(path)
        if _metadata_files(path) or (images and not others.keys() & _DATA_SUFFIXES):
            return _read_image_folder(path, root, arguments)
    if path.suffix.lower() in _ROW_FILES | {".parquet"} and not path.is_file():
        raise FileNotFoundError(f"dataset_name ({dataset_name!r}) is not a file. Check the path.")
    return _read_with_datasets(dataset_name, path, arguments, root)


def _read_row_file(path: Path, root: Path | None) -> Source:
    is_json = path.suffix.lower() == ".json" and not is_json_lines(text := read_text(path))
    rows: Any = parse_json(text, str(path)) if is_json else read_rows(path)
    if isinstance(rows, dict):
        return _read_coco(rows, path, root)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must contain a list of objects, one per image. Write it that way, or as JSON lines.")
    return source_of_rows(str(path), rows, str(path), root or path.parent)


def is_json_lines(text: str) -> bool:
    """Many files called .json hold one object per line; a single line is one if it names an image and its caption."""
    first, _, rest = text.strip().partition("\n")
    try:
        row = json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        return False
    names = {"image", "image_id", "file_name"}, {"caption", "captions", "text"}
    return isinstance(row, dict) and (bool(rest.strip()) or all(row.keys() & some for some in names))


def karpathy_id(image: Row) -> Any:
    """The id of an image of a Karpathy split, or None."""
    # cocoid first: imgid is a position in the file, and other files use the same numbers for other images.
    return next((image[key] for key in ("cocoid", "imgid", "filename") if image.get(key) is not None), None)


def _read_coco(content: Row, path: Path, root: Path | None) -> Source:
    """A Karpathy split, or COCO's annotations, which have no splits."""
    images: Any = content.get("images") or ()
    captions: dict[Any, list[Any]] = {}
    for note in content.get("annotations") or ():
        if "caption" in note:
            captions.setdefault(note.get("image_id"), []).append(note["caption"])
    if not captions and not any("sentences" in image for image in images):
        raise ValueError(
            f"{path} is an object with the keys {sorted(content)[:10]}; a Karpathy split has `images` with `sentences`, and "
            "COCO's annotations also `annotations` with `image_id` and `caption`. Use dataset_coco.json, "
            "captions_train2017.json, or JSON lines."
        )
    if root is None:
        raise ValueError(
            f"{path} holds paths only. Set image_root to the folder with the images (Karpathy: of val2014/; COCO: train2017)."
        )
    rows: list[Row] = []
    for image in images:
        if captions:
            number = image.get("id")
            rows.append({"image": image.get("file_name"), "image_id": number, "captions": captions.get(number)})
        else:
            row = {
                "image": "/".join(filter(None, (image.get("filepath"), image.get("filename")))),
                "image_id": karpathy_id(image),
            }
            rows.append(row | {"captions": image.get("sentences"), "split": image.get("split", "train")})
    return source_of_rows(str(path), rows, str(path), root, "image")


def _read_with_datasets(dataset_name: str, path: Path, arguments: SourceArguments, root: Path | None) -> Source:
    suffix = path.suffix.lower()
    try:
        if path.is_dir() and any((path / name).is_file() for name in _SAVED_FILES):
            data = datasets.load_from_disk(str(path))
        elif path.is_file():
            if suffix not in (".parquet", ".arrow"):
                # load_dataset would interpret any other kind as the name of a data set on the Hub.
                raise ValueError(f"a file {suffix or 'without a suffix'} holds no table")
            data = datasets.load_dataset(suffix[1:], data_files=glob.escape(str(path)))  # a name, not a pattern
            root = root or path.parent
        else:
            folder = None if arguments.data_dir is None else str(arguments.data_dir)
            config, revision = arguments.dataset_config, arguments.revision
            data = datasets.load_dataset(dataset_name, config, revision=revision, data_dir=folder)
    except Exception as error:
        # The Hub raises many kinds of errors (missing file, no network, a script), which have the same remedy.
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise ValueError(
            f"dataset_name {dataset_name!r} could not be loaded ({reason}). Use 'scenes', 'imagefolder' and "
            "data_dir, Karpathy's or COCO's JSON and image_root, a .jsonl, .csv or .parquet file, a folder, or a Hub data set."
        ) from error
    # datasets names a file "train".
    is_named = not path.is_file()
    return _source_of_splits(dataset_name, data, path if root is None and path.is_dir() else root, is_named)


def _source_of_splits(name: str, data: Any, root: Path | None, is_named: bool = True, **more: Any) -> Source:
    """The parts of a `DatasetDict` under our names, or a data set as `train`."""
    is_named &= isinstance(data, dict)
    splits: dict[str, Any] = {}
    for split, rows in data.items() if isinstance(data, dict) else (("train", data),):
        ours = SPLIT_NAMES.get(str(split), str(split))
        splits[ours] = rows if ours not in splits else datasets.concatenate_datasets([splits[ours], rows])
    if len(splits) == 1 and (parts := by_split_column(*splits.values())):
        splits, is_named = parts, True
    return Source(name, splits, root, has_named_splits=is_named, **more)


# --- Splits ----------------------------------------------------------------------------------------------------------

SPLITS = ("train", "validation", "test")
"""The splits that every recipe uses."""
SPLIT_SHARES = (0.8, 0.1, 0.1)
ALL = "all"
_OVERLAP_PROBES = 100  # enough to detect different images with the same ids, without reading all images


def parse_split(split: str) -> tuple[str, ...]:
    """The names in `--split` and `split=`: a split, several (`"validation+test"`), or none for `"all"`."""
    if split == ALL:
        return ()
    # Karpathy's restval is a part of train, not another name for it.
    names = (name if name == "restval" else SPLIT_NAMES.get(name, name) for name in map(str.strip, split.split("+")))
    return tuple(dict.fromkeys(names))


def join_splits(splits: Mapping[str, datasets.Dataset], names: Iterable[str], where: str) -> datasets.Dataset:
    """Several splits as one data set; all without names."""
    names = list(names) or list(splits)
    if missing := set(names) - splits.keys():
        raise ValueError(
            f"{where} has no split {min(missing)!r}. Use one of {list(splits)}, several ('a+b') or 'all'."
        )
    if len(names) == 1:
        return with_split(splits[names[0]], names[0])
    parts = [splits[name] for name in names]
    # If one split has addresses among its paths, no image is decoded on access.
    if not all(getattr(part.features["image"], "decode", False) for part in parts):
        parts = [undecoded(part) for part in parts]
    # Columns that differ between splits are left out.
    kinds = {(name, str(kind)) for part in parts for name, kind in part.features.items()}
    times = Counter(name for name, _ in kinds)
    parts = [part.select_columns([name for name in part.column_names if times[name] == 1]) for part in parts]
    return with_split(merge_rows_of_one_image(datasets.concatenate_datasets(parts), where), "+".join(names))


def hash_split(ds: datasets.Dataset, fractions: dict[str, float], *, seed: int = 0) -> dict[str, datasets.Dataset]:
    """Divide a data set by the hash of its image ids, or concepts, into the parts that are not empty.

    Sizes are exact; the order of the rows does not matter, and adding images moves only those near the boundaries. A fraction above
    0 gets at least one image, if there are enough; the first above 0 gets the remainder. Concepts stay whole:
    a part ends where one does.
    """
    things = id_column(ds)
    if concept_column(ds) is not None:
        things = [image_id if c in (None, "") else str(c) for c, image_id in zip(ds["concept"], things, strict=True)]
    keys = (f"{seed}/{thing}".encode("utf-8", "surrogatepass") for thing in things)
    digests = [hashlib.blake2b(key, digest_size=16).digest() for key in keys]
    order = sorted(range(len(ds)), key=digests.__getitem__)
    names = [name for name, share in fractions.items() if share > 0]
    parts = {}
    start = 0
    for name in reversed(names[1:]):
        size = min(round(fractions[name] * len(ds)) or 1, max(0, len(order) - start - 1))
        end = low = high = start + size
        while low > start and digests[order[low]] == digests[order[low - 1]]:
            low -= 1
        while start < high < len(order) and digests[order[high]] == digests[order[high - 1]]:
            high += 1
        end = high if high < len(order) and (low == start or high - end < end - low) else low
        parts[name] = order[start:end]
        start = end
    parts[names[0]] = order[start:]
    return {name: ds.select(sorted(parts[name])) for name in names if parts[name]}


def carve_missing(
    splits: dict[str, datasets.Dataset], fractions: tuple[float, float, float], seed: int, where: str
) -> dict[str, datasets.Dataset]:
    """Split missing `validation` and `test` splits off `train`, and log the sizes; `fractions` has all three shares."""
    shares = dict(zip(SPLITS, fractions, strict=True))
    missing = [name for name in SPLITS[1:] if name not in splits]
    if "train" not in splits or not any(shares[name] for name in missing):
        return splits
    # The share of an existing split stays in train.
    train = sum(share for name, share in shares.items() if name not in missing)
    used = {"train": train, **{name: shares[name] for name in missing}}
    parts = hash_split(splits["train"], used, seed=seed)
    logger.warning(
        "%s has no split %s: its %d images are divided by the hash of image_id (seed %d) into %s.",
        *(where, " and ".join(missing), len(splits["train"]), seed),
        ", ".join(f"{len(part)} {name} ({used[name]:.3g})" for name, part in parts.items()),
    )
    # With a share of 0 nothing is left in train.
    return {**{name: split for name, split in splits.items() if name != "train"}, **parts}


def _with_unique_ids(splits: dict[str, datasets.Dataset], where: str) -> dict[str, datasets.Dataset]:
    """Make ids unique over the splits: cached features and reports identify images by id only."""
    rows_of = {name: {image_id: row for row, image_id in enumerate(id_column(ds))} for name, ds in splits.items()}
    for one, other in itertools.combinations(splits, 2):
        if not (common := [image_id for image_id in rows_of[one] if image_id in rows_of[other]]):
            continue
        left, right = (undecoded(splits[name]).select_columns("image") for name in (one, other))
        if any(left[rows_of[one][i]] != right[rows_of[other][i]] for i in common[:_OVERLAP_PROBES]):
            logger.warning("%s: splits use the same ids for different images; image_id becomes '<split>/<id>'.", where)
            text = datasets.Value("string")
            return {
                name: replace_column(ds, "image_id", [f"{name}/{image_id}" for image_id in rows_of[name]], text)
                for name, ds in splits.items()
            }
        logger.warning(
            "%s: images that are in two splits: %d in %s and in %s (%s, ...); results on one split include images of the other.",
            *(where, len(common), one, other, common[0]),
        )
    return splits


# --- What users call -------------------------------------------------------------------------------------------------

_EMBEDDED = ("scenes", "moving_scenes")


def _load_embedded(name: str, arguments: SourceArguments, splits: tuple[str, ...]) -> Source:
    from hf_captionrl.scenes import load_moving_scenes, load_scenes  # late: only this branch needs the artwork
    from hf_captionrl.scenes.dataset import CONFIGURATIONS

    num_frames, column, moving = arguments.num_frames, arguments.caption_column, name == "moving_scenes"
    config = arguments.dataset_config or "captions"
    configs, columns = ["captions"] if moving else sorted(CONFIGURATIONS), ["captions", "full_caption"]
    for option, value, choices in (("dataset_config", config, configs), ("caption_column", column, columns)):
        if value not in choices:
            raise ValueError(f"{option} is {value!r}, but {name!r} has {choices}. Use one of these, or leave it out.")
    if arguments.data_dir or arguments.image_root:
        raise ValueError(f"--data_dir and --image_root are not for {name!r}. Use 'imagefolder', for example.")
    if moving != bool(num_frames):
        raise ValueError(
            f"num_frames is {num_frames}. Use 0 for 'scenes' and 4 for 'moving_scenes', its clips of 6 frames."
        )
    # The test split is drawn first, so it is the same without the others, and 10 times faster.
    sizes: dict[str, Any] = {"num_train": 0, "num_validation": 0} if splits == ("test",) else {}
    made = dict(load_moving_scenes() if moving else load_scenes(**CONFIGURATIONS[config], **sizes))
    for split, rows in made.items():
        if column == "full_caption":
            rows = replace_column(rows, "captions", [[text] for text in rows[column]], rows.features["captions"])
        if moving:
            rows = replace_column(rows, VIDEO_FRAMES, [num_frames] * len(rows), datasets.Value("int32"))
        made[split] = with_concepts(rows, arguments.concept_column, "image", name)
    return Source(name, made)


def _read_splits(data: Any, arguments: SourceArguments, splits: tuple[str, ...] = ()) -> Source:
    """Every split as the source has it, in our columns; of the embedded data perhaps only those in `splits`."""
    if isinstance(data, str) and data in _EMBEDDED:
        return _load_embedded(data, arguments, splits)
    if isinstance(data, str | Path):
        source = read_source(str(data), arguments)
    elif isinstance(data, datasets.Dataset | datasets.DatasetDict):
        root = None if arguments.image_root is None else Path(arguments.image_root)
        source = _source_of_splits("the data set", data, root, in_memory=True)
    else:
        raise ValueError(
            f"The data are a {type(data).__name__}. Use a datasets.Dataset or DatasetDict, a folder, a file or a name; "
            "an IterableDataset becomes one by Dataset.from_list(list(data.take(n)))."
        )
    arguments = replace(arguments, image_root=source.root)
    if arguments.image_column == "image" and source.image_column is not None:
        # The usual name in this kind of source; files without it fall back to the other usual names.
        head = next(iter(source.splits.values()))
        if source.image_column in (head.column_names if isinstance(head, datasets.Dataset) else set().union(*head)):
            arguments = replace(arguments, image_column=source.image_column)
    converted = {
        name: to_caption_columns(rows, arguments, split=name, where=source.name, in_memory=source.in_memory)
        for name, rows in source.splits.items()
    }
    return replace(source, splits=_in_order(_with_unique_ids(converted, source.name)))


def _in_order(splits: Mapping[str, datasets.Dataset]) -> dict[str, datasets.Dataset]:
    """Train, validation and test first."""
    return {name: splits[name] for name in dict.fromkeys([*SPLITS, *splits]) if name in splits}


def load_caption_splits(
    dataset_name: Any = "scenes",
    *,
    split_fractions: tuple[float, float, float] | None = None,
    seed: int = 0,
    **source: Any,
) -> datasets.DatasetDict:
    """Load every split of a caption data set: `load_captions` with `split=None`."""
    return _divided(_read_splits(dataset_name, SourceArguments(**source)), split_fractions, seed)


def _divided(source: Source, fractions: tuple[float, float, float] | None, seed: int) -> datasets.DatasetDict:
    """Every split; missing ones are split off `train`."""
    splits = source.splits
    if source.name not in _EMBEDDED:
        fractions = fractions or ((1.0, 0.0, 0.0) if source.in_memory else SPLIT_SHARES)
        splits = carve_missing(splits, fractions, seed, source.name)
    return datasets.DatasetDict({name: with_split(rows, name) for name, rows in _in_order(splits).items()})


def load_captions(
    dataset_name: Any = "scenes",
    *,
    split: str | None = "train",
    split_fractions: tuple[float, float, float] | None = None,
    seed: int = 0,
    **source: Any,
) -> datasets.Dataset | datasets.DatasetDict:
    """Load one split of a caption data set, several joined, or all. Code of data sets is never run, and no image is decoded or fetched.

    `dataset_name` is one of:

    - `"scenes"`: the embedded data, or `"moving_scenes"`, its clips, with `num_frames`;
      `caption_column="full_caption"` selects the detailed captions, and `dataset_config="alt_text"` or `"shapes"` another
      domain.
    - `"imagefolder"` with `data_dir`, or the folder itself: `metadata.jsonl` (or .csv, .parquet) with a `file_name`
      and captions per line, in the folder or in `train/`, `validation/`, `test/`. With `require_captions=False` also a
      folder that holds only images, with subfolders; ids are the relative paths.
    - a Karpathy-split JSON (`dataset_coco.json`) with `image_root`; its split `restval` becomes part of train. COCO's
      annotations (`captions_train2017.json`) with `image_root="train2017"`, which have no splits.
    - a .jsonl, .json, .csv or .parquet file with image paths (relative to `image_root`, else to the file; parquet may
      also hold the images), or a folder of `save_to_disk`. In CSV several columns `caption` are several captions.
    - a data set on the Hub.
    - a `datasets.Dataset` or `DatasetDict` in memory. Files of an image column are opened wherever they are; paths in a
      text column need `image_root`.
    - `"nocaps"`, `"concadia"`, `"imagecode"`, `"tgif"` or `"msr-vtt"` with `data_dir`, in their published layouts: see
      `hf_captionrl.data.benchmarks`.

    With `num_frames`, the image column of any source contains videos.

    Args:
        dataset_name (`str`, `Path`, `datasets.Dataset` or `datasets.DatasetDict`): See above.
        split (`str`, *optional*): `"train"`, `"validation"`, `"test"`, or another that the source has; several joined by
            `+`, such as `"validation+test"`; `"all"` for every image, undivided. Without splits in the data, `"train"` is
            the share of `split_fractions`, which is logged. `None` gives a `DatasetDict` of the splits.
        split_fractions (`tuple[float, float, float]`, *optional*): Shares of train, validation and test. A validation or
            test split that the source lacks is split off train by the hash of the image id, and the sizes are logged;
            `(1, 0, 0)` leaves train unchanged. None: (0.8, 0.1, 0.1), and (1, 0, 0) for data in memory.
        seed (`int`): Seed of that hash.
        source (`Any`): Fields of [`SourceArguments`]: `data_dir`, `image_root`, `image_column`, ...

    Returns:
        `datasets.Dataset | datasets.DatasetDict`: The images, or every split, with the columns `image` (`datasets.Image`), `image_id` (`str`), `captions`
        (`list[str]`, `None` where the source held no string) and any others. Not checked: see `check_captions`.
    """
    if split is None:
        return load_caption_splits(dataset_name, split_fractions=split_fractions, seed=seed, **source)
    names = parse_split(split)  # before anything is read
    content = _read_splits(dataset_name, SourceArguments(**source), names)
    return join_splits(_divided(content, split_fractions, seed) if names else content.splits, names, content.name)


@dataclass(frozen=True)
class ChosenSplit:
    """Images that a command uses."""

    dataset: datasets.Dataset
    split: str  # a split, several joined by `+`, or "all"
    sizes: dict[str, int]  # number of images of every split of the source; only "all" if it has no splits


def choose_split(
    dataset_name: Any,
    split: str | None,
    *,
    split_fractions: tuple[float, float, float] = SPLIT_SHARES,
    seed: int = 0,
    **source: Any,
) -> ChosenSplit:
    """As `load_captions`, for commands: data are only divided on request; without `split`, `"test"` of several splits, else all."""
    embedded = isinstance(dataset_name, str) and dataset_name in _EMBEDDED
    names = ("test",) if split is None and embedded else parse_split(split or ALL)
    content = _read_splits(dataset_name, SourceArguments(**source), names)
    splits, has_names = content.splits, content.has_named_splits
    sizes = {name: len(rows) for name, rows in splits.items()} if has_names else {ALL: len(splits["train"])}
    if split is None and has_names and content.has_captions and len(splits) > 1:
        names = ("test",)
        if "test" not in splits:
            raise ValueError(
                f"{content.name} has the splits {sizes} and no 'test'. Set split (--split) to one, to several ('a+b') "
                "or to 'all'; split='test' divides it off train."
            )
    if names and not embedded and (any(name not in splits for name in names) or not has_names):
        splits = carve_missing(splits, split_fractions, seed, content.name)
    return ChosenSplit(join_splits(splits, names, content.name), "+".join(names) or ALL, sizes)
