"""A real photograph: Grace Hopper, US Navy, public domain, which matplotlib ships (512 x 606)."""

from pathlib import Path

import datasets
import matplotlib
from PIL import Image


def photograph(number=0, side=640):
    """A crop of the photograph, scaled to `side` pixels; each number is another crop, odd ones are mirrored."""
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
