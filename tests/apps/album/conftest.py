"""The embedded models and scenes, and the Hub of a test, for the Space."""

import pytest
import torch
from PIL import Image

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.hub.conftest import hub

__all__ = ["captioner", "hub", "images", "scenes", "scorer"]


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
