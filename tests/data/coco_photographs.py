"""Ten photographs of COCO with their captions, under CC BY 2.0; see `photographs/NOTICE`."""

import json
import shutil
from pathlib import Path

from PIL import Image, ImageOps

FOLDER = Path(__file__).with_name("photographs")


def read_rows():
    """`file_name`, `captions`, `license` and `source` of each photograph."""
    lines = (FOLDER / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def make_photographs(folder, number):
    """An image folder of `number` different JPEG files, named `0.jpg` and so on, with five captions each.

    The first ten are the photographs. Each further ten are copies with a narrower frame, every other ten mirrored, so
    that caches that know images by their content keep all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    photographs, lines = read_rows(), []
    for i in range(number):
        turn, index = divmod(i, len(photographs))
        row, path = photographs[index], folder / f"{i}.jpg"
        if turn == 0:
            shutil.copyfile(FOLDER / row["file_name"], path)
        else:
            with Image.open(FOLDER / row["file_name"]) as opened:
                image = ImageOps.crop(opened.convert("RGB"), 8 * turn)
            (ImageOps.mirror(image) if turn % 2 else image).save(path, quality=92)
        lines.append(json.dumps({"file_name": path.name, "captions": row["captions"]}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")
