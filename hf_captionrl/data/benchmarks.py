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

import csv
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets

from hf_captionrl.data.columns import CAPTIONS, SPLIT_NAMES, Row, Source, parse_json, read_text, to_caption_list
from hf_captionrl.data.images import refuse_outside
from hf_captionrl.data.video import VIDEO_SUFFIXES

# --- Published retrieval benchmarks, read from their files: TrueMatch's release, ImageCoDe, and the CapEnrich hard pool ---
# The captioned data sets nocaps and Concadia are in `data/nocaps_concadia.py`. Nothing is downloaded, and pickles are never
# opened.

IMAGECODE_SET_SIZE = 10
"""Number of images in each set of ImageCoDe."""

_STATIC = "open-images"  # in the name of a set of ten similar photographs; all others are frames of one video
_COCO_NAME = re.compile(r"(?:.*_)?0*(\d+)(?:\.[A-Za-z]+)?")
_FRAME = re.compile(r"img(\d+)\.jpe?g", re.IGNORECASE)


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file; errors name the expected content.

    Args:
        path: The file.
        what: The expected content.

    Returns:
        The value.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not JSON in UTF-8, for instance if it is truncated.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use {what}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}), so it is not {what}. Download it again.") from None


# --- TrueMatch's release ------------------------------------------------------------------------------------------


def coco_id(name: Any) -> str:
    """The number of a COCO image from any of its names.

    Args:
        name: `3310`, `"3310"`, `"000000003310.jpg"` or `"val2014/COCO_val2014_000000003310.jpg"`.

    Returns:
        `str`: `"3310"`.

    Raises:
        ValueError: If the name contains no number.
    """
    text = str(name).replace("\\", "/").rpartition("/")[2]
    found = None if isinstance(name, bool) else _COCO_NAME.fullmatch(text)
    if found is None:
        raise ValueError(f"{name!r} is not a COCO image. Use its id, such as 3310, or COCO_val2014_000000003310.jpg.")
    return found.group(1)


def load_published_bags(folder: str | Path, sizes: Sequence[int] = (3, 5, 7)) -> dict[int, list[list[str]]]:
    """The bags of the paper's release, as COCO ids.

    The release (the data set NDLB-TrueMatch-Benchmark of the paper's authors) describes its layout as a folder
    `benchmark/` with one file per bag size, `3.json`, `5.json`, `7.json`, each a list of bags and each bag a list of COCO
    ids; the paper's counts are 254, 104 and 93. Its description does not say whether ids are numbers or text, so both are
    accepted, and not what its file of size 1 is for.

    Args:
        folder: The release, or its folder `benchmark`.
        sizes: Bag sizes to load.

    Returns:
        `dict[int, list[list[str]]]`: The bags of each size.

    Raises:
        FileNotFoundError: If the file of a size does not exist.
        ValueError: If a file has another format, a bag has another size, or an image is in two bags of one size.
    """
    folder = Path(folder)
    inside = folder / "benchmark" if (folder / "benchmark").is_dir() else folder
    found: dict[int, list[list[str]]] = {}
    for size in sizes:
        path = inside / f"{size}.json"
        value = read_json(path, f"a list of bags of {size} COCO ids, as in the release's benchmark/{size}.json")
        if not isinstance(value, list) or not value or not all(isinstance(bag, list) for bag in value):
            raise ValueError(f"{path} must hold a list of bags, each a list of COCO ids, such as [[3310, 42, 7]].")
        bags: list[list[str]] = []
        where: dict[str, int] = {}
        for number, bag in enumerate(value):
            if not all(isinstance(i, int | str) for i in bag):
                raise ValueError(f"{path}: bag {number} is {bag!r:.80}; a bag is a list of COCO ids.")
            ids = [coco_id(i) for i in bag]
            if len(set(ids)) != size or len(ids) != size:
                raise ValueError(f"{path}: bag {number} holds {ids!r:.80}, which are not {size} different images.")
            for i in ids:
                if where.setdefault(i, number) != number:
                    raise ValueError(
                        f"{path}: image {i} is in bags {where[i]} and {number}, but bags must be disjoint."
                    )
            bags.append(ids)
        found[int(size)] = bags
    return found


def match_coco_ids(
    bags: Mapping[int, Sequence[Sequence[str]]], image_ids: Sequence[Any]
) -> dict[int, list[list[str]]]:
    """Replace the COCO ids of bags by the ids of a data set.

    Args:
        bags: Bags of each size, from [`load_published_bags`].
        image_ids: Ids of the data set, each with a COCO id in it.

    Returns:
        `dict[int, list[list[str]]]`: The same bags.

    Raises:
        ValueError: If an id of the data set is not a COCO image, two are the same image of a bag, or an image of a bag is missing.
    """
    wanted = {i for group in bags.values() for bag in group for i in bag}
    own: dict[str, str] = {}
    for image_id in image_ids:
        number = coco_id(image_id)
        if number in wanted and own.setdefault(number, str(image_id)) != str(image_id):
            raise ValueError(f"{image_id!r} and {own[number]!r} are both COCO image {number}. Keep one of them.")
    missing = sorted(wanted - own.keys(), key=int)
    if missing:
        raise ValueError(
            f"{len(missing)} images of the bags are not in the data set, such as COCO image {missing[0]}. The paper's bags are "
            "made of COCO's Karpathy validation and test images, 10,000 together. Use both."
        )
    return {size: [[own[i] for i in bag] for bag in group] for size, group in bags.items()}


# --- ImageCoDe ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetrievalSets:
    """Descriptions, each of one image in a set of candidates.

    Args:
        image_ids: Id of each image: the name of its set and its position, such as `"open-images-12_ab/3"`.
        paths: File of each image; empty without an image folder.
        descriptions: Human descriptions.
        targets: Row of the described image of each description, as the metric's `targets`.
        sets: Rows of the candidates of each description, as the metric's `sets`.
        is_video: Whether the candidates of each description are frames of one video.
    """

    image_ids: list[str]
    paths: list[Path]
    descriptions: list[str]
    targets: list[int]
    sets: list[list[int]]
    is_video: list[bool]


def load_imagecode(
    path: str | Path,
    image_root: str | Path | None = None,
    *,
    kind: Literal["all", "static", "video"] = "all",
) -> RetrievalSets:
    """Sets of ten similar images with descriptions of some of them (Krojer et al. 2022).

    The annotation file (`valid_data.json`: 2,302 descriptions) maps the name of each set to its descriptions by the target's
    position, `{"open-images-12_ab": {"5": "..."}}`. The images of a set are in a folder of the same name, `img0.jpg` to
    `img9.jpg`; archives may use other numbers, so the images are sorted by number, as in the authors' loader. To evaluate
    a captioner, caption image `targets[i]` and rank it in `sets[i]`.

    Args:
        path: `train_data.json`, `valid_data.json` or a file in the same format. The unlabelled test file has no targets.
        image_root: The folder with one folder per set; None if only rows are needed.
        kind: All sets, those of photographs (`open-images` in the name), or those of video frames.

    Returns:
        [`RetrievalSets`]: Rows of images, and descriptions with their targets and candidates.

    Raises:
        FileNotFoundError: If the file or the folder of a set does not exist.
        ValueError: If the file has another format, or a set does not have ten images.
    """
    if kind not in ("all", "static", "video"):
        raise ValueError(f"kind is {kind!r}. Use 'all', 'static' or 'video'.")
    value = read_json(path, "ImageCoDe's valid_data.json")
    shape = f'{path} must hold {{"SET": {{"POSITION": "DESCRIPTION"}}}} with positions from 0 to 9'
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{shape}; it holds a {type(value).__name__}. Use a file with labels.")
    found = RetrievalSets([], [], [], [], [], [])
    for name, texts in value.items():
        video = _STATIC not in name
        if kind != "all" and video != (kind == "video"):
            continue
        if not isinstance(texts, dict) or not texts:
            raise ValueError(f"{shape}; set {name!r} holds {texts!r:.60}. Use a file with labels.")
        first = len(found.image_ids)
        found.image_ids.extend(f"{name}/{i}" for i in range(IMAGECODE_SET_SIZE))
        if image_root is not None:
            found.paths.extend(_set_images(Path(image_root), name))
        for position, text in texts.items():
            if not (position.isdecimal() and int(position) < IMAGECODE_SET_SIZE):
                raise ValueError(f"{shape}; set {name!r} has the position {position!r}.")
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{shape}; position {position} of set {name!r} is described by {text!r:.60}.")
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
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r} for set {name!r}. image_root holds one folder per set."
        )
    numbered = {int(match.group(1)): path for path in folder.iterdir() if (match := _FRAME.fullmatch(path.name))}
    if len(numbered) != IMAGECODE_SET_SIZE:
        raise ValueError(
            f"{folder} holds {len(numbered)} images called img<number>.jpg, and a set has {IMAGECODE_SET_SIZE}. Unpack it "
            "again."
        )
    return [numbered[number] for number in sorted(numbered)]


# --- the hard pool of CapEnrich -----------------------------------------------------------------------------------


def load_hard_pool(path: str | Path) -> list[str]:
    """COCO ids of a retrieval pool, such as CapEnrich's 30,000 images (SMILE, section 4).

    The pool was published as a pickle of names and features. Pickles run code, so it is not opened: save its names as JSON
    (a list), as text (one per line) or as `.npy` without objects. They look like `COCO_val2014_000000003310` or
    `val2014/COCO_val2014_000000003310.jpg`; only their form is checked. With these images as the pool,
    `metrics.self_retrieval(..., targets=...)` ranks captions in it.

    Args:
        path: The file of names.

    Returns:
        `list[str]`: COCO ids in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is a pickle or has another format, or an image occurs twice.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use a file with the names of the pool's images.")
    suffix = path.suffix.lower()
    remedy = "If you trust the pickle, save its list `imgids` as JSON, and use that file."
    names: Any
    if suffix == ".json":
        names = read_json(path, "a list of names of images")
    elif suffix == ".txt":
        names = [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    elif suffix == ".npy":
        import numpy as np

        try:
            with path.open("rb") as file:  # np.load would also take an archive of arrays
                names = np.lib.format.read_array(file, allow_pickle=False).tolist()
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} holds no plain array of names ({error}). {remedy}") from None
    else:
        raise ValueError(f"{path} must end in .json, .txt or .npy; pickles are never opened. {remedy}")
    if not isinstance(names, list) or not names or not all(isinstance(n, str | int) for n in names):
        raise ValueError(f"{path} must hold a list of names of COCO images. {remedy}")
    ids = [coco_id(name) for name in names]
    seen: set[str] = set()
    for name, i in zip(names, ids, strict=True):
        if i in seen:
            raise ValueError(f"{path}: image {name!r} occurs twice, and would be its own distractor. Keep one.")
        seen.add(i)
    return ids


# --- Reads nocaps (by domain) and Concadia from their published files ------------------------------------------------

NOCAPS_DOMAINS = ("in-domain", "near-domain", "out-domain")
"""Domains of nocaps, from the object classes of COCO to objects that COCO's captions never name."""


def _root(image_root: str | Path) -> Path:
    root = Path(image_root)
    if not root.is_dir():
        raise FileNotFoundError(f"image_root ({str(root)!r}) is not a folder. Use the one that holds the images.")
    return root


def _file(root: Path, name: Any, where: str) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} names no file: {name!r:.60}.")
    return str(root / name)


def _list_of(value: Any, key: str, path: str | Path) -> list[dict[str, Any]]:
    rows = value.get(key) if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no list {key!r} of objects. Use the published file.")
    return rows


def _raw(value: Any) -> str:
    """Concadia's `{"raw": text, "tokens": [...]}` as clean text, empty where there is none."""
    texts = to_caption_list(value if isinstance(value, dict) and "raw" in value else None)
    return (texts[0] if texts else None) or ""


def _dataset(columns: dict[str, list[Any]], split: str, root: Path, where: str) -> datasets.Dataset:
    refuse_outside(columns["image"], root, where)
    kinds = {"image": datasets.Image(), "captions": CAPTIONS}
    features = datasets.Features({name: kinds.get(name, datasets.Value("string")) for name in columns})
    return datasets.Dataset.from_dict(columns, features=features, split=datasets.NamedSplit(split))


def load_nocaps(
    path: str | Path,
    image_root: str | Path,
    *,
    domain: Literal["all", "in-domain", "near-domain", "out-domain"] = "all",
) -> datasets.Dataset:
    """nocaps' validation images with their ten captions each, by domain (Agrawal et al. 2019).

    The annotation file (`nocaps_val_4500_captions.json`) is COCO's layout: `images` with `id`, `file_name` and `domain`, and
    `annotations` with `image_id` and `caption`. DiscriTune reports near- and out-domain.

    Args:
        path: The annotation file. The test file has no captions.
        image_root: The folder that `file_name` is relative to.
        domain: Domain of the images.

    Returns:
        `datasets.Dataset`: `image`, `image_id`, `captions`, `domain`; images are decoded on access.

    Raises:
        FileNotFoundError: If the file or folder does not exist.
        ValueError: If the file has another format, an image has no caption or domain, or a caption no image.
    """
    if domain not in ("all", *NOCAPS_DOMAINS):
        raise ValueError(f"domain is {domain!r}. Use 'all' or one of {NOCAPS_DOMAINS}.")
    value = read_json(path, "nocaps_val_4500_captions.json")
    images, annotations = _list_of(value, "images", path), _list_of(value, "annotations", path)
    root = _root(image_root)
    captions: dict[Any, list[Any]] = {}
    for image in images:
        image_id = image.get("id")
        if not isinstance(image_id, int | str) or image_id in captions:
            raise ValueError(f"{path}: an image has the id {image_id!r}, which is missing or repeated.")
        if image.get("domain") not in NOCAPS_DOMAINS:
            raise ValueError(
                f"{path}: image {image_id!r} has the domain {image.get('domain')!r}, not {NOCAPS_DOMAINS}."
            )
        captions[image_id] = []
    for number, entry in enumerate(annotations):
        if entry.get("image_id") not in captions:
            raise ValueError(
                f"{path}: annotation {number} is of image {entry.get('image_id')!r}, which does not exist."
            )
        captions[entry["image_id"]].append(entry.get("caption"))
    columns: dict[str, list[Any]] = {"image": [], "image_id": [], "captions": [], "domain": []}
    for image in images:
        if domain not in ("all", image["domain"]):
            continue
        texts = [text for text in to_caption_list(captions[image["id"]]) if text]
        if not texts:
            raise ValueError(f"{path}: image {image['id']!r} has no caption. The file of the test images has none.")
        columns["image"].append(_file(root, image.get("file_name"), f"{path}: image {image['id']!r}"))
        columns["image_id"].append(str(image["id"]))
        columns["captions"].append(texts)
        columns["domain"].append(image["domain"])
    if not columns["image"]:
        raise ValueError(f"{path} has no images of domain {domain!r}.")
    return _dataset(columns, "validation", root, str(path))


def load_concadia(
    path: str | Path,
    image_root: str | Path,
    *,
    split: str = "test",
    text: Literal["caption", "description"] = "caption",
) -> datasets.Dataset:
    """Concadia: images of Wikipedia with a caption and a description each (Kreiss et al. 2022).

    The annotation file (`wiki_split.json`) holds `images` with `filename`, `split` (train, val, test), and `caption`,
    `description` and `context`, each with the text in `raw`. DiscriTune evaluates on the captions; descriptions replace
    the image for blind readers.

    Args:
        path: The annotation file.
        image_root: The folder with the images, named `filename`.
        split: `"train"`, `"validation"` or `"test"`.
        text: The text in the column `captions`.

    Returns:
        `datasets.Dataset`: `image`, `image_id` (the file's name), `captions` (one each), `context`.

    Raises:
        FileNotFoundError: If the file or folder does not exist.
        ValueError: If the file has another format, or lacks the split or text.
    """
    if text not in ("caption", "description"):
        raise ValueError(f"text is {text!r}. Use 'caption' or 'description'.")
    value = read_json(path, "Concadia's wiki_split.json")
    images, root = _list_of(value, "images", path), _root(image_root)
    columns: dict[str, list[Any]] = {"image": [], "image_id": [], "captions": [], "context": []}
    seen: set[str] = set()
    for number, image in enumerate(images):
        where = f"{path}: image {number}"
        if image.get("split") not in SPLIT_NAMES:
            raise ValueError(f"{where} has the split {image.get('split')!r}; known are train, val and test.")
        if SPLIT_NAMES[image["split"]] != SPLIT_NAMES.get(split, split):
            continue
        source = _file(root, image.get("filename"), where)
        if image["filename"] in seen:
            raise ValueError(f"{where}: {image['filename']!r} occurs twice. Keep one.")
        seen.add(image["filename"])
        written = _raw(image.get(text))
        if not written:
            raise ValueError(f"{where} has no {text}: {image.get(text)!r:.60}. It must be {{'raw': '...'}}.")
        columns["image"].append(source)
        columns["image_id"].append(image["filename"])
        columns["captions"].append([written])
        columns["context"].append(_raw(image.get("context")))
    if not columns["image"]:
        raise ValueError(f"{path} has no images of the split {split!r}.")
    return _dataset(columns, SPLIT_NAMES.get(split, split), root, str(path))


# --- Winoground and MMVP-VLM: two images and two captions that a scorer must match, read from their files ------------


@dataclass(frozen=True)
class ImagePair:
    """Files of two images, the caption of each, and what distinguishes the two."""

    images: tuple[Path, Path]
    captions: tuple[str, str]
    category: str


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"There is no image {str(path)!r}. Use a folder with the images of the benchmark.")
    return path


def load_winoground(folder: str | Path) -> list[ImagePair]:
    """Winoground's 400 pairs (Thrush et al. 2022): `examples.jsonl` and `images/`, also in a folder `data`.

    The `category` of a pair is `collapsed_tag`: Object, Relation or Both.
    """
    root = Path(folder)
    root = root / "data" if (root / "data" / "examples.jsonl").is_file() else root
    path = root / "examples.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use the folder with Winoground's examples.jsonl.")
    found = []
    for number, line in enumerate(filter(None, path.read_text(encoding="utf-8").split("\n")), 1):
        row = json.loads(line)
        missing = [
            key for key in ("image_0", "image_1", "caption_0", "caption_1") if not isinstance(row.get(key), str)
        ]
        if missing:
            raise ValueError(f"{path}, line {number}, lacks {missing}. Use Winoground's examples.jsonl as published.")
        images = tuple(_existing(root / "images" / f"{row[f'image_{i}'].removesuffix('.png')}.png") for i in (0, 1))
        found.append(ImagePair(images, (row["caption_0"], row["caption_1"]), str(row.get("collapsed_tag", ""))))  # type: ignore[arg-type]
    return found


def load_mmvp(folder: str | Path) -> list[ImagePair]:
    """MMVP-VLM's 135 pairs (Tong et al. 2024): `Questions.csv` (id, type, statement) and a folder of images per type.

    Consecutive rows form a pair. The images are `<type>/<id>.jpg` in `images` or `MLLM_VLM Images`.

    The `category` of a pair is the type of the statement.
    """
    path = Path(folder) / "Questions.csv"
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use the folder with MMVP-VLM's Questions.csv.")
    places = [Path(folder) / name for name in ("images", "MLLM_VLM Images") if (Path(folder) / name).is_dir()]
    if not places:
        raise FileNotFoundError(f"{folder} has no folder 'images'. Use the folder of MMVP-VLM with its images.")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    if not rows or len(rows) % 2 or any(len(row) != 3 for row in rows):
        raise ValueError(
            f"{path} must hold a header and pairs of rows (id, type, statement). Use the file as published."
        )
    found = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        if first[1] != second[1]:
            raise ValueError(
                f"{path}: questions {first[0]} and {second[0]} are of different types. Use the published file."
            )
        images = (
            _existing(places[0] / first[1] / f"{first[0]}.jpg"),
            _existing(places[0] / second[1] / f"{second[0]}.jpg"),
        )
        found.append(ImagePair(images, (first[2], second[2]), first[1]))
    return found


# --- Reads videos with captions in the formats of TGIF (a table of addresses) and MSR-VTT (JSON) ---------------------

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
