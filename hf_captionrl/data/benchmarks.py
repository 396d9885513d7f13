"""Published benchmarks, read from their files. Nothing is downloaded, and pickles are never opened.

| data set | annotation file | images |
|:--|:--|:--|
| nocaps (Agrawal et al. 2019) | `nocaps_val_4500_captions.json`; its domains are splits | `images/` |
| Concadia (Kreiss et al. 2022) | `wiki_split.json`, with a caption and a description per image | `images/` |
| ImageCoDe (Krojer et al. 2022) | `valid_data.json` | `image-sets/`, one folder per set |
| TGIF (Li et al. 2016) | `tgif-v1.0.tsv` and `splits/` | `gifs/` |
| MSR-VTT (Xu et al. 2016) | `videodatainfo.json`, or one for train and validation and one for test | `videos/` |
| TrueMatch (Gaur et al. 2024) | `benchmark/3.json`, `5.json`, `7.json` | COCO |
| CapEnrich's hard pool | names as JSON, text or `.npy` | COCO |
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_captionrl.data.columns import (
    CAPTIONS,
    SPLIT_NAMES,
    VIDEO_SUFFIXES,
    Source,
    SourceArguments,
    clean_caption,
    parse_json,
    read_text,
    to_caption_list,
)
from hf_captionrl.data.images import refuse_outside

logger = logging.getLogger(__name__)

IMAGECODE_SET_SIZE = 10
# From the object classes of COCO to objects that COCO's captions never name.
NOCAPS_DOMAINS = ("in-domain", "near-domain", "out-domain")
PUBLISHED = ("nocaps", "concadia", "imagecode")

_STATIC = "open-images"  # in the name of a set of ten similar photographs; all others are frames of one video
_COCO_NAME = re.compile(r"(?:.*_)?0*(\d+)(?:\.[A-Za-z]+)?")
_FRAME = re.compile(r"img(\d+)\.jpe?g", re.IGNORECASE)


def _existing(path: str | Path, what: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use {what}.")
    return Path(path)


def _read_json(path: str | Path, what: str) -> Any:
    return json.loads(_existing(path, what).read_text(encoding="utf-8"))


@contextlib.contextmanager
def _as_published(path: str | Path, what: str) -> Iterator[None]:
    """Whatever of a file does not have the form that its reader expects becomes one error."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not have the form of {what} ({type(error).__name__}: {error}). Use the published file."
        ) from error


def _list(value: Any) -> list[Any]:
    """A list that is not empty; a text or a mapping would be iterated too."""
    if not isinstance(value, list) or not value:
        raise TypeError(f"{value!r:.60} is not a list with values")
    return value


def _require(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{argument} is {value!r}. Use one of {list(known)}.")


def read_published(name: str, arguments: SourceArguments) -> Source:
    """Read one of `PUBLISHED` from `data_dir`."""
    if arguments.data_dir is None:
        raise ValueError(f"dataset_name {name!r} needs the folder of its files. Set data_dir.")
    folder = Path(arguments.data_dir).expanduser()
    root = Path(arguments.image_root or folder / ("image-sets" if name == "imagecode" else "images"))
    splits: dict[str, Any] = {}
    if name == "nocaps":
        for domain in NOCAPS_DOMAINS:
            rows = load_nocaps(folder / "nocaps_val_4500_captions.json", root, domain=domain)
            splits[domain.replace("-", "_")] = rows
    elif name == "concadia":
        column = arguments.caption_column
        text = "caption" if column == "captions" else column
        for split in ("train", "validation", "test"):
            rows = load_concadia(folder / "wiki_split.json", root, split=split, text=text)
            splits[split] = rows if column == "captions" else rows.rename_column("captions", column)
    else:
        sets = load_imagecode(folder / "valid_data.json", root)
        texts: dict[int, list[str]] = {}
        for row, description in zip(sets.targets, sets.descriptions, strict=True):
            texts.setdefault(row, []).append(description)
        columns = {
            "image": [str(sets.paths[row]) for row in texts],
            "image_id": [sets.image_ids[row] for row in texts],
            "captions": list(texts.values()),
        }
        splits["validation"] = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    return Source(name, splits, root, "image")


# --- COCO: the bags of TrueMatch, and the hard pool of CapEnrich -----------------------------------------------------


def coco_id(name: Any) -> str:
    """The number of a COCO image from any of its names: 3310, or `"val2014/COCO_val2014_000000003310.jpg"`."""
    text = str(name).replace("\\", "/").rpartition("/")[2]
    found = None if isinstance(name, bool) else _COCO_NAME.fullmatch(text)
    if found is None:
        raise ValueError(f"{name!r} is not a COCO image. Use its id, such as 3310, or COCO_val2014_000000003310.jpg.")
    return found.group(1)


def load_published_bags(folder: str | Path, sizes: Sequence[int] = (3, 5, 7)) -> dict[int, list[list[str]]]:
    """The bags of TrueMatch's release, as COCO ids, by size.

    The release (NDLB-TrueMatch-Benchmark) has a folder `benchmark/` with one file per bag size, a list of lists of COCO ids. Its
    description does not say whether ids are numbers or text, so both are accepted, and not what its file of size 1 is for.
    """
    folder = Path(folder)
    inside = folder / "benchmark" if (folder / "benchmark").is_dir() else folder
    found: dict[int, list[list[str]]] = {}
    for size in sizes:
        path = inside / f"{size}.json"
        what = f"a list of bags of {size} COCO ids, as in the release's benchmark/{size}.json"
        with _as_published(path, what):
            bags = [[coco_id(i) for i in bag] for bag in _list(_read_json(path, what))]
        bag_of: dict[str, int] = {}
        for number, ids in enumerate(bags):
            if len(set(ids)) != size or len(ids) != size:
                raise ValueError(f"{path}: bag {number} holds {ids!r:.80}, which are not {size} different images.")
            for i in ids:
                if bag_of.setdefault(i, number) != number:
                    raise ValueError(
                        f"{path}: image {i} is in bags {bag_of[i]} and {number}, but bags must be disjoint."
                    )
        found[int(size)] = bags
    return found


def match_coco_ids(
    bags: Mapping[int, Sequence[Sequence[str]]], image_ids: Sequence[Any]
) -> dict[int, list[list[str]]]:
    """Bags of [`load_published_bags`] with the ids of a data set, each of which has a COCO id in it."""
    wanted = {i for group in bags.values() for bag in group for i in bag}
    own: dict[str, str] = {}
    for image_id in image_ids:
        number = coco_id(image_id)
        if number in wanted and own.setdefault(number, str(image_id)) != str(image_id):
            raise ValueError(f"{image_id!r} and {own[number]!r} are both COCO image {number}. Keep one of them.")
    missing = sorted(wanted - own.keys(), key=int)
    if missing:
        raise ValueError(
            f"{len(missing)} images of the bags are missing, such as COCO image {missing[0]}. Use both Karpathy "
            "splits."
        )
    return {size: [[own[i] for i in bag] for bag in group] for size, group in bags.items()}


def load_hard_pool(path: str | Path) -> list[str]:
    """COCO ids of a retrieval pool, such as CapEnrich's 30,000 images (SMILE, section 4), in the order of the file.

    The pool was published as a pickle of names and features. Pickles run code, so it is not opened: save its names as JSON
    (a list), as text (one per line) or as `.npy` without objects; see [`coco_id`] for their form.
    """
    what = "a list of names of COCO images"
    path = _existing(path, what)
    suffix = path.suffix.lower()
    remedy = "If you trust the pickle, save its list `imgids` as JSON, and use that file."
    if suffix not in (".json", ".txt", ".npy"):
        raise ValueError(f"{path} must end in .json, .txt or .npy; pickles are never opened. {remedy}")
    with _as_published(path, what):
        if suffix == ".json":
            names = _read_json(path, what)
        elif suffix == ".txt":
            names = [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        else:
            try:
                with path.open("rb") as file:  # np.load would also take an archive of arrays
                    names = np.lib.format.read_array(file, allow_pickle=False).tolist()
            except (ValueError, OSError) as error:
                raise ValueError(f"{path} holds no plain array of names ({error}). {remedy}") from None
        ids = [coco_id(name) for name in _list(names)]
    if len(set(ids)) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ValueError(f"{path}: COCO image {twice} occurs twice, and would be its own distractor. Keep one.")
    return ids


# --- ImageCoDe -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetrievalSets:
    """Descriptions, each of one image in a set of candidates."""

    image_ids: list[str]  # name of its set and position, such as "open-images-12_ab/3"
    paths: list[Path]  # of each image; empty without an image folder
    descriptions: list[str]
    targets: list[int]  # row of the described image, as the metric's `targets`
    sets: list[list[int]]  # rows of the candidates, as the metric's `sets`
    is_video: list[bool]  # whether the candidates are frames of one video


def load_imagecode(path: str | Path, image_root: str | Path | None = None, *, kind: str = "all") -> RetrievalSets:
    """Sets of ten similar images with descriptions of some of them: all sets, `"static"` (photographs), or `"video"` (frames).

    The annotation file maps the name of each set to its descriptions by the target's position, `{"open-images-12_ab": {"5":
    "..."}}`. The images of a set are in a folder of the same name, `img0.jpg` to `img9.jpg`; archives may use other numbers, so
    the images are sorted by number, as in the authors' loader.
    """
    _require("kind", kind, ("all", "static", "video"))
    what = "ImageCoDe's valid_data.json, with labels"
    found = RetrievalSets([], [], [], [], [], [])
    with _as_published(path, what):
        for name, texts in _read_json(path, what).items():
            video = _STATIC not in name
            if kind != "all" and video != (kind == "video"):
                continue
            first = len(found.image_ids)
            found.image_ids.extend(f"{name}/{i}" for i in range(IMAGECODE_SET_SIZE))
            if image_root is not None:
                found.paths.extend(_set_images(Path(image_root), name))
            for position, text in texts.items():
                if position not in map(str, range(IMAGECODE_SET_SIZE)) or not text.strip():
                    raise ValueError(
                        f"{path}: set {name!r} describes position {position!r} by {text!r:.60}. Use a file with "
                        "labels of 0 to 9."
                    )
                found.descriptions.append(text)
                found.targets.append(first + int(position))
                found.sets.append(list(range(first, first + IMAGECODE_SET_SIZE)))
                found.is_video.append(video)
    if not found.descriptions:
        raise ValueError(f"{path} has no {kind} sets. Use another kind.")
    return found


def _set_images(root: Path, name: str) -> list[Path]:
    if not name or {"/", "\\"} & set(name) or name in (".", ".."):
        raise ValueError(f"{name!r} is not a valid name of a set. Check the annotation file.")
    folder = root / name
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r} for set {name!r}. image_root holds one per set.")
    numbered = {int(match.group(1)): path for path in folder.iterdir() if (match := _FRAME.fullmatch(path.name))}
    if len(numbered) != IMAGECODE_SET_SIZE:
        raise ValueError(f"{folder} holds {len(numbered)} images img<number>.jpg, and a set has 10. Unpack it again.")
    refuse_outside(map(str, numbered.values()), root, str(folder))
    return [numbered[number] for number in sorted(numbered)]


# --- nocaps and Concadia ---------------------------------------------------------------------------------------------


def _dataset(rows: list[dict[str, Any]], split: str, image_root: str | Path, where: str) -> datasets.Dataset:
    """Rows whose images are named relative to a folder."""
    root = Path(image_root)
    if not root.is_dir():
        raise FileNotFoundError(f"image_root ({str(root)!r}) is not a folder. Use the one that holds the images.")
    for row in rows:
        if not isinstance(row["image"], str) or not row["image"]:
            raise ValueError(f"{where}: image {row['image_id']!r} names no file: {row['image']!r:.60}.")
        row["image"] = str(root / row["image"])
    refuse_outside((row["image"] for row in rows), root, where)
    kinds = {"image": datasets.Image(), "captions": CAPTIONS}
    features = datasets.Features({name: kinds.get(name, datasets.Value("string")) for name in rows[0]})
    return datasets.Dataset.from_list(rows, features=features, split=datasets.NamedSplit(split))


def load_nocaps(path: str | Path, image_root: str | Path, *, domain: str = "all") -> datasets.Dataset:
    """nocaps' validation images with their ten captions each, by domain: `image`, `image_id`, `captions`, `domain`.

    The annotation file is COCO's layout: `images` with `id`, `file_name` and `domain`, and `annotations` with `image_id`
    and `caption`.
    """
    _require("domain", domain, ("all", *NOCAPS_DOMAINS))
    what = "nocaps_val_4500_captions.json"
    rows = []
    with _as_published(path, what):
        value = _read_json(path, what)
        captions: dict[Any, list[Any]] = {image["id"]: [] for image in _list(value["images"])}
        if len(captions) < len(value["images"]):
            raise ValueError(f"{path}: images have the same id. Use the published file.")
        for entry in _list(value["annotations"]):
            captions[entry["image_id"]].append(entry["caption"])
        for image in value["images"]:
            if image["domain"] not in NOCAPS_DOMAINS:
                raise ValueError(f"{path}: image {image['id']!r} has the domain {image['domain']!r}.")
            if domain not in ("all", image["domain"]):
                continue
            texts = [text for text in to_caption_list(captions[image["id"]]) if text]
            if not texts:
                raise ValueError(f"{path}: image {image['id']!r} has no caption, as in the file of the test images.")
            row = {"image": image["file_name"], "image_id": str(image["id"]), "captions": texts}
            rows.append({**row, "domain": image["domain"]})
    if not rows:
        raise ValueError(f"{path} has no images of domain {domain!r}.")
    return _dataset(rows, "validation", image_root, str(path))


def load_concadia(
    path: str | Path, image_root: str | Path, *, split: str = "test", text: str = "caption"
) -> datasets.Dataset:
    """Images of Wikipedia with one text each: `image`, `image_id` (the file's name), `captions`, `context`.

    The annotation file holds `images` with `filename`, `split` (train, val, test), and `caption`, `description` (for blind
    readers) and `context`, each with the text in `raw`.
    """
    _require("text", text, ("caption", "description"))
    what = "Concadia's wiki_split.json"
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    with _as_published(path, what):
        for image in _list(_read_json(path, what)["images"]):
            name, where = image["filename"], f"{path}: image {image['filename']!r}"
            if image["split"] not in SPLIT_NAMES:
                raise ValueError(f"{where} has the split {image['split']!r}; known are train, val and test.")
            if SPLIT_NAMES[image["split"]] != SPLIT_NAMES.get(split, split):
                continue
            if name in seen:
                raise ValueError(f"{where} occurs twice. Keep one.")
            seen.add(name)
            written, context = (clean_caption(image.get(key, {}).get("raw") or "") for key in (text, "context"))
            if not written:
                raise ValueError(f"{where} has no {text}: {image.get(text)!r:.60}. It must be {{'raw': '...'}}.")
            rows.append({"image": name, "image_id": name, "captions": [written], "context": context})
    if not rows:
        raise ValueError(f"{path} has no images of the split {split!r}.")
    return _dataset(rows, SPLIT_NAMES.get(split, split), image_root, str(path))


# --- TGIF and MSR-VTT ------------------------------------------------------------------------------------------------

_PARTS = "*videodatainfo*.json"  # of which there may be several
VIDEO_SETS = {"tgif": ("tgif*.tsv", "*.tsv"), "msr-vtt": (_PARTS, "*.json")}


def find_video_source(dataset_name: str, path: Path, data_dir: str | Path | None) -> list[Path]:
    """The files that describe a set of videos; empty if the source is not such a set."""
    name = dataset_name.lower()
    if name not in VIDEO_SETS:
        known = path.suffix.lower() == ".tsv" or (path.suffix.lower() == ".json" and "videodata" in path.name)
        return [path] if known and path.is_file() else []
    patterns = VIDEO_SETS[name]
    if data_dir is None:
        raise ValueError(f"dataset_name {name!r} needs a folder. Set data_dir to the one with {patterns[0]}.")
    folder = Path(data_dir).expanduser()
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) > 1 and pattern != _PARTS:
            names = [file.name for file in found[:5]]
            raise ValueError(f"data_dir ({str(folder)!r}) holds {names}. Use one of them as dataset_name.")
        if found:
            return found
    raise FileNotFoundError(f"data_dir ({str(folder)!r}) holds no {patterns[0]}. Set it to the folder with one.")


def read_video_source(paths: list[Path], root: Path | None) -> Source:
    """Read the files that describe a set of videos, which are in `root` or beside the first file."""
    read, usual = (_read_tgif, "gifs") if paths[0].suffix.lower() == ".tsv" else (_read_msr_vtt, "videos")
    beside = paths[0].parent / usual
    root = root or (beside if beside.is_dir() else paths[0].parent)
    name = ", ".join(map(str, paths))
    splits: dict[str, Any] = {}
    for file, image_id, captions, split in read(paths, root):
        if split not in SPLIT_NAMES:
            raise ValueError(f"{name} has a split {split!r}; known are {sorted(SPLIT_NAMES)}. Rename it in the file.")
        row = {"image": file, "image_id": image_id, "captions": captions}
        splits.setdefault(SPLIT_NAMES[split], []).append(row)
    if not splits:
        raise ValueError(f"{name} holds no captioned videos. Check that it is the right file.")
    return Source(name, splits, root, "image", has_videos=True)


Video = tuple[str, str, list[Any], str]
"""File, id, captions and split."""


def _read_tgif(paths: list[Path], root: Path) -> Iterable[Video]:
    """TGIF: an address and a caption per line, and in each of the files of splits an address per line.

    Nothing is fetched: the GIF of `https://.../tumblr_a1.gif` is the file `tumblr_a1.gif`. A table may also hold paths.
    """

    def local(address: str) -> str:
        return address.split("?")[0].rstrip("/").rpartition("/")[2] if "://" in address else address

    path = paths[0]
    captions: dict[str, list[str]] = {}
    files: dict[str, str] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        address, tab, caption = line.rstrip("\r").partition("\t")
        address = address.strip()
        if not tab or not Path(local(address)).name:
            raise ValueError(f"Line {number} of {path} is not an address or path of a file, a tab and a caption.")
        if files.setdefault(local(address), address) != address:
            raise ValueError(
                f"{path}: {files[local(address)]!r} and {address!r} have the same file name. Rename one file, and "
                "write it."
            )
        captions.setdefault(address, []).append(caption)
    split_of: dict[str, str] = {}
    for name in ("train", "val", "test"):
        places = (path.parent / "splits" / f"{name}.txt", path.parent / f"{name}.txt")
        if (found := next((place for place in places if place.is_file()), None)) is not None:
            split_of |= {line.strip(): name for line in read_text(found).split("\n") if line.strip()}
    lost = [address for address in captions if split_of and address not in split_of]
    if lost:
        logger.warning("%s: %d videos are not in any split and are skipped (%s, ...).", path, len(lost), lost[0])
    for address, texts in captions.items():
        if not split_of or address in split_of:
            name = local(address)
            yield name, str(Path(name).with_suffix("")), texts, split_of.get(address, "train")


def _read_msr_vtt(paths: list[Path], root: Path) -> Iterable[Video]:
    """MSR-VTT: `videos` with `video_id` and `split`, and `sentences` with `video_id` and `caption`; films are in `root` or below."""
    captions: dict[str, list[Any]] = {}
    split_of: dict[str, str] = {}
    file_of: dict[str, Path] = {}
    for path in paths:
        with _as_published(path, "videodatainfo.json, with the lists 'videos' and 'sentences'"):
            content = parse_json(read_text(path), str(path))
            for row in content["videos"]:
                name = str(row["video_id"])
                if name in file_of:
                    raise ValueError(
                        f"{name} is in {file_of[name]} and in {path}. Keep one, or use one of these files as "
                        "dataset_name."
                    )
                file_of[name] = path
                split_of[name] = row.get("split", "train")
            for row in content["sentences"]:
                captions.setdefault(str(row["video_id"]), []).append(row.get("caption"))
    present: dict[str, str] = {}
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in VIDEO_SUFFIXES | {".gif"} and file.stem in split_of:
            found = file.relative_to(root).as_posix()
            if present.setdefault(file.stem, found) != found and Path(present[file.stem]).parent != Path(found).parent:
                raise ValueError(
                    f"{root} holds {present[file.stem]} and {found}. Keep one of them, or set image_root to its folder."
                )
    for name, split in split_of.items():
        yield present.get(name, f"{name}.mp4"), name, captions.get(name, []), split
