"""One fault of each kind; `make test-slow` does twenty."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.faults.areas import AREAS, run_area
from tests.faults.jobs import KEYS, TRAINERS
from tests.faults.of_data import killed_cache, numbered_images

ROOT = Path(__file__).parents[2]
# Killed writers of captions, features, answers and pushes have quick tests of their own, beside what they write; a kill while
# a checkpoint is saved is one of a training.
ELSEWHERE = {"saving", "features", "bags", "captions", "evaluation", "boosting", "push", "ray"}
SEVERAL_PROCESSES = {"signal_rank", "worker", "rank"}  # in the slow tests alone
QUICK = [name for name in AREAS if name not in ELSEWHERE | SEVERAL_PROCESSES]


@pytest.mark.parametrize("name", QUICK)
def test_one_fault_of_each_area_is_survived(warm_process, name):
    kills = {"training": len(TRAINERS), "pixels": 4}.get(name, 1)  # of each trainer; of both forms, filled and read
    row = run_area(warm_process, name, kills, seed=1)
    assert (row["survived"], row["lost"]) == (kills, 0), row["notes"]


def test_a_pixel_cache_killed_while_it_is_filled_is_completed_by_the_same_command(warm_process, tmp_path):
    images = numbered_images(tmp_path)
    trials = [*killed_cache(warm_process, tmp_path / "run", random.Random(3), 3, images=str(images))]
    assert [(trial.survived, trial.lost, trial.repeated) for trial in trials] == [(True, 0, 0)] * 3
    stored = sorted((tmp_path / "run" / "asked").read_text().split(), key=int)
    assert [*map(str, range(len(KEYS)))] == sorted(set(stored), key=int)  # every image was prepared


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in AREAS if name != "ray"])  # tests/utils/test_ray.py, last of all
def test_twenty_faults_of_each_area_are_survived(warm_process, name):
    row = run_area(warm_process, name, 20, seed=2)
    assert (row["faults"], row["survived"], row["lost"]) == (20, 20, 0), row["notes"]


def test_a_broken_checkpoint_that_is_not_looked_through_is_noticed(warm_process, tmp_path):
    """The negative control: what seals find is real."""
    whole = warm_process.run("train", kind="smile", folder=str(tmp_path / "run"), max_steps=4)
    assert whole.code == 0, whole.output
    weights = tmp_path / "run" / "checkpoint-4" / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-2] ^= 64  # of the mantissa: another weight, and still a finite one
    weights.write_bytes(flipped)
    shutil.copytree(tmp_path / "run", tmp_path / "blind")
    blind = warm_process.run("train", kind="smile", folder=str(tmp_path / "blind"), max_steps=4, blind=True)
    assert blind.code == 0
    assert blind.value["digest"] != whole.value["digest"]
    looked = warm_process.run("train", kind="smile", folder=str(tmp_path / "run"), max_steps=4)
    assert looked.value["digest"] == whole.value["digest"]


def test_a_process_that_hangs_is_not_waited_for(warm_process, tmp_path):
    held = warm_process.start("hold_folder", folder=str(tmp_path), ready=str(tmp_path / "ready"))
    ended = warm_process.wait(held, timeout=0.1)
    assert ended.code is None
    with pytest.raises(ProcessLookupError):
        os.kill(held, 0)
