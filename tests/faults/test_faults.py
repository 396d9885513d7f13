"""Faults at moments that are drawn: one of each kind; `make test-slow` does twenty.

Killed writers of captions, features and answers, and killed actors, have tests beside what they write.
"""

import os
import random
import shutil
import signal

import pytest

from hf_captionrl.hub import folder_contents
from tests.data.photos import png
from tests.faults.jobs import KEYS, TRAINERS
from tests.faults.warm_process import IN_TIME, WarmProcess, wait_until
from tests.hub.folders import publishable
from tests.hub.server import HubServer


@pytest.fixture(scope="module")
def warm_process():
    with WarmProcess() as warm:
        yield warm


def times(quick):
    """How often: a few times, or twenty."""
    return pytest.mark.parametrize(
        ("number", "seed"), [(quick, 1), pytest.param(20, 2, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
    )


def steps_of(path):
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def checkpoints(folder):
    """Steps of the checkpoints."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def run(warm_process, job, **arguments):
    """What a job that succeeds gives back."""
    ended = warm_process.run(job, **arguments)
    assert ended.code == 0, ended.output
    return ended.value


@times(len(TRAINERS))
def test_killed_training_resumes_with_the_same_bits(warm_process, tmp_path, number, seed):
    rng, whole = random.Random(seed), {}
    for n in range(number):
        kind = TRAINERS[n % len(TRAINERS)]
        settings = {"kind": kind, "save_total_limit": 1 + n // len(TRAINERS) % 2}
        if kind not in whole:
            whole[kind] = run(warm_process, "train", folder=str(tmp_path / f"{kind}-whole"), at=0, **settings)
        folder, steps = tmp_path / f"{kind}-{n}", tmp_path / f"steps-{n}"
        settings |= {"folder": str(folder), "steps_file": str(steps)}
        killed = warm_process.run("train", at=rng.randint(1, whole[kind]["calls"]), **settings)
        assert killed.killed, killed.output
        finished, before = max(checkpoints(folder), default=0), len(steps_of(steps))
        assert run(warm_process, "train", **settings)["digest"] == whole[kind]["digest"]
        # Steps of a finished checkpoint are not repeated.
        assert min(steps_of(steps)[before:], default=finished + 1) > finished
        shutil.rmtree(folder, ignore_errors=True)


@times(1)
def test_signalled_training_saves_and_resumes(warm_process, tmp_path, number, seed):
    rng, whole = random.Random(seed), {}
    for n in range(number):
        kind = TRAINERS[n % len(TRAINERS)]
        settings = {"kind": kind, "save_on_signal": True, "eval_strategy": "epoch", "save_steps": 3}
        if kind == "caption-rl":
            settings["save_steps"] = 4  # two steps share a rollout
        if kind not in whole:
            whole[kind] = run(warm_process, "train", folder=str(tmp_path / f"{kind}-whole"), at=0, **settings)
        folder, steps = tmp_path / f"{kind}-{n}", tmp_path / f"steps-{n}"
        settings |= {"folder": str(folder), "steps_file": str(steps)}
        # Not in the first tenth, when the trainer is not yet listening, nor at the very end.
        at, name = int(whole[kind]["calls"] * rng.uniform(0.15, 0.85)), rng.choice(["SIGTERM", "SIGINT"])
        stopped = warm_process.run("train", at=at, name=name, **settings)
        done = steps_of(steps)
        assert (stopped.code, stopped.value) == (128 + getattr(signal, name), None), stopped.output
        assert f"Stopped after step {done[-1]}" in stopped.output
        assert stopped.seconds_since() < IN_TIME
        assert checkpoints(folder)[-1] == done[-1]
        assert run(warm_process, "train", **settings)["digest"] == whole[kind]["digest"]
        assert len(steps_of(steps)) == len(set(steps_of(steps)))  # no step is repeated
        shutil.rmtree(folder, ignore_errors=True)


def test_second_run_in_a_folder_is_refused_until_the_first_is_killed(warm_process, tmp_path):
    settings = {"kind": "smile", "folder": str(tmp_path / "run"), "max_steps": 1}
    holder = warm_process.start("hold_folder", folder=settings["folder"], ready=str(tmp_path / "ready"))
    try:
        wait_until((tmp_path / "ready").exists)
        second = warm_process.run("train", **settings)
    finally:
        os.kill(holder, signal.SIGKILL)
        warm_process.wait(holder)
    assert second.code == 1
    assert f"ValueError: Another run is writing to '{tmp_path / 'run'}'." in second.output
    assert not checkpoints(tmp_path / "run")
    run(warm_process, "train", **settings)


@times(1)
def test_full_disk_while_a_checkpoint_is_saved_loses_none(warm_process, tmp_path, number, seed):
    """No file may grow beyond a limit, which is drawn."""
    rng, settings = random.Random(seed), {"kind": "smile", "save_total_limit": None}
    whole = run(warm_process, "train", folder=str(tmp_path / "whole"), **settings)
    largest = max(file.stat().st_size for file in (tmp_path / "whole").rglob("*") if file.is_file())
    for n in range(number):
        settings["folder"] = str(tmp_path / f"run-{n}")
        full = warm_process.run("train", limit=rng.randrange(2**17, largest), **settings)
        assert full.code == 1, full.output
        assert not list((tmp_path / f"run-{n}").glob(".partial/*"))
        before = checkpoints(tmp_path / f"run-{n}")
        assert run(warm_process, "train", **settings)["digest"] == whole["digest"]  # somebody has made room
        assert set(before) <= set(checkpoints(tmp_path / f"run-{n}"))


@pytest.fixture
def images(tmp_path):
    """A folder of small images named by `KEYS`."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, key in enumerate(KEYS):
        (folder / f"{key}.png").write_bytes(png(number))
    return str(folder)


@times(3)
def test_killed_filling_of_a_pixel_cache_is_completed_by_the_same_command(
    warm_process, tmp_path, images, number, seed
):
    rng, notes = random.Random(seed), tmp_path / "notes"
    warm_process.warm("cached", folder=str(tmp_path / "warm"), images=images)
    whole = {"folder": str(tmp_path / "whole"), "notes": str(tmp_path / "all")}
    calls = run(warm_process, "cache", at=0, images=images, **whole)["calls"]
    there: list[str] = []
    for n in range(number):
        if n % 3 == 0:  # then the same filling is killed again
            store, there = str(tmp_path / f"store-{n}"), []
            notes.unlink(missing_ok=True)
        # A later run has less to do: at most what is left of the calls, or the moment would lie behind its end.
        left = calls * (len(KEYS) - len(there)) // len(KEYS)
        paid = len(steps_of(notes))
        # Threads do not make the same calls in each run.
        at = rng.randint(1, max(1, left * 9 // 10))
        killed = warm_process.run("cache", folder=store, notes=str(notes), at=at, images=images)
        assert killed.killed, killed.output
        found = run(warm_process, "cached", folder=store, images=images)
        assert found["right"]
        assert set(there) <= set(found["keys"])
        assert not {KEYS[row] for row in steps_of(notes)[paid:]} & set(there)  # nothing is prepared twice
        there = found["keys"]
    run(warm_process, "cache", folder=store, notes=str(notes), images=images)
    assert run(warm_process, "cached", folder=store, images=images) == {"keys": KEYS, "right": True}
    assert set(steps_of(notes)) == set(range(len(KEYS)))  # every image was prepared


@times(2)
def test_damaged_pixel_cache_is_filled_again(warm_process, tmp_path, images, number, seed):
    """A file of the cache is truncated or removed."""
    rng = random.Random(seed)
    for n in range(number):
        store, more = tmp_path / f"cache-{n}", {"images": images}
        more |= {"folder": str(store), "notes": str(tmp_path / "notes")}
        run(warm_process, "cache", **more)
        path = rng.choice([p for p in sorted(store.rglob("*")) if p.suffix in (".bin", ".json") and p.stat().st_size])
        if rng.random() < 0.5:
            os.truncate(path, rng.randrange(path.stat().st_size))
        else:
            path.unlink()
        run(warm_process, "cache", **more)
        more.pop("notes")
        assert run(warm_process, "cached", **more) == {"keys": KEYS, "right": True}, path


@pytest.mark.slow
def test_killed_push_is_completed_by_the_same_command(warm_process, tmp_path):
    rng, source = random.Random(2), publishable(tmp_path / "source")
    with HubServer() as hub:
        shutil.copytree(source, tmp_path / "warm")
        warm_process.warm("push", folder=str(tmp_path / "warm"), url=hub.url)
    with HubServer() as hub:
        shutil.copytree(source, tmp_path / "whole")
        calls = run(warm_process, "push", folder=str(tmp_path / "whole"), url=hub.url, at=0)["calls"]
    for n in range(20):
        with HubServer() as hub:
            folder = shutil.copytree(source, tmp_path / f"run-{n}")
            # Threads do not make the same calls in each run, so not the last tenth.
            killed = warm_process.run("push", folder=str(folder), url=hub.url, at=rng.randint(1, calls * 9 // 10))
            assert killed.killed, killed.output
            run(warm_process, "push", folder=str(folder), url=hub.url)
            published, repo = folder_contents(folder).published, hub.repo("tester/smile")
            assert all(repo.files.get(name) == (folder / name).read_bytes() for name in published)
            assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
            # A commit holds all files or none; that of a push that was killed is not made a second time.
            commits = list(repo.commits.values())
            assert not [commit for commit in commits if 1 < len(commit.files) < len(published)]
            assert len(commits) <= 2


SHORT = [
    *("--max_train_images", "16", "--max_eval_images", "8", "--max_test_images", "12", "--num_train_epochs", "3"),
    *("--per_device_train_batch_size", "4", "--generation_max_new_tokens", "8", "--generation_num_beams", "1"),
    *("--compare_mle_weights", "1", "--perplexity_name_or_path", "none", "--held_out_scorer_name_or_path", "none"),
    *("--early_evaluations", "--use_cpu", "--disable_tqdm", "true", "--model_name_or_path", "scenes:blip-mle"),
    *("--logging_strategy", "no", "--learning_rate", "1e-3"),
]


@pytest.mark.parametrize("steps", [(12,), pytest.param((2, 17), marks=pytest.mark.slow)])
def test_the_same_command_resumes_a_recipe_of_several_trainings(warm_process, tmp_path, steps):
    few = [*SHORT, "--feature_cache_dir", str(tmp_path / "cache"), "--output_dir"]
    whole = run(warm_process, "recipe", arguments=[*few, str(tmp_path / "whole")], timeout=300)
    assert whole["steps"] == 24  # two trainings of three epochs of four steps
    for step in steps:
        out = tmp_path / f"stopped-{step}"
        stopped = warm_process.run("recipe", arguments=[*few, str(out)], signal_at=step, timeout=300)
        assert (stopped.code, stopped.value) == (143, None), stopped.output
        assert not (out / "results.json").exists()
        resumed = warm_process.run("recipe", arguments=[*few, str(out)], timeout=300)
        assert f"Resuming from step {(step - 1) % 12 + 1}" in resumed.output or step % 12 == 0
        assert resumed.value == {"rows": whole["rows"], "steps": 24 - step}, resumed.output
        finished = warm_process.run("recipe", arguments=[*few, str(out)], timeout=300)
        assert finished.value == {"rows": whole["rows"], "steps": 0}, finished.output
        assert finished.output.count("not trained again") == 2


def test_a_recipe_starts_anew_on_request_only(warm_process, tmp_path):
    few = [*SHORT[:-2], "--num_train_epochs", "1", "--compare_mle_weights", "--output_dir", str(tmp_path)]
    assert run(warm_process, "recipe", arguments=[*few, "--learning_rate", "1e-3"], timeout=300)["steps"] == 4
    for other in ("--learning_rate", "1e-4"), ("--learning_rate", "1e-3", "--per_device_train_batch_size", "8"):
        refused = warm_process.run("recipe", arguments=[*few, *other], timeout=300)
        assert refused.code == 1
        assert "--overwrite_output_dir" in refused.output
        assert checkpoints(tmp_path / "model") == [4]
    again = warm_process.run(
        "recipe", arguments=[*few, "--learning_rate", "1e-4", "--overwrite_output_dir"], timeout=300
    )
    assert (again.value or {}).get("steps") == 4, again.output
    assert again.output.index("Starting anew") < again.output.index("are moved to")
    assert checkpoints(tmp_path / "model") == [4]
    assert checkpoints(tmp_path / "model" / "earlier-1") == [4]
