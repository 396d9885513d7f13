"""The default run of a recipe, made small."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a module's `recipe` with its arguments `SHORT`."""
    folder = tmp_path_factory.mktemp("run")
    folders = ["--output_dir", str(folder / "out"), "--feature_cache_dir", str(folder / "cache")]
    path = request.module.recipe.main([*folders, *request.module.SHORT])
    assert path == folder / "out" / "results.json"
    return folder / "out"
