"""Reads a source of captions (folder, Karpathy JSON, table, Hub) into splits of raw rows."""

from __future__ import annotations

import glob
import logging
from dataclasses import replace
from pathlib import Path

import datasets

from hf_captionrl.data.image_folders import (
    METADATA_FILES,
    FolderListing,
    list_images,
    metadata_file,
    metadata_rows,
    report_unnamed,
)
from hf_captionrl.data.published_sources import PUBLISHED, read_published
from hf_captionrl.data.raw_splits import SPLIT_NAMES, Source, SourceArguments, by_split_column, source_of_rows
from hf_captionrl.data.row_files import Row, is_json_lines, parse_json, read_json_lines, read_rows, read_text
from hf_captionrl.data.tgif_msrvtt import find_video_source, read_video_source

__all__ = ["read_source"]

logger = logging.getLogger(__name__)

_ROW_FILES = {".json", ".jsonl", ".ndjson", ".csv"}
_SAVED_FILES = ("state.json", "dataset_dict.json")  # of `save_to_disk`
_DATA_SUFFIXES = {".parquet", ".arrow", ".tar"}  # files of a data set; a .csv or .zip may be anything
_HUB_FILES = "hf://"
_LOADERS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_SUFFIXES = ".jpg, .png, .webp"


def read_source(dataset_name: str, arguments: SourceArguments) -> Source:
    """Determine the kind of `dataset_name` and read it."""
    data_dir, require_captions = arguments.data_dir, arguments.require_captions
    root = None if arguments.image_root is None else Path(arguments.image_root)
    if root is not None and not root.is_dir():
        raise FileNotFoundError(f"image_root ({str(root)!r}) is not a folder. Use the folder that holds the images.")
    path = Path(dataset_name).expanduser()
    if dataset_name.startswith(_HUB_FILES):
        return _read_with_datasets(dataset_name, path, arguments, root)
    if dataset_name == "imagefolder":
        if data_dir is None:
            raise ValueError("dataset_name 'imagefolder' needs a folder. Set data_dir to a folder of images.")
        return _read_image_folder(Path(data_dir).expanduser(), root, require_captions)
    if dataset_name in PUBLISHED:
        return read_published(dataset_name, arguments)
    if video_source := find_video_source(dataset_name, path, data_dir):
        return read_video_source(video_source, root)
    if path.is_file() and path.suffix.lower() in _ROW_FILES:
        return _read_row_file(path, root or (None if data_dir is None else Path(data_dir)))
    if path.is_dir() and _holds_metadata(path):
        return _read_image_folder(path, root, require_captions)
    if path.is_dir() and (listing := _is_bare_folder(path)) is not None:
        return _read_bare_folder(path, listing, root, require_captions)
    if path.suffix.lower() in _ROW_FILES | {".parquet"} and not path.is_file():
        raise FileNotFoundError(f"dataset_name ({dataset_name!r}) is not a file. Check the path.")
    return _read_with_datasets(dataset_name, path, arguments, root)


# --- rows ---------------------------------------------------------------------------------------------------------


def _read_row_file(path: Path, root: Path | None) -> Source:
    if path.suffix.lower() == ".json":
        text = read_text(path)
        # Many files called .json hold one object per line.
        lines = text.lstrip().startswith("{") and is_json_lines(text)
        content = read_json_lines(path) if lines else parse_json(text, str(path))
        if isinstance(content, dict):
            return _read_karpathy(content, path, root)
        if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
            raise ValueError(
                f"{path} must contain a list of objects, one per image. Write it that way, or as JSON lines."
            )
        rows = content
    else:
        rows = read_rows(path)
    return source_of_rows(str(path), rows, str(path), root or path.parent)


def _read_karpathy(content: Row, path: Path, root: Path | None) -> Source:
    images = content.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
        raise ValueError(
            f"{path} is an object with the keys {sorted(content)[:10]}; a Karpathy split has a list `images`. "
            f"Use a Karpathy-split JSON, a list of objects, or JSON lines."
        )
    if not any("sentences" in image for image in images):
        raise ValueError(
            f"{path}: no entry of `images` has `sentences`; the first has {sorted(images[0])}. Annotation files "
            f"of COCO keep captions elsewhere: give the Karpathy-split JSON (dataset_coco.json)."
        )
    if root is None:
        raise ValueError(f"{path} holds paths only. Set image_root to the folder with the images (COCO: of val2014/).")
    unknown = sorted({str(image.get("split", "train")) for image in images} - set(SPLIT_NAMES))
    if unknown:
        raise ValueError(f"{path} has the splits {unknown}; known are {sorted(SPLIT_NAMES)}. Rename them in the file.")
    rows = []
    for image in images:
        parts = [part for part in (image.get("filepath"), image.get("filename")) if isinstance(part, str) and part]
        named = isinstance(image.get("filename"), str)
        # cocoid first: imgid is a position in the file, and other files use the same numbers for other images.
        ids = [image[key] for key in ("cocoid", "imgid", "filename") if image.get(key) is not None]
        sentences = image.get("sentences")
        rows.append(
            {
                "image": "/".join(parts) if named else None,
                "image_id": str(ids[0]) if ids else None,
                "captions": sentences if isinstance(sentences, list) else [],
                "split": image.get("split", "train"),
            }
        )
    return source_of_rows(str(path), rows, str(path), root, "image")


# --- folders ------------------------------------------------------------------------------------------------------


def _split_folders(folder: Path) -> dict[str, Path]:
    return {
        child.name: metadata
        for child in sorted(folder.iterdir())
        if child.is_dir() and child.name in SPLIT_NAMES and (metadata := metadata_file(child)) is not None
    }


def _holds_metadata(folder: Path) -> bool:
    return metadata_file(folder) is not None or bool(_split_folders(folder))


def _read_image_folder(folder: Path, root: Path | None, require_captions: bool) -> Source:
    if not folder.is_dir():
        raise FileNotFoundError(f"data_dir ({str(folder)!r}) is not a folder. Set it to a folder of images.")
    metadata, parts = metadata_file(folder), _split_folders(folder)
    if metadata is not None and parts:
        others = " and ".join(str(path.relative_to(folder)) for path in parts.values())
        raise ValueError(f"{folder} has {metadata.name} and {others}, and only one can be read. Remove the others.")
    if metadata is not None:
        rows = metadata_rows(metadata)
        if root is None:
            report_unnamed(folder, {metadata: rows})
        return source_of_rows(str(folder), rows, str(metadata), root or folder, "file_name")
    if not parts:
        return _read_bare_folder(folder, list_images(folder), root, require_captions)
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    rows_of: dict[Path, list[Row]] = {}
    for name, metadata in parts.items():
        rows = rows_of[metadata] = metadata_rows(metadata)
        for row in rows:
            # Paths are relative to their metadata file; the name of the folder makes them unique over splits.
            if root is None and isinstance(row.get("file_name"), str):
                row["file_name"] = f"{name}/{row['file_name']}"
        splits.setdefault(SPLIT_NAMES[name], []).extend(rows)  # type: ignore[union-attr]
    if root is None:
        report_unnamed(folder, rows_of)
    return Source(str(folder), splits, root or folder, "file_name")


def _read_bare_folder(folder: Path, listing: FolderListing, root: Path | None, require_captions: bool) -> Source:
    """All images of a folder without metadata; they have no captions."""
    found = sorted(child.name for child in folder.iterdir())
    content = f"{found[:10]}{' ...' if len(found) > 10 else ''}" if found else "nothing"
    if not listing.images:
        raise ValueError(
            f"data_dir ({str(folder)!r}) has no {', '.join(METADATA_FILES)} and no images ({_SUFFIXES} and others); it has "
            f"{content}, {listing.describe_others()}. Set data_dir to a folder of images."
        )
    if require_captions:
        raise ValueError(
            f"data_dir ({str(folder)!r}) has no {', '.join(METADATA_FILES)}, nor train/, validation/, test/ with "
            f"one, so its {len(listing.images)} images have no captions; it has {content}. Write one line per image into "
            f'metadata.jsonl: {{"file_name": "a.jpg", "captions": ["...", "..."]}}.'
        )
    listing.report(str(folder))
    if listing.metadata:
        logger.warning(
            "%s: %s is not read. Set data_dir to its folder to use it.", folder, " and ".join(listing.metadata)
        )
    rows: list[Row] = []
    for path in listing.images:
        # image_root, to which links may lead, can differ from the folder that the names are relative to.
        file_name = path if root is None else str((folder / path).absolute())
        rows.append({"file_name": file_name, "image_id": path})
    tops = {path.partition("/")[0] if "/" in path else "" for path in listing.images}
    if tops <= set(SPLIT_NAMES):
        for row in rows:
            row["split"] = row["image_id"].partition("/")[0]
    source = source_of_rows(str(folder), rows, str(folder), root or folder, "file_name")
    return replace(source, has_captions=False)


def _is_bare_folder(folder: Path) -> FolderListing | None:
    """The files of a folder that contains images and no other data; None for any other folder."""
    if any((folder / name).is_file() for name in _SAVED_FILES):
        return None
    listing = list_images(folder)
    return listing if listing.images and not listing.others.keys() & _DATA_SUFFIXES else None


# --- everything else ----------------------------------------------------------------------------------------------


def _read_with_datasets(dataset_name: str, path: Path, arguments: SourceArguments, root: Path | None) -> Source:
    try:
        if is_hub_file := dataset_name.startswith(_HUB_FILES):
            if path.suffix not in _LOADERS:
                raise ValueError(f"hf:// needs files that end in {', '.join(_LOADERS)}, or leave hf://datasets/ out")
            if arguments.revision is not None:
                raise ValueError(
                    f"files on the Hub name their revision: hf://datasets/OWNER/NAME@{arguments.revision}/..."
                )
            loaded = datasets.load_dataset(_LOADERS[path.suffix], data_files=dataset_name)
        elif path.is_dir() and any((path / name).is_file() for name in _SAVED_FILES):
            loaded = datasets.load_from_disk(str(path))
        elif path.is_file():
            kind = path.suffix.lower().lstrip(".")
            if kind not in ("parquet", "arrow"):
                # load_dataset would interpret any other kind as the name of a data set on the Hub.
                raise ValueError(f"a file {path.suffix or 'without a suffix'} holds no table")
            loaded = datasets.load_dataset(kind, data_files=glob.escape(str(path)))  # a name, not a pattern
            root = root or path.parent
        else:
            folder = None if arguments.data_dir is None else str(arguments.data_dir)
            loaded = datasets.load_dataset(
                dataset_name, arguments.dataset_config, revision=arguments.revision, data_dir=folder
            )
    except Exception as error:
        # The Hub raises many kinds of errors (missing file, no network, a script), which have the same remedy.
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise ValueError(
            f"dataset_name {dataset_name!r} could not be loaded ({reason}). "
            f"It must be 'scenes', 'imagefolder' with data_dir, a Karpathy-split JSON with image_root, a .jsonl, .csv "
            f"or .parquet file, a folder, or a data set on the Hub (dataset_config chooses its configuration)."
        ) from error
    # datasets names a file, and a data set saved without splits, "train".
    named = isinstance(loaded, dict) and not path.is_file() and not is_hub_file
    if not isinstance(loaded, dict):
        loaded = {"train": loaded}
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    for name, rows in loaded.items():
        ours = SPLIT_NAMES.get(str(name), str(name))
        earlier = splits.get(ours)
        splits[ours] = rows if earlier is None else datasets.concatenate_datasets([earlier, rows])
    if len(splits) == 1 and (parts := by_split_column(*splits.values())):
        splits, named = parts, True
    return Source(dataset_name, splits, path if root is None and path.is_dir() else root, has_named_splits=named)
