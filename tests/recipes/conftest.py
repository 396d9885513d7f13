"""The default run of a recipe, made small."""

from pathlib import Path

import pytest

GENERATION = [
    *("--generation_max_new_tokens", "12", "--generation_num_beams", "2", "--use_cpu", "--disable_tqdm", "true"),
    *("--gallery_size", "4"),
]
"""Arguments that make the run of a recipe small."""


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a module's `recipe` with its arguments `SHORT`."""
    folder = tmp_path_factory.mktemp("run")
    folders = ["--output_dir", str(folder / "out"), "--feature_cache_dir", str(folder / "cache")]
    path = request.module.recipe.main([*folders, *request.module.SHORT])
    assert path == folder / "out" / "results.json"
    return folder / "out"
