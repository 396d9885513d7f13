"""Finished runs are measured again for new columns: nothing is trained, and what cannot be measured is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import reproduce
from scripts.reproduction import settings
from scripts.reproduction.again import differences, measure_again
from scripts.reproduction.runs import CONFIGS, Run, execute, finished

PRESET = "smile/scenes/table5"
STEPS = [
    "python make.py --first",
    f"for each seed s: python recipes/smile_blip.py --row {PRESET} --seed s --output_dir {{folder}}/start/seed-s",
    f"for each seed s: python recipes/smile_blip.py --row {PRESET} --seed s --output_dir {{folder}}/own/seed-s",
]
STEPPED = Run(
    name="tiny", preset=PRESET, minutes=1, seeds=[0, 1], steps=STEPS, rows={"a": ["{folder}/own", "trained"]}
)
SEEDED = Run(
    name="tiny",
    preset=PRESET,
    minutes=1,
    seeds=[0, 1],
    command=f"python scripts/run_seeds.py smile_blip --seeds {{seeds}} --output {{output}} -- --row {PRESET}",
)


def write_model(place, step=20, name="model"):
    """What a training of 20 steps leaves."""
    folder = place / name / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 20}))


def write_results(place, **row):
    place.mkdir(parents=True, exist_ok=True)
    (place / "results.json").write_text(json.dumps({"rows": [{"name": "SMILE", **row}], "versions": {}}))


@pytest.fixture
def stepped(tmp_path):
    """A finished run of steps, and the keywords of its functions."""
    keys = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "others": {}, "told": lambda text: None}

    def train(words):
        if "--output_dir" in words:
            place = Path(words[words.index("--output_dir") + 1])
            write_model(place)
            write_model(place, name="model-sr")
            write_results(place, length=10.0 + int(words[words.index("--seed") + 1]))
        return 0

    assert execute(STEPPED, [0, 1], caller=train, **keys) is None
    return keys


def test_new_columns_of_steps(stepped):
    path = stepped["output"] / "tiny.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"versions": record["versions"] | {"git_revision": "abc"}}))
    called, told = [], []

    def measure(words):
        place = Path(words[words.index("--output_dir") + 1])
        assert not (place / "results.json").exists()
        called.append((place.relative_to(STEPPED.folder(stepped["runs_dir"])).as_posix(), words[-2:]))
        write_results(place, length=10.0 + int(words[words.index("--seed") + 1]), meteor=0.25)
        return 0

    for _ in range(2):
        called.clear()
        assert measure_again(STEPPED, [0, 1], caller=measure, **{**stepped, "told": told.append}) is None
        # The first step and the start, which no row reads, stay as they are.
        resume = ["--resume_from_checkpoint", "true"]
        assert called == [("own/seed-0", resume), ("own/seed-1", resume)]
        record = json.loads(path.read_text())
        assert record["rows"][0]["meteor"]["values"] == [0.25, 0.25]
        assert record["rows"][0]["length"]["values"] == [10.0, 11.0]
        assert record["trained_revisions"] == ["abc"]
        assert record["settings"] == settings.digests([PRESET], CONFIGS)
        assert told[-1].endswith(" numbers: 0")


def test_a_command_over_seeds(tmp_path):
    keys = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "others": {}, "told": lambda text: None}
    folder = SEEDED.folder(keys["runs_dir"])
    (tmp_path / "out").mkdir()
    for seed in (0, 1):
        write_model(folder / "smile_blip" / f"seed-{seed}")
        write_results(folder / "smile_blip" / f"seed-{seed}", length=10.0)
    record = {"rows": [], "versions": {}, "revisions": ["a", "b"], "settings": settings.digests([PRESET], CONFIGS)}
    (tmp_path / "out/tiny.json").write_text(json.dumps(record))

    def measure(words):
        at = words.index("--runs_dir")
        assert words[at + 1 :] == [str(folder), "--", "--row", PRESET, "--resume_from_checkpoint", "true"]
        assert not list(folder.glob("*/*/results.json"))
        (tmp_path / "out/tiny.json").write_text(json.dumps({"rows": [], "versions": {}, "revisions": ["c", "c"]}))
        return 0

    assert measure_again(SEEDED, [0, 1], caller=measure, **keys) is None
    made = json.loads((tmp_path / "out/tiny.json").read_text())
    assert finished(SEEDED, [0, 1], tmp_path / "out") == made
    assert (made["trained_revisions"], made["revisions"]) == (["a", "b"], ["c", "c"])


def test_what_cannot_be_measured_is_refused_before_anything_runs(stepped):
    def refused(run=STEPPED, seeds=(0, 1)):
        why = measure_again(run, seeds, caller=lambda words: pytest.fail("it ran"), **stepped)
        assert (stepped["output"] / "tiny.json").read_text() == text
        return why

    own, path = STEPPED.folder(stepped["runs_dir"]) / "own", stepped["output"] / "tiny.json"
    text = path.read_text()
    assert refused(seeds=(0, 1, 2)).endswith("own/seed-2: is not there")
    state = own / "seed-0/model-sr/checkpoint-20/trainer_state.json"
    state.write_text(json.dumps({"global_step": 15, "max_steps": 20}))
    assert refused().endswith("own/seed-0: the training of model-sr ended before its last step")
    state.unlink()
    state.parent.rmdir()
    assert refused().endswith("own/seed-0: model-sr has no checkpoint")
    text = json.dumps(json.loads(text) | {"settings": {PRESET: "unknown"}})
    path.write_text(text)
    assert "changed after it was made" in refused()
    path.unlink()
    assert measure_again(STEPPED, [0, 1], **stepped) == "has no result yet"


def test_evaluations_need_no_checkpoint(tmp_path):
    keys = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "others": {}, "told": lambda text: None}
    preset = "discritune/scenes/to-shapes"
    step = f"for each seed s: python recipes/self_retrieval_blip.py --row {preset} --seed s --output_dir {{folder}}/a/seed-s"
    run = Run(name="tiny", preset=preset, minutes=1, seeds=[0], steps=[step], rows={"a": ["{folder}/a", "start"]})
    lengths = iter([3.0, 4.0])

    def measure(words):
        place = Path(words[words.index("--output_dir") + 1])
        (place / "model").mkdir(parents=True, exist_ok=True)
        write_results(place, length=next(lengths))
        return 0

    assert execute(run, [0], caller=measure, **keys) is None
    assert measure_again(run, [0], caller=measure, **keys) is None
    assert json.loads((tmp_path / "out/tiny.json").read_text())["rows"][0]["length"]["values"] == [4.0]


def test_a_failed_command_is_named(stepped):
    why = measure_again(STEPPED, [0, 1], caller=lambda words: 3, **stepped)
    assert why.startswith("exit code 3 of `python recipes/smile_blip.py")


def test_the_largest_difference_is_named():
    rows = [{"name": "a", "length": {"values": [2.0, 4.0]}, "old": {"values": [1.0, 1.0]}}]
    again = [{"name": "a", "length": {"values": [2.0, 5.0]}, "new": {"values": [1.0, 1.0]}}]
    assert differences({"rows": rows}, {"rows": again}) == "largest relative difference of 2 numbers: 0.2, a, length"
    assert differences({"rows": rows}, {"rows": rows}).endswith(": 0")


def test_the_command_names_runs(tmp_path, capsys):
    with pytest.raises(SystemExit, match="no such run"):
        reproduce.main(["--measure_again", "tiny"])
    folders = ["--output", str(tmp_path), "--runs_dir", str(tmp_path)]
    assert reproduce.main(["--measure_again", "smile_blip_seeds", *folders]) == 0
    assert "smile_blip_seeds: has no result yet" in capsys.readouterr().out
