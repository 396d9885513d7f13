"""The embedded models and scenes, and the Hub of a test, for the Space."""

import pytest

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.hub.conftest import hub

__all__ = ["captioner", "hub", "images", "scenes", "scorer"]


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
