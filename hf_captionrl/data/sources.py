"""Where captions come from: folders, Karpathy's JSON, tables and the Hub, each read into splits of raw rows."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

__all__ = ["SPLIT_NAMES", "Row", "Source", "read_source", "read_text"]

Row = dict[str, Any]

SPLIT_NAMES: dict[str, str] = {
    "train": "train",
    "training": "train",
    "restval": "train",  # Karpathy's 30,504 validation images that everybody trains on
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "validate": "validation",  # MSR-VTT
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""Names that data sets give to their splits, and ours for them."""

_METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_ROW_FILES = {".json", ".jsonl", ".ndjson", ".csv"}


@dataclass
class Source:
    """Raw splits as found.

    Args:
        name (`str`): How to call the source in a message.
        splits (`dict[str, datasets.Dataset | list[dict]]`): Split name to rows.
        root (`Path`, *optional*): Folder that the paths in the image column are relative to, and must not leave.
        image_column (`str`, *optional*): The column where this kind of source keeps its images.
        holds_videos (`bool`): True where that is known to hold videos.
    """

    name: str
    splits: dict[str, datasets.Dataset | list[Row]]
    root: Path | None = None
    image_column: str | None = None
    holds_videos: bool = False


def read_source(
    dataset_name: str,
    *,
    dataset_config: str | None = None,
    revision: str | None = None,
    data_dir: str | Path | None = None,
    image_root: str | Path | None = None,
) -> Source:
    """Find out what `dataset_name` is and read it.

    Args:
        dataset_name (`str`): `"imagefolder"`, a file, a folder or a name on the Hub.
        dataset_config (`str`, *optional*): Configuration of a Hub data set.
        revision (`str`, *optional*): Revision of a Hub data set.
        data_dir (`str` or `Path`, *optional*): The folder of `"imagefolder"`; passed on for others.
        image_root (`str` or `Path`, *optional*): Folder that image paths are relative to.

    Returns:
        `Source`: Raw splits under our split names.

    Raises:
        FileNotFoundError: If a file or folder is not there.
        ValueError: If the source cannot be read as captions.
    """
    from hf_captionrl.data.video_sources import find_video_source, read_video_source  # which builds on this module

    root = None if image_root is None else Path(image_root)
    if root is not None and not root.is_dir():
        raise FileNotFoundError(f"image_root ({str(root)!r}) must be a folder. Give the folder that holds the images.")
    path = Path(dataset_name).expanduser()
    if dataset_name == "imagefolder":
        if data_dir is None:
            raise ValueError("dataset_name 'imagefolder' needs a folder. Set data_dir to one with a metadata.jsonl.")
        return _read_image_folder(Path(data_dir).expanduser(), root)
    if video_source := find_video_source(dataset_name, path, data_dir):
        return read_video_source(video_source, root)
    if path.is_file() and path.suffix.lower() in _ROW_FILES:
        return _read_row_file(path, root or (None if data_dir is None else Path(data_dir)))
    if path.is_dir() and _is_image_folder(path):
        return _read_image_folder(path, root)
    if path.suffix.lower() in _ROW_FILES | {".parquet"} and not path.is_file():
        raise FileNotFoundError(f"dataset_name ({dataset_name!r}) is not a file. Check the path.")
    return _read_with_datasets(dataset_name, path, dataset_config, revision, data_dir, root)


# --- rows ---------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file.

    Args:
        path (`Path`): In UTF-8, with or without a mark of it.

    Returns:
        `str`: The text.

    Raises:
        ValueError: If it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error}). Mend or remove it.") from error


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    # Not splitlines(): it would also cut at U+2028 inside a caption.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            row = _parse(line, f"Line {number} of {path}")
            if not isinstance(row, dict):
                raise ValueError(
                    f'Line {number} of {path} holds a {type(row).__name__}, not an object. Write {{"file_name": ...}}.'
                )
            rows.append(row)
    return rows


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            names = next(lines, [])
            rows: list[Row] = []
            for values in lines:
                if values and len(values) != len(names):
                    cure = 'Put captions with commas into quotes: a.jpg,"a dog, running".'
                    raise ValueError(
                        f"Line {lines.line_num} of {path} has {len(values)} fields, and the first line {len(names)}. "
                        f"{cure if len(values) > len(names) else 'Write a comma for each empty field too.'}"
                    )
                rows += [dict(zip(names, values, strict=True))] if values else []
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid CSV in UTF-8 ({error}). Mend it.") from error
    return rows


def _read_rows(path: Path) -> list[Row]:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return _read_csv(path)
    if suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    return _read_json_lines(path)


def _by_split(rows: Iterable[Row], where: str) -> dict[str, datasets.Dataset | list[Row]]:
    """Rows under our split names; all are `train` where none of them names one."""
    rows = list(rows)
    if not rows:
        raise ValueError(f"{where} holds no rows. Check that it is the right file.")
    known = [isinstance(row.get("split"), str) and row["split"] in SPLIT_NAMES for row in rows]
    if not any(known):
        return {"train": rows}
    if not all(known):
        odd = known.index(False)
        raise ValueError(
            f"{where}: row {odd + 1} (the first is 1) has the split {rows[odd].get('split')!r}; others name one of "
            f"{sorted(SPLIT_NAMES)}. Name one there, too, or rename the column."
        )
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    for row in rows:
        split = splits.setdefault(SPLIT_NAMES[row["split"]], [])
        split.append({key: value for key, value in row.items() if key != "split"})  # type: ignore[union-attr]
    return splits


def _read_row_file(path: Path, root: Path | None) -> Source:
    if path.suffix.lower() == ".json":
        text = read_text(path)
        # Many files called .json hold one object a line.
        lines = text.lstrip().startswith("{") and _is_json_lines(text)
        content = _read_json_lines(path) if lines else _parse(text, str(path))
        if isinstance(content, dict):
            return _read_karpathy(content, path, root)
        if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
            raise ValueError(f"{path} must hold a list of objects, one an image. Write it so, or as JSON lines.")
        rows = content
    else:
        rows = _read_rows(path)
    return Source(str(path), _by_split(rows, str(path)), root or path.parent)


def _is_json_lines(text: str) -> bool:
    first, _, rest = text.strip().partition("\n")
    try:
        json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        return False
    return bool(rest.strip())


def _read_karpathy(content: Row, path: Path, root: Path | None) -> Source:
    images = content.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
        raise ValueError(
            f"{path} is an object with the keys {sorted(content)[:10]}; a Karpathy split has a list `images`. "
            f"Give a Karpathy-split JSON, a list of objects, or JSON lines."
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
        # cocoid first: imgid is only a position in the file, and other files number other images the same.
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
    return Source(str(path), _by_split(rows, str(path)), root, "image")


# --- folders ------------------------------------------------------------------------------------------------------


def _metadata(folder: Path) -> Path | None:
    return next((folder / name for name in _METADATA_FILES if (folder / name).is_file()), None)


def _split_folders(folder: Path) -> dict[str, Path]:
    return {
        child.name: metadata
        for child in sorted(folder.iterdir())
        if child.is_dir() and child.name in SPLIT_NAMES and (metadata := _metadata(child)) is not None
    }


def _is_image_folder(folder: Path) -> bool:
    return _metadata(folder) is not None or bool(_split_folders(folder))


def _read_image_folder(folder: Path, root: Path | None) -> Source:
    if not folder.is_dir():
        raise FileNotFoundError(f"data_dir ({str(folder)!r}) is not a folder. Set it to one with a metadata.jsonl.")
    metadata = _metadata(folder)
    if metadata is not None:
        return Source(str(folder), _by_split(_read_rows(metadata), str(metadata)), root or folder, "file_name")
    parts = _split_folders(folder)
    if not parts:
        found = sorted(child.name for child in folder.iterdir())
        raise ValueError(
            f"data_dir ({str(folder)!r}) has no {', '.join(_METADATA_FILES)}, nor train/, validation/, test/ with "
            f"one; it has {found[:10]}{' ...' if len(found) > 10 else ''}. Write a line an image into metadata.jsonl: "
            f'{{"file_name": "a.jpg", "captions": ["...", "..."]}}.'
        )
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    for name, metadata in parts.items():
        rows = _read_rows(metadata)
        for row in rows:
            # Paths are relative to their metadata file; with the folder in front they stay unique over splits.
            if root is None and isinstance(row.get("file_name"), str):
                row["file_name"] = f"{name}/{row['file_name']}"
        splits.setdefault(SPLIT_NAMES[name], []).extend(rows)  # type: ignore[union-attr]
    return Source(str(folder), splits, root or folder, "file_name")


# --- everything else ----------------------------------------------------------------------------------------------


def _read_with_datasets(
    dataset_name: str,
    path: Path,
    dataset_config: str | None,
    revision: str | None,
    data_dir: str | Path | None,
    root: Path | None,
) -> Source:
    try:
        if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(path))
        elif path.is_file():
            kind = path.suffix.lower().lstrip(".")
            if kind not in ("parquet", "arrow"):
                # load_dataset would take any other kind for the name of a data set on the Hub.
                raise ValueError(f"a file {path.suffix or 'without a suffix'} holds no table")
            loaded = datasets.load_dataset(kind, data_files=glob.escape(str(path)))  # a name, no pattern
            root = root or path.parent
        else:
            folder = None if data_dir is None else str(data_dir)
            loaded = datasets.load_dataset(dataset_name, dataset_config, revision=revision, data_dir=folder)
    except Exception as error:
        # From a missing file to no network to a script: the Hub's errors are many, and the way out is one.
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise ValueError(
            f"dataset_name {dataset_name!r} could not be loaded ({reason}). "
            f"It must be 'scenes', 'imagefolder' with data_dir, a Karpathy-split JSON with image_root, a .jsonl, .csv "
            f"or .parquet file, a folder, or a data set on the Hub (dataset_config chooses its configuration)."
        ) from error
    if not isinstance(loaded, dict):
        loaded = {"train": loaded}
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    for name, rows in loaded.items():
        ours = SPLIT_NAMES.get(str(name), str(name))
        earlier = splits.get(ours)
        splits[ours] = rows if earlier is None else datasets.concatenate_datasets([earlier, rows])
    return Source(dataset_name, splits, path if root is None and path.is_dir() else root)
