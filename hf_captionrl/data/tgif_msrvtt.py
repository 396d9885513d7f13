"""Reads videos with captions in the formats of TGIF (a table of addresses) and MSR-VTT (JSON).

TGIF (Li et al. 2016, "TGIF: A New Dataset and Benchmark on Animated GIF Description"): `tgif-v1.0.tsv` holds an address
and a caption per line, `splits/train.txt`, `val.txt` and `test.txt` an address per line. Nothing is fetched: the GIF of
`https://.../tumblr_a1.gif` is the file `tumblr_a1.gif`, in `gifs/` beside the table or in `image_root`. A table may also
hold paths relative to that folder.

MSR-VTT (Xu et al. 2016, "MSR-VTT: A Large Video Description Dataset for Bridging Video and Language"):
`videodatainfo.json` holds `videos` with `video_id` and `split`, and `sentences` with `video_id` and `caption`; the film
of `video7` is `video7.mp4` (or another kind of film), in `videos/` beside the file or in `image_root`, or in a folder of
either. It also comes as two files, `train_val_videodatainfo.json` and `test_videodatainfo.json`, with separate film folders
(`TrainValVideo/`, `TestVideo/`); all such files of a folder are read together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_captionrl.data.raw_splits import SPLIT_NAMES, Source
from hf_captionrl.data.row_files import Row, parse_json, read_text
from hf_captionrl.data.video_files import VIDEO_SUFFIXES

__all__ = ["find_video_source", "read_video_source"]

logger = logging.getLogger(__name__)

_PARTS = "*videodatainfo*.json"  # of which there may be several
_PATTERNS = {"tgif": ("tgif*.tsv", "*.tsv"), "msr-vtt": (_PARTS, "*.json")}
_SPLIT_FILES = ("train", "val", "test")


def find_video_source(dataset_name: str, path: Path, data_dir: str | Path | None) -> list[Path]:
    """The files that describe a set of videos; empty if the source is not such a set."""
    name = dataset_name.lower()
    if name not in _PATTERNS:
        known = path.suffix.lower() == ".tsv" or (path.suffix.lower() == ".json" and "videodata" in path.name)
        return [path] if known and path.is_file() else []
    if data_dir is None:
        raise ValueError(f"dataset_name {name!r} needs a folder. Set data_dir to the one with {_PATTERNS[name][0]}.")
    folder = Path(data_dir).expanduser()
    for pattern in _PATTERNS[name]:
        found = sorted(folder.glob(pattern))
        if len(found) > 1 and pattern != _PARTS:
            names = [file.name for file in found[:5]]
            raise ValueError(f"data_dir ({str(folder)!r}) holds {names}. Use one of them as dataset_name.")
        if found:
            return found
    raise FileNotFoundError(
        f"data_dir ({str(folder)!r}) holds no {_PATTERNS[name][0]}. Set it to the folder with one."
    )


def read_video_source(paths: list[Path], root: Path | None) -> Source:
    """Read the files that describe a set of videos."""
    if paths[0].suffix.lower() == ".tsv":
        return _read_tgif(paths[0], root or _folder(paths[0], "gifs"))
    return _read_msr_vtt(paths, root or _folder(paths[0], "videos"))


def _folder(path: Path, name: str) -> Path:
    return path.parent / name if (path.parent / name).is_dir() else path.parent


def _lines(path: Path) -> list[str]:
    return [line.rstrip("\r") for line in read_text(path).split("\n")]


def _local(address: str) -> str:
    """File name of an address; a path is returned unchanged."""
    return address.split("?")[0].rstrip("/").rpartition("/")[2] if "://" in address else address


def _read_tgif(path: Path, root: Path) -> Source:
    captions: dict[str, list[str]] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        address, tab, caption = line.partition("\t")
        if not tab:
            raise ValueError(f"Line {number} of {path} has no tab. Write an address or path, a tab and a caption.")
        if not Path(_local(address.strip())).name:
            raise ValueError(
                f"Line {number} of {path} does not name a file: {address!r}. Write an address or path before the tab."
            )
        captions.setdefault(address.strip(), []).append(caption)
    files: dict[str, str] = {}
    for address in captions:
        if files.setdefault(_local(address), address) != address:
            raise ValueError(
                f"{path}: {files[_local(address)]!r} and {address!r} have the same file name. Save them under different "
                "names and write those names instead of the addresses."
            )
    split_of: dict[str, str] = {}
    for name in _SPLIT_FILES:
        for folder in (path.parent / "splits", path.parent):
            if (folder / f"{name}.txt").is_file():
                split_of |= {line.strip(): name for line in _lines(folder / f"{name}.txt") if line.strip()}
                break
    if split_of:
        lost = [address for address in captions if address not in split_of]
        if lost:
            logger.warning("%s: %d videos are not in any split and are skipped (%s, ...).", path, len(lost), lost[0])
    rows = (
        (_local(address), str(Path(_local(address)).with_suffix("")), texts, split_of.get(address, "train"))
        for address, texts in captions.items()
        if not split_of or address in split_of
    )
    return _source(str(path), root, rows)


def _read_json(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Videos and sentences of an MSR-VTT file."""
    content = parse_json(read_text(path), str(path))
    parts: Any = [content.get(key) for key in ("videos", "sentences")] if isinstance(content, dict) else [None]
    if not all(
        isinstance(part, list) and all(isinstance(row, dict) and "video_id" in row for row in part) for part in parts
    ):
        raise ValueError(
            f"{path} has no lists 'videos' and 'sentences' with a video_id per row. Use videodatainfo.json."
        )
    return parts[0], parts[1]


def _read_msr_vtt(paths: list[Path], root: Path) -> Source:
    captions: dict[str, list[Any]] = {}
    split_of: dict[str, str] = {}
    file_of: dict[str, Path] = {}
    for path in paths:
        videos, sentences = _read_json(path)
        for row in videos:
            name = str(row["video_id"])
            if name in file_of:
                raise ValueError(
                    f"{name} is twice in {path}. Remove one of the two."
                    if file_of[name] == path
                    else f"{name} is in {file_of[name]} and in {path}. Use only one of these files as dataset_name."
                )
            file_of[name] = path
            split_of[name] = row.get("split", "train")
        for row in sentences:
            captions.setdefault(str(row["video_id"]), []).append(row.get("caption"))
    present: dict[str, str] = {}
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in VIDEO_SUFFIXES | {".gif"} and file.stem in split_of:
            found = file.relative_to(root).as_posix()
            if present.setdefault(file.stem, found) != found and Path(present[file.stem]).parent != Path(found).parent:
                raise ValueError(
                    f"{root} holds {present[file.stem]} and {found}. Keep one of them, or set image_root to its folder."
                )
    rows = (
        (present.get(name, f"{name}.mp4"), name, captions.get(name, []), split) for name, split in split_of.items()
    )
    return _source(", ".join(map(str, paths)), root, rows)


def _source(name: str, root: Path, rows: Iterable[tuple[str, str, list[str], str]]) -> Source:
    """A source from rows of file, id, captions and split."""
    splits: dict[str, Any] = {}
    for file, image_id, captions, split in rows:
        if split not in SPLIT_NAMES:
            raise ValueError(f"{name} has a split {split!r}; known are {sorted(SPLIT_NAMES)}. Rename it in the file.")
        row: Row = {"image": file, "image_id": image_id, "captions": captions}
        splits.setdefault(SPLIT_NAMES[split], []).append(row)
    if not splits:
        raise ValueError(f"{name} holds no captioned videos. Check that it is the right file.")
    return Source(name, splits, root, "image", has_videos=True)
