"""Recipes made small."""

import shlex
from pathlib import Path
from typing import Any

import pytest

GENERATION = "--generation_max_new_tokens 12 --generation_num_beams 2 --use_cpu --disable_tqdm true".split()
"""Arguments that make the run of a recipe small."""


def train(recipe: Any, folder: Path, arguments: list[str], more: str = "") -> Path:
    """Run a recipe with arguments, and more as on a command line; the path of its results."""
    folders = ["--output_dir", str(folder / "out"), "--feature_cache_dir", str(folder / "cache")]
    return recipe.main([*folders, *arguments, *shlex.split(more)])


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a module's `recipe` with its arguments `SHORT`."""
    folder = tmp_path_factory.mktemp("run")
    assert train(request.module.recipe, folder, request.module.SHORT) == folder / "out" / "results.json"
    return folder / "out"
