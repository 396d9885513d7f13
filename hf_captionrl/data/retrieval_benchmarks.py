"""Published retrieval benchmarks, read from their files: TrueMatch's release, ImageCoDe, and the CapEnrich hard pool.

The captioned data sets nocaps and Concadia are in `data/nocaps_concadia.py`. Nothing is downloaded, and pickles are never
opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "IMAGECODE_SET_SIZE",
    "RetrievalSets",
    "coco_id",
    "load_hard_pool",
    "load_imagecode",
    "load_published_bags",
    "match_coco_ids",
    "read_json",
]

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
