"""Faults of training: kills, signals, second runs, processes that die, disks that are full or closed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.campaign import IN_TIME, Trial, area, checkpoints, steps_of, wait_until
from tests.faults.jobs import TRAINERS


@area("training")
def training(warm_process, folder, rng, kills) -> Iterator[Trial]:
    """Kill -9 in training (four trainers)."""
    whole = {}
    for number in range(kills):
        kind = TRAINERS[number % len(TRAINERS)]
        settings = {"kind": kind, "save_total_limit": 1 + number // len(TRAINERS) % 2}
        if kind not in whole:
            made = warm_process.run("train", folder=str(folder / f"{kind}-whole"), at=0, **settings)
            assert made.code == 0, made.output
            whole[kind] = made.value
        run, steps = folder / f"{kind}-{number}", folder / f"steps-{number}"
        killed = warm_process.run(
            "train", folder=str(run), at=rng.randint(1, whole[kind]["calls"]), steps_file=str(steps), **settings
        )
        assert killed.killed, killed.output
        finished = max(checkpoints(run), default=0)
        before = len(steps_of(steps))
        again = warm_process.run("train", folder=str(run), steps_file=str(steps), **settings)
        made = steps_of(steps)
        same = again.code == 0 and again.value["digest"] == whole[kind]["digest"]
        # Steps that were finished before the kill are not repeated.
        lost = max(0, finished + 1 - min(made[before:], default=finished + 1))
        repeated = len(made) - len(set(made))
        yield Trial(same and not lost, lost, repeated, "" if same else f"{kind}: {again.output[-400:]}")
        shutil.rmtree(run, ignore_errors=True)


@area("signals")
def signals(warm_process, folder, rng, kills):
    """SIGTERM or SIGINT in training: the run saves, exits with 0 and resumes."""
    whole = {}
    for number in range(kills):
        kind = TRAINERS[number % len(TRAINERS)]
        settings = {"kind": kind, "save_on_signal": True, "eval_strategy": "epoch", "save_steps": 3}
        if kind == "caption-rl":
            settings["save_steps"] = 4  # two steps share a rollout
        if kind not in whole:
            made = warm_process.run("train", folder=str(folder / f"{kind}-whole"), at=0, **settings)
            assert made.code == 0, made.output
            whole[kind] = made.value
        run, steps = folder / f"{kind}-{number}", folder / f"steps-{number}"
        # Not in the first tenth, when the trainer is not yet listening, nor at the very end.
        at = int(whole[kind]["calls"] * rng.uniform(0.15, 0.85))
        name = rng.choice(["SIGTERM", "SIGINT"])
        stopped = warm_process.run("train", folder=str(run), at=at, name=name, steps_file=str(steps), **settings)
        done, saved = steps_of(steps), checkpoints(run)
        waited = stopped.seconds_since()
        orderly = (
            waited < IN_TIME
            and stopped.code == 0
            and stopped.value is None
            and f"Stopped after step {done[-1]}" in stopped.output
        )
        again = warm_process.run("train", folder=str(run), steps_file=str(steps), **settings)
        same = again.code == 0 and again.value["digest"] == whole[kind]["digest"]
        made = steps_of(steps)
        lost = done[-1] - saved[-1] if saved else done[-1]
        note = (
            ""
            if orderly and same
            else f"{kind} {name} at {at}: {stopped.code} {stopped.output[-300:]} {again.output[-300:]}"
        )
        yield Trial(orderly and same and not lost, lost, len(made) - len(set(made)), note)
        shutil.rmtree(run, ignore_errors=True)


@area("two_runs")
def two_runs(warm_process, folder, rng, kills):
    """A second run in the same folder; a lock left by a killed one."""
    for number in range(kills):
        run, ready = folder / f"run-{number}", folder / f"ready-{number}"
        holder = warm_process.start("hold_folder", folder=str(run), ready=str(ready))
        try:
            wait_until(ready.exists)
            second = warm_process.run("train", kind="smile", folder=str(run), max_steps=1)
        finally:
            os.kill(holder, signal.SIGKILL)
            warm_process.wait(holder)
        refused = second.code == 1 and f"ValueError: Another run is writing to '{run}'." in second.output
        clean = not list(run.glob("checkpoint-*"))
        after = warm_process.run("train", kind="smile", folder=str(run), max_steps=1)
        yield Trial(
            refused and clean and after.code == 0, note=second.output[-300:] if not refused else after.output[-300:]
        )


@area("full_disk")
def full_disk(warm_process, folder, rng, kills):
    """The disk is full while a checkpoint is saved: no file may grow beyond a limit, from the first checkpoint on."""
    settings = {"kind": "smile", "save_total_limit": None}
    whole = warm_process.run("train", folder=str(folder / "whole"), **settings)
    assert whole.code == 0, whole.output
    largest = max(file.stat().st_size for file in (folder / "whole").rglob("*") if file.is_file())
    for number in range(kills):
        run, steps = folder / f"run-{number}", folder / f"steps-{number}"
        settings |= {"folder": str(run), "steps_file": str(steps)}
        full = warm_process.run("train", limit=rng.randrange(2**17, largest), **settings)
        said = full.code == 1 and not list(run.glob(".partial/*"))
        before = checkpoints(run)
        again = warm_process.run("train", **settings)  # somebody has made room
        same = again.code == 0 and again.value["digest"] == whole.value["digest"]
        lost = len(set(before) - set(checkpoints(run)))
        made = steps_of(steps)
        note = "" if said and same else f"{full.code} {full.output[-300:]} {again.output[-300:]}"
        yield Trial(said and same and not lost, lost, len(made) - len(set(made)), note)


@area("read_only")
def read_only(warm_process, folder, rng, kills):
    """The output folder is read-only."""
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as base:
            os.chmod(base, 0o755)
            run = Path(base) / "run"
            run.mkdir(mode=0o555)
            ended = warm_process.run("as_nobody", folder=str(run))
            said = ended.code == 1 and f"PermissionError: Nothing can be written to '{run}'" in ended.output
            yield Trial(said and not list(run.iterdir()), note="" if said else ended.output[-300:])
