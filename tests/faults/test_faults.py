"""One fault of each kind; `make test-slow` does twenty."""

import random

import pytest

from tests.faults.areas import AREAS, run_area
from tests.faults.jobs import KEYS, TRAINERS
from tests.faults.of_data import killed_cache


# Killed writers of captions, features and answers, and killed actors, have tests beside what they write.
@pytest.mark.parametrize("name", sorted(AREAS.keys() - {"push"}))
def test_one_fault_of_each_area_is_survived(warm_process, name):
    kills = {"training": len(TRAINERS), "pixels": 4}.get(name, 1)  # of each trainer; of both forms, filled and read
    row = run_area(warm_process, name, kills, seed=1)
    assert (row["survived"], row["lost"]) == (kills, 0), row["notes"]


def test_a_pixel_cache_killed_while_it_is_filled_is_completed_by_the_same_command(warm_process, tmp_path):
    trials = [*killed_cache(warm_process, tmp_path, random.Random(3), 3)]
    assert [(trial.survived, trial.lost, trial.repeated) for trial in trials] == [(True, 0, 0)] * 3
    stored = (tmp_path / "asked").read_text().split()
    assert {*map(str, range(len(KEYS)))} == set(stored)  # every image was prepared


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", AREAS)
def test_twenty_faults_of_each_area_are_survived(warm_process, name):
    row = run_area(warm_process, name, 20, seed=2)
    assert (row["faults"], row["survived"], row["lost"]) == (20, 20, 0), row["notes"]


# --- A recipe with several trainings is stopped and resumed ---

SHORT = [
    *("--max_train_images", "16", "--max_eval_images", "8", "--max_test_images", "12", "--num_train_epochs", "3"),
    *("--per_device_train_batch_size", "4", "--generation_max_new_tokens", "8", "--generation_num_beams", "1"),
    *("--compare_mle_weights", "1", "--perplexity_name_or_path", "none", "--held_out_scorer_name_or_path", "none"),
    *("--use_cpu", "--disable_tqdm", "true", "--gallery_size", "2", "--model_name_or_path", "scenes:blip-mle"),
    *("--logging_strategy", "no", "--learning_rate", "1e-3"),
]


def arguments(folder, *more):
    return [*SHORT, "--output_dir", str(folder / "out"), "--feature_cache_dir", str(folder / "cache"), *more]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 12, 17])
def test_stopped_anywhere_it_comes_to_the_same_table(warm_process, tmp_path, step):
    whole = warm_process.run("recipe", arguments=arguments(tmp_path / "whole"), timeout=300)
    assert whole.code == 0, whole.output
    assert whole.value["steps"] == 24  # two trainings of three epochs of four steps
    stopped = warm_process.run("recipe", arguments=arguments(tmp_path), signal_at=step, timeout=300)
    assert stopped.code == 0, stopped.output
    assert stopped.value is None
    assert "is saved. resume_from_checkpoint resumes from it." in stopped.output
    assert not (tmp_path / "out" / "results.json").exists()
    again = warm_process.run("recipe", arguments=arguments(tmp_path, "--resume_from_checkpoint", "true"), timeout=300)
    assert again.code == 0, again.output
    assert again.value["rows"] == whole.value["rows"]
