"""Reads nocaps (by domain) and Concadia from their published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import datasets

from hf_captionrl.data.caption_cleaning import to_caption_list
from hf_captionrl.data.caption_columns import CAPTIONS
from hf_captionrl.data.image_paths import refuse_outside
from hf_captionrl.data.raw_splits import SPLIT_NAMES
from hf_captionrl.data.retrieval_benchmarks import read_json

__all__ = ["NOCAPS_DOMAINS", "load_concadia", "load_nocaps"]

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
