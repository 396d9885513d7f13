"""Runs of the embedded world: what is finished is not run again, what was killed resumes, and how rows are gathered."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from scripts.reproduction import runs
from scripts.reproduction.numbers import measured
from scripts.reproduction.runs import Run, execute, finished, moved_targets, to_run

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


@pytest.mark.parametrize("killed_after", [0, 1, 2])
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


def test_the_folder_changes_with_the_commands(tmp_path):
    other = Run(name="tiny", preset="none", minutes=1, seeds=[0, 1], steps=[*TINY.steps, "python more.py"])
    assert other.folder(tmp_path) != TINY.folder(tmp_path)


def test_rows_are_gathered_from_the_runs_of_the_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    run = Run(
        "g",
        "",
        1,
        seeds=[0, 1],
        steps=["python x.py"],
        rows={"before": ["{folder}/sr", "start"], "after": ["{folder}/sr", "trained"]},
    )
    for seed in (0, 1):
        folder = run.folder(tmp_path) / "sr" / f"seed-{seed}"
        folder.mkdir(parents=True)
        rows = [{"name": "MLE", "x": 1.0}, {"name": "SR", "x": 2.0 + seed}, {"name": "references", "x": 7.0}]
        (folder / "results.json").write_text(json.dumps({"rows": rows}))
    assert (
        execute(run, [0, 1], output=tmp_path, runs_dir=tmp_path, others={}, caller=lambda w: 0, told=lambda t: None)
        is None
    )
    record = finished(run, [0, 1], tmp_path)
    assert measured("rows/after/x", record).values == (2.0, 3.0)
    assert measured("rows/before/x", record).value == 1.0
    table = (tmp_path / "g.md").read_text()
    assert "| before |" in table
    assert "Made by `python scripts/reproduce.py --only g`" in table


def test_a_row_can_be_where_a_curve_reaches_another_result(tmp_path):
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.5, 0.7]}}])
    steps = {"steps": ["python x.py"], "rows": {"until": ["{folder}/sr", "trained"]}}
    run = Run("g", "", 1, seeds=[0, 1], until={"until": ["tiny", "rows/SR/x"]}, **steps)
    points = [{"step": step, "x": x, "y": step / 10} for step, x in ((0, 0.4), (10, 0.55), (20, 0.5), (30, 0.8))]
    for seed in (0, 1):
        folder = run.folder(tmp_path) / "sr" / f"seed-{seed}"
        folder.mkdir(parents=True)
        record = {"rows": [{"name": "MLE"}, {"name": "SR", "x": 0.9}], "learning_curves": {"SR": points}}
        (folder / "results.json").write_text(json.dumps(record))
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
