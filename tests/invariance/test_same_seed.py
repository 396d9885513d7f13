"""The same seed gives the same table twice; `--deterministic` asks torch for it on every device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_captionrl.apps.experiments.arguments import describe, parse_arguments
from recipes import self_retrieval_blip, sle_blip, smile_blip

SHORT = [
    *("--max_steps", "1", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "32"),
    *(
        "--max_train_images",
        "8",
        "--max_eval_images",
        "4",
        "--max_test_images",
        "101",
    ),
    *("--generation_max_new_tokens", "6", "--generation_num_beams", "1", "--eval_strategy", "no"),
    *("--save_strategy", "no", "--use_cpu", "--disable_tqdm", "true", "--learning_rate", "1e-3"),
]


@pytest.fixture(autouse=True)
def as_before():
    """What the argument switches on holds for the process; no other test may see it."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
    environment = {name: os.environ.get(name) for name in names}
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def table(recipe: Any, folder: Path, *more: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    path = recipe.main(["--output_dir", str(folder), "--feature_cache_dir", str(folder / "cache"), *SHORT, *more])
    results = json.loads(path.read_text())
    return results["rows"], results["config"]


OF = {
    # A smaller pool for what every run of the tests does; no number of its table needs 101 images.
    "smile": (
        smile_blip,
        ("--load_best_model_at_end", "false", "--compare_mle_weights", "0", "--max_test_images", "16"),
    ),
    "self-retrieval": (
        self_retrieval_blip,
        (
            *("--variants", "{}", "--bag_schedule", '{"1": 2}'),
            *("--num_generations", "2", "--max_completion_length", "6", "--guard", "off"),
        ),
    ),
    # One step at this rate repeats words, and the guard would withhold the model.
    "sle": (sle_blip, ("--max_completion_length", "6", "--num_generations", "3", "--guard", "off")),
}


@pytest.mark.slow  # recipes from beginning to end, twice
@pytest.mark.parametrize("name", OF)
def test_one_seed_gives_one_table(tmp_path, name):
    recipe, more = OF[name]
    first, config = table(recipe, tmp_path / "first", *more, "--seed", "3")
    again, deterministic = table(recipe, tmp_path / "again", *more, "--seed", "3", "--deterministic")
    assert len(first) > 2
    assert first == again  # every number of every row, to the last bit
    settings, again = (
        {k: v for part in c.values() if isinstance(part, dict) for k, v in part.items()}
        for c in (config, deterministic)
    )
    assert (settings["deterministic"], again["deterministic"]) == (False, True)
    # The control: another seed is another table.
    torch.use_deterministic_algorithms(False)
    other, _ = table(recipe, tmp_path / "other", *more, "--seed", "4")
    assert other != first


def test_the_argument_reaches_torch(tmp_path):
    argv = ["--output_dir", str(tmp_path)]
    assert len(parse_arguments((smile_blip.SmileBlipConfig,), argv)) == 1
    assert not torch.are_deterministic_algorithms_enabled()
    (tmp_path / "run.yaml").write_text("deterministic: true\n")
    (config,) = parse_arguments((smile_blip.SmileBlipConfig,), ["--config", str(tmp_path / "run.yaml"), *argv])
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert describe([config])["SmileBlipConfig"]["deterministic"] is True
