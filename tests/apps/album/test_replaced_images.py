"""A repeated `captionrl album` reads and captions exactly the images whose content changed, in a folder and inside a table."""

import io
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hf_captionrl.apps.album import album as steps
from hf_captionrl.apps.album.sources import AlbumSource, load_album_source
from hf_captionrl.cli import main

QUICK = "--num_beams 1 --num_samples 1 --max_new_tokens 6 --batch_size 2 --cache_dir cache --json".split()
MODELS = ["--model", "scenes:blip-mle", "--scorer", "scenes:siglip-held-out"]


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(images):
    Path("album").mkdir(exist_ok=True)
    for number, image in enumerate(images):
        path = Path("album", f"{number}.png")
        if not path.is_file() or path.read_bytes() != png(image):
            path.write_bytes(png(image))
            os.utime(path, ns=(7, 10**18 + sum(png(image))))
    return "album"


def write_table(images):
    table = {"image": [{"bytes": png(image), "path": f"{n}.png"} for n, image in enumerate(images)]}
    pyarrow.parquet.write_table(
        pyarrow.table({**table, "image_id": [f"{n}.png" for n in range(len(images))]}), "a.parquet"
    )
    return "a.parquet"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Working folder of a test; images that were opened to be read, and captioned."""
    monkeypatch.chdir(tmp_path)
    found, caption, read = {"read": [], "captioned": []}, steps.generate_candidates, steps.read_batch

    def captioned(captioner, images, rows, *rest):
        found["captioned"] += rows
        return caption(captioner, images, rows, *rest)

    def reading(images, rows, *rest, **more):
        found["read"] += rows
        return read(images, rows, *rest, **more)

    monkeypatch.setattr(steps, "generate_candidates", captioned)
    monkeypatch.setattr(steps, "read_batch", reading)
    return found


def captions(name):
    assert main(["album", name, *MODELS, *QUICK, "--output", "o.jsonl"]) == 0
    return [json.loads(line)["caption"] for line in Path("o.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("write", [write_folder, write_table])
def test_only_replaced_images_are_read_and_captioned_again(asked, scenes, write):
    first = captions(write(scenes[:4]))
    assert asked == {"read": [0, 1, 2, 3], "captioned": [0, 1, 2, 3]}
    assert captions(write(scenes[:4])) == first
    assert asked == {"read": [0, 1, 2, 3], "captioned": [0, 1, 2, 3]}, "the same images in a new file"
    changed = captions(write([scenes[0], scenes[9], scenes[2], scenes[3]]))
    assert asked == {"read": [0, 1, 2, 3, 1], "captioned": [0, 1, 2, 3, 1]}
    assert changed[1] != first[1]
    # The earlier image is known.
    assert captions(write(scenes[:4])) == first
    assert asked["captioned"] == [0, 1, 2, 3, 1]
    # Images that change places.
    swapped = captions(write([scenes[1], scenes[0], scenes[2], scenes[3]]))
    assert asked["captioned"] == [0, 1, 2, 3, 1, 0, 1]
    assert swapped[2:] == first[2:]


def test_a_file_that_was_only_touched_is_not_captioned_again(asked, scenes):
    first = captions(write_folder(scenes[:3]))
    os.utime(Path("album", "1.png"))
    assert captions("album") == first
    assert asked == {"read": [0, 1, 2, 1], "captioned": [0, 1, 2]}


def test_stamps_tell_images_of_one_name_apart(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    name = write_table(scenes[:3])
    counted = []
    first = load_album_source(name).stamps(counted.append)
    assert len(set(first)) == 3
    assert counted == [1, 1, 1]
    second = load_album_source(write_table([scenes[0], scenes[0], scenes[2]])).stamps()
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True]
    # Files are not opened; what cannot be read is left to the stage that reads.
    Path("x.png").write_bytes(b"no image")
    source = AlbumSource([scenes[0], "x.png", {"bytes": None, "path": None}], list("abc"))
    counted.clear()
    assert source.stamps(counted.append)[1:] == [f"8-{os.stat('x.png').st_mtime_ns}", "unreadable"]
    assert counted == [1]
