"""Fixtures of the tests of `captionrl truematch`: one benchmark, built once."""

import shutil
from pathlib import Path

import pytest

from hf_captionrl.cli import main
from hf_captionrl.scenes import load_scenes

IMAGES = 105
"""Enough for RD100."""


def truematch(*arguments):
    """The exit code of `captionrl truematch` with these arguments."""
    return main(["truematch", *map(str, arguments)])


def build(folder, cache, *more):
    """The exit code of a build of the first scenes."""
    return truematch("build", "--output", folder, "--max_images", IMAGES, "--cache_dir", cache, *more)


@pytest.fixture(scope="session")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def built(tmp_path_factory, cache):
    """A shared benchmark; tests must not change it."""
    folder = tmp_path_factory.mktemp("built") / "truematch"
    assert build(folder, cache) == 0
    return folder


@pytest.fixture
def folder(built, tmp_path):
    """A copy of the benchmark for one test."""
    return Path(shutil.copytree(built, tmp_path / "truematch"))
