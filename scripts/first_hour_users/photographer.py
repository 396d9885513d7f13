"""A photographer with a folder of photographs: no metadata, subfolders, odd names, several formats."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from hf_captionrl.retrieval.bags import load_neighbours
from scripts.first_hour_users.session import Session

NAMES = (
    *(f"DSC_{number:04d}.JPG" for number in range(1, 9)),
    *(f"2019 holiday/IMG {number}.jpeg" for number in range(1, 6)),
    *(f"scans/page-{number}.png" for number in range(1, 5)),
    *(f"phone/{number}.webp" for number in range(1, 4)),
    "übung/straße.jpg",
    "übung/写真.png",
    'it\'s, "odd"/100%.jpg',
    "-first.jpg",
    "a b/c d/e.f.png",
    "same name/1.jpg",
    "other/same name/1.jpg",
    "grey.jpg",
    "print.jpg",
    "drawing.png",
)
OTHERS = ("Thumbs.db", ".DS_Store", "notes.txt", "2019 holiday/list.pdf")


def _drawn(number: int) -> Image.Image:
    """Something else in every photograph, at another size."""
    drawn = np.random.default_rng(number)
    width, height = int(drawn.integers(160, 480)), int(drawn.integers(120, 360))
    sky = np.linspace(drawn.integers(0, 256, 3), drawn.integers(0, 256, 3), height)[:, None, :]
    noise = drawn.normal(0, 6, (height, width, 3))
    image = Image.fromarray(np.clip(sky + noise, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y, size = (int(value) for value in drawn.integers(20, 120, 3))
        color = tuple(int(value) for value in drawn.integers(0, 256, 3))
        (draw.ellipse if drawn.random() < 0.5 else draw.rectangle)((x, y, x + size, y + size), fill=color)
    return image


def make_photos(folder: Path) -> list[str]:
    """Write the photographs, and what else lies in such folders."""
    for number, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image, options = _drawn(number), {}
        if name == "grey.jpg":
            image = image.convert("L")
        elif name == "print.jpg":
            image = image.convert("CMYK")
        elif name == "drawing.png":
            image.putalpha(128)
        elif name == "DSC_0003.JPG":
            exif: Any = Image.Exif()
            exif[0x0112] = 6  # held upright
            options["exif"] = exif
        image.save(path, **options)
    for name in OTHERS:
        (folder / name).write_bytes(b"not a photograph")
    return list(NAMES)


def play_photographer(session: Session) -> None:
    """Caption the folder, again with the same command, find look-alikes; then a broken file, and a wrong name."""
    names = make_photos(session.path("photos"))
    number = len(names)
    caption = "captionrl caption scenes:blip-mle --dataset imagefolder --data_dir photos --output captions.jsonl"
    output = session.run(caption, max_lines=8)
    session.check_says(output, f"captions of {number} of {number} images")

    session.check_captions("captions.jsonl", number, lambda ids: set(ids) == set(names))
    before = hashlib.sha256(session.path("captions.jsonl").read_bytes()).hexdigest()
    session.check_says(session.run(caption, max_lines=8), f"captions of {number} of {number} images")
    after = hashlib.sha256(session.path("captions.jsonl").read_bytes()).hexdigest()
    session.check("the same command again changes nothing", after == before, True)
    session.run(
        "captionrl bags --dataset imagefolder --data_dir photos --mode neighbours --features image "
        "--scorer scenes:clip-reward "
        "--output neighbours.safetensors",
        max_lines=12,
    )
    neighbours = load_neighbours(session.path("neighbours.safetensors"))
    session.check("photographs with neighbours", set(neighbours.image_ids) == set(names), True)
    (session.path("photos") / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 truncated")
    output = session.run(caption.replace("captions.jsonl", "again.jsonl"), max_lines=8)
    session.check_says(output, f"captions of {number} of {number + 1} images", "broken")
    typo = "captionrl caption scenes:blip-mle --dataset imagefolder --data_dir fotos --output none.jsonl"
    session.check_says(session.run(typo, code=2, max_lines=2), "fotos")
    left = session.path("none.jsonl")
    session.check("a folder that is not there leaves no captions", left.exists() and left.stat().st_size > 0, False)
