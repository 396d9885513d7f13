"""Winoground and MMVP-VLM: two images and two captions that a scorer must match, read from their files."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ImagePair", "load_mmvp", "load_winoground"]


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
