"""Published benchmarks, read from their files. Nothing is downloaded, and pickles are never opened.

| data set | annotation file | images |
|:--|:--|:--|
| nocaps (Agrawal et al. 2019) | `nocaps_val_4500_captions.json`; its domains are splits | `images/` |
| Concadia (Kreiss et al. 2022) | `wiki_split.json`, with a caption and a description per image | `images/` |
| ImageCoDe (Krojer et al. 2022) | `valid_data.json` | `image-sets/`, one folder per set |
| TGIF (Li et al. 2016) | `tgif-v1.0.tsv` and `splits/` | `gifs/` |
| MSR-VTT (Xu et al. 2016) | `videodatainfo.json`, or one for train and validation and one for test | `videos/` |
| TrueMatch (Gaur et al. 2024) | `benchmark/3.json`, `5.json`, `7.json` | COCO |
| CapEnrich's hard pool | names as JSON | COCO |
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.data.columns import (
    SPLIT_NAMES,
    VIDEO_SUFFIXES,
    Row,
    Source,
    SourceArguments,
    clean_caption,
    parse_json,
    read_text,
)
from hf_captionrl.data.images import refuse_outside

logger = logging.getLogger(__name__)

IMAGECODE_SET_SIZE = 10
# Published data sets, and the folder of their images in `data_dir`.
PUBLISHED = {"nocaps": "images", "concadia": "images", "imagecode": "image-sets", "tgif": "gifs", "msr-vtt": "videos"}

_STATIC = "open-images"  # in the name of a set of ten similar photographs; all others are frames of one video
_COCO_NAME = re.compile(r"(?:.*_)?0*(\d+)(?:\.[A-Za-z]+)?")
_FRAME = re.compile(r"img(\d+)\.jpe?g", re.IGNORECASE)


@contextlib.contextmanager
def _published(path: str | Path, what: str) -> Iterator[Any]:
    """The content of a JSON file; whatever of it does not have the form that its reader expects becomes one error."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use {what}.")
    try:
        yield parse_json(read_text(Path(path)), str(path))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not have the form of {what} ({type(error).__name__}: {error}). Use the published file."
        ) from error


def read_published(name: str, arguments: SourceArguments) -> Source:
    """Read one of `PUBLISHED` from `data_dir`."""
    if arguments.data_dir is None:
        raise ValueError(f"dataset_name {name!r} needs the folder of its files. Set data_dir.")
    folder = Path(arguments.data_dir).expanduser()
    root = Path(arguments.image_root or folder / PUBLISHED[name])
    if PUBLISHED[name] in ("gifs", "videos"):
        if not arguments.num_frames:
            raise ValueError(f"{name!r} holds videos. Set num_frames to the number of frames per video, e.g. 8.")
        root = root if root.is_dir() else folder
    readers = {"nocaps": _nocaps, "concadia": _concadia, "imagecode": _imagecode, "tgif": _tgif, "msr-vtt": _msr_vtt}
    splits: dict[str, list[Row]] = {}
    for row in readers[name](folder, root, arguments.caption_column):
        splits.setdefault(row.pop("split"), []).append(row)
    return Source(name, dict(sorted(splits.items())), root, "image")


def _nocaps(folder: Path, root: Path, column: str) -> Iterator[Row]:
    """nocaps' validation images with their ten captions each, by domain: near_domain, ...; as COCO's annotations."""
    captions: dict[Any, list[str]] = {}
    with _published(folder / "nocaps_val_4500_captions.json", "nocaps_val_4500_captions.json") as content:
        for note in content["annotations"]:
            captions.setdefault(note["image_id"], []).append(note["caption"])
        for image in content["images"]:
            row = {"image": image["file_name"], "image_id": str(image["id"]), "captions": captions[image["id"]]}
            yield row | {"domain": image["domain"], "split": image["domain"].replace("-", "_")}


def _concadia(folder: Path, root: Path, column: str) -> Iterator[Row]:
    """Images of Wikipedia with their caption, or in the column `description` that for blind readers, and the context."""
    with _published(folder / "wiki_split.json", "Concadia's wiki_split.json") as content:
        for image in content["images"]:
            text = image["caption" if column == "captions" else column]["raw"]
            row = {"image": image["filename"], "image_id": image["filename"], column: [text]}
            context = clean_caption((image.get("context") or {}).get("raw") or "")
            yield row | {"context": context, "split": SPLIT_NAMES[image["split"]]}


# --- COCO: the bags of TrueMatch, and the hard pool of CapEnrich -----------------------------------------------------


def coco_id(name: Any) -> str:
    """The number of a COCO image from any of its names: 3310, or `"val2014/COCO_val2014_000000003310.jpg"`."""
    text = str(name).replace("\\", "/").rpartition("/")[2]
    match = None if isinstance(name, bool) else _COCO_NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{name!r} is not a COCO image. Use its id, such as 3310, or COCO_val2014_000000003310.jpg.")
    return match.group(1)


def load_published_bags(folder: str | Path, sizes: Sequence[int] = (3, 5, 7)) -> dict[int, list[list[str]]]:
    """The bags of TrueMatch's release, as COCO ids, by size.

    The release (NDLB-TrueMatch-Benchmark) has a folder `benchmark/` with one file per bag size, a list of lists of COCO ids. Its
    description does not say whether ids are numbers or text, so both are accepted, and not what its file of size 1 is for.
    """
    folder = Path(folder)
    inside = folder / "benchmark" if (folder / "benchmark").is_dir() else folder
    bags_of: dict[int, list[list[str]]] = {}
    for size in sizes:
        path = inside / f"{size}.json"
        with _published(
            path, f"a list of bags of {size} COCO ids, as in the release's benchmark/{size}.json"
        ) as content:
            bags = [[coco_id(i) for i in bag] for bag in content]
        times = Counter(i for ids in bags for i in ids)
        if not bags or {len(ids) for ids in bags} != {size} or max(times.values()) > 1:
            raise ValueError(f"{path} must hold disjoint bags of {size} different images. Use the published file.")
        bags_of[int(size)] = bags
    return bags_of


def match_coco_ids(
    bags: Mapping[int, Sequence[Sequence[str]]], image_ids: Sequence[Any]
) -> dict[int, list[list[str]]]:
    """Bags of [`load_published_bags`] with the ids of a data set, each of which has a COCO id in it."""
    id_of = {coco_id(image_id): str(image_id) for image_id in image_ids}
    missing = sorted({i for group in bags.values() for bag in group for i in bag} - id_of.keys(), key=int)
    if missing:
        raise ValueError(
            f"Images of the bags are missing ({len(missing)}), such as COCO image {missing[0]}. Use both Karpathy "
            "splits."
        )
    return {size: [[id_of[i] for i in bag] for bag in group] for size, group in bags.items()}


def load_hard_pool(path: str | Path) -> list[str]:
    """COCO ids of a retrieval pool, such as CapEnrich's 30,000 images (SMILE, section 4), in the order of the file.

    The pool was published as a pickle of names and features. Pickles run code, so it is not opened: save its list `imgids`
    as JSON; see [`coco_id`] for the form of the names.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(
            f"{path} must end in .json; pickles are never opened. If you trust it, save its `imgids` as JSON."
        )
    with _published(path, "a list of names of COCO images") as names:
        ids = [coco_id(name) for name in names]
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


def load_imagecode(path: str | Path, image_root: str | Path | None = None) -> RetrievalSets:
    """Sets of ten similar images, photographs or frames of a video, with descriptions of some of them.

    The annotation file maps the name of each set to its descriptions by the target's position, `{"open-images-12_ab": {"5":
    "..."}}`. The images of a set are in a folder of the same name, `img0.jpg` to `img9.jpg`; archives may use other numbers, so
    the images are sorted by number, as in the authors' loader.
    """
    sets = RetrievalSets([], [], [], [], [], [])
    with _published(path, "ImageCoDe's valid_data.json, with labels") as content:
        for name, texts in content.items():
            rows = range(len(sets.image_ids), len(sets.image_ids) + IMAGECODE_SET_SIZE)
            sets.image_ids.extend(f"{name}/{i}" for i in range(IMAGECODE_SET_SIZE))
            if image_root is not None:
                sets.paths.extend(_set_images(Path(image_root), name))
            for position, text in texts.items():
                if position not in map(str, range(IMAGECODE_SET_SIZE)):
                    raise ValueError(f"{path}: set {name!r} describes position {position!r}, and has 0 to 9.")
                sets.descriptions.append(text)
                sets.targets.append(rows[int(position)])
                sets.sets.append(list(rows))
                sets.is_video.append(_STATIC not in name)
    return sets


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


def _imagecode(folder: Path, root: Path, column: str) -> Iterator[Row]:
    """The images that are described; all are ImageCoDe's validation images."""
    sets = load_imagecode(folder / "valid_data.json", root)
    texts: dict[int, list[str]] = {}
    for target, description in zip(sets.targets, sets.descriptions, strict=True):
        texts.setdefault(target, []).append(description)
    for row, group in texts.items():
        image = str(sets.paths[row].relative_to(root))
        yield {"image": image, "image_id": sets.image_ids[row], "captions": group, "split": "validation"}


# --- TGIF and MSR-VTT ------------------------------------------------------------------------------------------------


def _tgif(folder: Path, root: Path, column: str) -> Iterator[Row]:
    """TGIF: an address and a caption per line, and in each of the files of splits an address per line.

    Nothing is fetched: the GIF of `https://.../tumblr_a1.gif` is the file `tumblr_a1.gif`.
    """
    path = _annotations(folder, "*.tsv")[0]
    captions: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        address, tab, caption = line.rstrip("\r").partition("\t")
        if not line.strip():
            continue
        if not tab or not address.strip():
            raise ValueError(f"Line {number} of {path} is not an address or path of a file, a tab and a caption.")
        captions.setdefault(address.strip(), []).append(caption)
    split_of: dict[str, str] = {}
    for name in ("train", "val", "test"):
        if (place := folder / "splits" / f"{name}.txt").is_file():
            split_of |= {line.strip(): SPLIT_NAMES[name] for line in read_text(place).split("\n") if line.strip()}
    lost = [address for address in captions if split_of and address not in split_of]
    if lost:
        logger.warning("%s: videos that are in no split are skipped: %d (%s, ...).", path, len(lost), lost[0])
    for address, texts in captions.items():
        if not split_of or address in split_of:
            name, split = address.rpartition("/")[2], split_of.get(address, "train")
            yield {"image": name, "image_id": Path(name).stem, "captions": texts, "split": split}


def _msr_vtt(folder: Path, root: Path, column: str) -> Iterator[Row]:
    """MSR-VTT: `videos` with `video_id` and `split`, and `sentences` with `video_id` and `caption`; films are in `root` or below."""
    captions: dict[str, list[Any]] = {}
    split_of: dict[str, str] = {}
    for path in _annotations(folder, "*videodatainfo*.json"):
        with _published(path, "videodatainfo.json, with the lists 'videos' and 'sentences'") as content:
            for row in content["videos"]:
                split_of[str(row["video_id"])] = SPLIT_NAMES[row.get("split", "train")]
            for row in content["sentences"]:
                captions.setdefault(str(row["video_id"]), []).append(row.get("caption"))
    file_of = {
        file.stem: file.relative_to(root).as_posix()
        for file in sorted(root.rglob("*"))
        if file.suffix.lower() in VIDEO_SUFFIXES | {".gif"}
    }
    for name, split in split_of.items():
        file = file_of.get(name, f"{name}.mp4")
        yield {"image": file, "image_id": name, "captions": captions.get(name, []), "split": split}


def _annotations(folder: Path, pattern: str) -> list[Path]:
    if not (files := sorted(folder.glob(pattern))):
        raise FileNotFoundError(f"data_dir ({str(folder)!r}) holds no {pattern}. Set it to the folder with one.")
    return files
