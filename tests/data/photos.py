"""Folders of small valid and invalid images."""

import io
import json
from pathlib import Path

import datasets
import matplotlib
import numpy as np
from PIL import Image


def png(seed, size=(12, 10)):
    """A small image as PNG bytes, different for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGB").save(buffer, "PNG")
    return buffer.getvalue()


def captions(number, count=5):
    return [f"caption {chr(97 + k)} of picture {number}" for k in range(count)]


def make_folder(folder, count=20, *, column="captions", rows=None):
    """`count` pictures and a metadata.jsonl; `rows` replaces or adds lines by picture number."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png(number))
        line = {"file_name": f"{number}.png", column: captions(number)}
        lines.append({**line, **(rows or {}).get(number, {})})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def embedded(count, *, captions_of=captions):
    """A data set that contains its images, as on the Hub."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "image_id": datasets.Value("string"),
            "captions": datasets.List(datasets.Value("string")),
        }
    )
    columns = {
        "image": [{"bytes": png(number), "path": None} for number in range(count)],
        "image_id": [f"id-{number}" for number in range(count)],
        "captions": [captions_of(number) for number in range(count)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


def photograph(number=0, side=640):
    """A crop of Grace Hopper's photograph (US Navy, public domain, in matplotlib), `side` pixels wide.

    Each number is another crop; odd ones are mirrored.
    """
    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    left, top = 12 * (number % 8), 16 * (number % 7)
    image = image.crop((left, top, left + 400, top + 300)).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number % 2 else image


def photographs(folder, number, side=640):
    """A data set of JPEG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{i}.jpg") for i in range(number)]
    for i, path in enumerate(paths):
        photograph(i, side).save(path, quality=92)
    columns = {"image": paths, "image_id": [str(i) for i in range(number)], "captions": [["a woman"]] * number}
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
