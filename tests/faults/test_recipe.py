"""A recipe of several trainings: stopped and resumed, and alone in its folder."""

import os
import signal

import pytest

from tests.faults.campaign import wait_until

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
@pytest.mark.parametrize("step", [2, 11, 12, 17, 24])
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


@pytest.mark.slow  # two recipes; test_campaign.py has two trainers
def test_a_second_one_in_the_same_folder_is_refused(warm_process, tmp_path):
    ready = tmp_path / "ready"
    holder = warm_process.start("hold_folder", folder=str(tmp_path / "out"), ready=str(ready))
    try:
        wait_until(ready.exists)
        second = warm_process.run("recipe", arguments=arguments(tmp_path))
    finally:
        os.kill(holder, signal.SIGKILL)
        warm_process.wait(holder)
    assert second.code == 1
    assert f"ValueError: Another run is writing to '{tmp_path / 'out'}'." in second.output.splitlines()[-1]
