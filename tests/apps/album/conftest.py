"""The embedded models and scenes, and the Hub of a test, for the Space."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.cli import main
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.hub.conftest import hub

__all__ = ["captioner", "hub", "images", "scenes", "scorer"]

MODEL = ["--model", "scenes:blip-mle"]
QUICK = "--scorer scenes:siglip-held-out --num_beams 1 --num_samples 1 --max_new_tokens 6 --batch_size 2".split()


def album(*arguments, images="photos", cache="cache"):
    """The exit status of a quick command."""
    return main(["album", images, *QUICK, "--cache_dir", cache, *arguments])


def rows_of(path):
    """The objects of a file of JSON lines, whose texts may contain other separators."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_images(images, names, folder="photos"):
    """Write images into a folder of the working directory, which is returned as a whole path."""
    for name, image in zip(names, images, strict=False):
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return Path(folder).absolute()


def contents(folder, pattern="**/*"):
    """The content of every file below a folder, and when it was written."""
    files = [path for path in Path(folder).glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


class Axes:
    """The text `image 2` fits image 2, and `all` fits every image equally."""

    logit_scale, max_text_tokens, signature = 1.0, 77, "axes@1"

    def image_features(self, opened):
        return torch.stack([torch.eye(6)[image.getpixel((0, 0))[0] // 40] for image in opened])

    def text_features(self, captions):
        rows = [torch.eye(6)[int(c[-1])] if c[-1].isdigit() else torch.ones(6) / 6**0.5 for c in captions]
        return torch.stack(rows)

    def count_truncated(self, captions):
        return sum("long" in text for text in captions)


def picture(number):
    """The image of an axis, 0 to 5."""
    return Image.new("RGB", (8, 8), (40 * number, 0, 0))


@pytest.fixture(scope="module")
def captioner():
    return load_captioner(model_path("scenes:blip-mle"), device="cpu")


@pytest.fixture(scope="module")
def scorer():
    return load_scorer(model_path("scenes:siglip-held-out"), device="cpu")


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"]


@pytest.fixture(scope="module")
def images(scenes):
    """The first bag of look-alikes."""
    return scenes[:3]
