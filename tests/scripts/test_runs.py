"""Runs of the embedded world: what is finished is not run again, how rows are gathered; results know their settings."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts import reproduce
from scripts.reproduction import runs
from scripts.reproduction.numbers import measured
from scripts.reproduction.runs import CONFIGS, Run, execute, finished, moved_targets, to_run

ROOT = Path(__file__).parents[2]
RUNS = reproduce.load_runs()

TINY = Run(
    name="tiny",
    preset="none",
    minutes=1,
    seeds=[0, 1],
    steps=["python make.py --first", "for each seed s: python train.py --seed s --output_dir {folder}/seed-s"],
)


def write_result(path, **changed):
    record = {"commands": list(TINY.steps), "seeds": [0, 1], "versions": {"hf_captionrl": version("hf_captionrl")}}
    path.mkdir(exist_ok=True)
    (path / "tiny.json").write_text(json.dumps(record | changed))


def test_a_result_counts_if_command_seeds_and_version_are_the_same(tmp_path):
    assert finished(TINY, [0, 1], tmp_path) is None
    write_result(tmp_path)
    assert finished(TINY, [0, 1], tmp_path) is not None
    assert finished(TINY, [0, 1, 2], tmp_path) is None
    for changed in ({"commands": ["python other.py"]}, {"seeds": [0]}, {"versions": {"hf_captionrl": "0.0.0"}}):
        write_result(tmp_path, **changed)
        assert finished(TINY, [0, 1], tmp_path) is None


@pytest.mark.parametrize("killed_after", [0, 2])
def test_a_killed_run_resumes(tmp_path, killed_after):
    """The whole run in two halves does each step once, and the step at which it was killed twice."""
    output, runs_dir, called = tmp_path / "results", tmp_path / "runs", []

    def caller(words, folder=None, *, stop=None):
        called.append(" ".join(words[1:]))
        if len(called) - 1 == stop:
            raise KeyboardInterrupt
        write_result(output)
        return 0

    arguments = {"output": output, "runs_dir": runs_dir, "others": {"tiny": TINY}, "told": lambda text: None}
    with pytest.raises(KeyboardInterrupt):
        execute(TINY, [0, 1], caller=lambda words: caller(words, stop=killed_after), **arguments)
    assert execute(TINY, [0, 1], caller=caller, **arguments) is None
    folder = TINY.folder(runs_dir)
    steps = ["make.py --first", *(f"train.py --seed {s} --output_dir {folder}/seed-{s}" for s in (0, 1))]
    assert called == [*steps[: killed_after + 1], *steps[killed_after:]]
    assert finished(TINY, [0, 1], output)["hardware"] == runs.hardware()
    called.clear()
    execute(TINY, [0, 1, 2], caller=caller, **arguments)
    assert [call for call in called if "--seed" in call] == [f"train.py --seed 2 --output_dir {folder}/seed-2"]


def test_what_fails_or_is_missing_is_said(tmp_path):
    arguments = {"output": tmp_path, "runs_dir": tmp_path, "others": {}, "told": lambda text: None}
    assert "exit code 3 of `python make.py" in execute(TINY, [0], caller=lambda words: 3, **arguments)
    needy = Run(name="needy", preset="", minutes=1, command="python x.py", needs=["no-such-program"])
    assert execute(needy, [], caller=lambda words: 0, **arguments) == "needs no-such-program"
    other = Run(name="tiny", preset="none", minutes=1, seeds=[0, 1], steps=[*TINY.steps, "python more.py"])
    assert other.folder(tmp_path) != TINY.folder(tmp_path)


def test_a_row_can_be_where_a_curve_reaches_another_result(tmp_path):
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.5, 0.7]}}])
    steps = {"steps": ["python x.py"], "rows": {"until": ["{folder}/sr", "trained"]}}
    run = Run("g", "", 1, seeds=[0, 1], until={"until": ["tiny", "rows/SR/x"]}, **steps)
    points = [{"step": step, "x": x, "y": step / 10} for step, x in ((0, 0.4), (10, 0.55), (20, 0.5), (30, 0.8))]
    record = {"rows": [{"name": "MLE"}, {"name": "SR", "x": 0.9}], "learning_curves": {"SR": points}}
    for seed in (0, 1):
        place = run.folder(tmp_path) / "sr" / f"seed-{seed}"
        place.mkdir(parents=True)
        (place / "results.json").write_text(json.dumps(record))
    settings = {"output": tmp_path, "runs_dir": tmp_path, "others": {}, "told": lambda text: None}
    assert execute(run, [0, 1], caller=lambda words: 0, **settings) is None
    found = finished(run, [0, 1], tmp_path)
    # From 0.4 to 0.55 in ten steps, and from 0.5 to 0.8.
    assert measured("rows/until/step", found).values == pytest.approx((10 * 0.1 / 0.15, 20 + 10 * 0.2 / 0.3))
    assert measured("rows/until/x", found).values == pytest.approx((0.5, 0.7))
    assert measured("rows/until/y", found).values == pytest.approx((0.1 / 0.15, 2 + 0.2 / 0.3))
    assert not to_run(run, [0, 1], tmp_path)
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.3, 0.41]}}])
    assert moved_targets(run, found, tmp_path) == ["until"]
    assert to_run(run, [0, 1], tmp_path)
    assert execute(run, [0, 1], caller=lambda words: 0, **settings) is None
    assert not to_run(run, [0, 1], tmp_path)
    # The first one starts above its target: its first evaluation counts, not the captioner before training.
    steps = measured("rows/until/step", finished(run, [0, 1], tmp_path)).values
    assert steps == pytest.approx((10.0, 10 * 0.01 / 0.15))
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.5, 0.95]}}])
    assert execute(run, [0, 1], caller=lambda words: 0, **settings).startswith(
        "until: x does not reach 0.950 with seed 1"
    )
    write_result(tmp_path, seeds=[0], rows=[{"name": "SR", "x": {"values": [0.5]}}])
    assert execute(run, [0, 1], caller=lambda words: 0, **settings) == "until: the other result has no seed 1."
    (tmp_path / "tiny.json").unlink()
    started = []
    assert execute(run, [0, 1], caller=started.append, **settings) == "needs the results of tiny"
    assert not started


PRESET = "smile/scenes/table5"


def test_a_base_that_changes_makes_its_rows_stale(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "smile_blip").mkdir()
    (tmp_path / "rows/smile.yaml").write_text("a: {title: A, base: smile_blip/scenes, mle_weight: 0.5}")
    base = tmp_path / "smile_blip/scenes.yaml"
    base.write_text("learning_rate: 1.0e-4")
    presets = ["smile/a", "smile_blip/scenes"]
    record = {"settings": runs.digests(presets, tmp_path)}
    assert runs.changed(record, presets, tmp_path) == {}
    base.write_text("title: b\nlogging_steps: 5\nlearning_rate: 1.0e-4")
    assert runs.changed(record, presets, tmp_path) == {}
    base.write_text("learning_rate: 2.0e-4")
    assert runs.changed(record, presets, tmp_path) == dict.fromkeys(presets, "stale")
    assert runs.changed({}, presets, tmp_path) == dict.fromkeys(presets, "unknown")
    record["settings"]["smile/a"] = "unknown"
    assert runs.changed(record, presets, tmp_path) == {"smile/a": "unknown", "smile_blip/scenes": "stale"}


def test_a_run_records_the_digests_of_its_presets(tmp_path):
    step = f"for each seed s: python recipes/smile_blip.py --row {PRESET} --seed s --output_dir {{folder}}/seed-s"
    run = Run(name="tiny", preset=PRESET, minutes=1, seeds=[0], steps=[step], rows={"a": ["{folder}", "trained"]})

    def caller(words):
        folder = Path(words[words.index("--output_dir") + 1])
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"rows": [{"name": "SMILE", "length": 1.0}]}))
        return 0

    out = tmp_path / "out"
    assert execute(run, [0], output=out, runs_dir=tmp_path, others={}, caller=caller, told=lambda text: None) is None
    record = json.loads((out / "tiny.json").read_text())
    assert record["settings"] == runs.digests([PRESET], CONFIGS)
    assert run.changed(record) == {}


def test_check_says_which_result_is_stale(monkeypatch, capsys):
    monkeypatch.setattr(reproduce.index, "faults", lambda *_: [])
    assert reproduce.main(["--check"]) == 0
    record = json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())
    record["settings"]["smile_blip/scenes"] = "0" * 16
    monkeypatch.setattr(reproduce, "_results", lambda *_: {"smile_blip_seeds": record})
    assert reproduce.main(["--check"]) == 1
    assert "smile_blip_seeds.json is stale: its preset smile_blip/scenes changed" in capsys.readouterr().out
    record["settings"]["smile_blip/scenes"] = "unknown"
    assert reproduce.main(["--check"]) == 0
    assert "smile_blip_seeds.json does not say the settings of its preset smile_blip/scenes" in capsys.readouterr().out


def test_committed_results_say_their_settings():
    for name, run in RUNS.items():
        path = ROOT / "docs/results" / f"{name}.json"
        if run.presets and path.exists():
            assert set(json.loads(path.read_text())["settings"]) == set(run.presets), name
