"""A small piece of the embedded world, and one way to run a trainer on it."""

import pytest

from hf_captionrl.scenes import load_scenes


@pytest.fixture(scope="session")
def scenes():
    return load_scenes(num_train=16, num_validation=12, num_test=0)
