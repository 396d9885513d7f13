"""Faults of training: kills, signals, second runs, processes that die, disks that are full or closed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
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


@area("worker")
def worker(warm_process, folder, rng, kills):
    """A worker that loads images is killed."""
    for number in range(kills):
        ended = warm_process.run("train_with_workers", folder=str(folder / str(number)), kill_worker=True, timeout=90)
        waited = ended.seconds_since()
        fine = ended.code == 1 and "torch/utils/data" in ended.output and waited < IN_TIME
        yield Trial(fine, note="" if fine else f"{ended.code}, {waited} s: {ended.output[-300:]}")


def two_ranks(warm_process, folder, *, kill_at=None, kill_rank=1, timeout=90.0, **changes):
    """Two processes over gloo, of which one perhaps gets a signal; how both ended."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    numbers = []
    for rank in range(2):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        numbers.append(
            warm_process.start(
                "train_rank",
                environment=environment,
                folder=str(folder),
                kill_at=kill_at if rank == kill_rank else None,
                **changes,
            )
        )
    return [warm_process.wait(number, timeout) for number in numbers]


@area("rank")
def rank(warm_process, folder, rng, kills):
    """One of two processes is killed: the other one ends, and says so."""
    whole = two_ranks(warm_process, folder / "whole")
    assert [ended.code for ended in whole] == [0, 0], whole
    for number in range(kills):
        victim = number % 2
        ended = two_ranks(warm_process, folder / str(number), kill_at=rng.randint(1, 5), kill_rank=victim)
        other = ended[1 - victim]
        # What gloo says, at the end of a traceback that leads to the exchange.
        said = re.search(r"connection (closed|reset) by peer|broken pipe", other.output, re.IGNORECASE) is not None
        waited = other.seconds_since(ended[victim])
        noticed = ended[victim].killed and other.code == 1 and said and waited < IN_TIME
        yield Trial(noticed, note="" if noticed else f"{other.code}, {waited} s: {other.output[-300:]}")


@area("signal_rank")
def signal_rank(warm_process, folder, rng, kills):
    """SIGTERM or SIGINT to one of two processes: both stop, save, exit with 0 and resume."""
    whole = two_ranks(warm_process, folder / "whole", max_steps=4)
    assert [ended.code for ended in whole] == [0, 0], whole
    for number in range(kills):
        run, sent_to = folder / str(number), number % 2
        sent = {"kill_at": rng.randint(1, 3), "kill_rank": sent_to, "name": rng.choice(["SIGTERM", "SIGINT"])}
        stopped = two_ranks(warm_process, run, **sent, save_on_signal=True, save_steps=500, max_steps=4)
        waited = max(ended.seconds_since(stopped[sent_to]) for ended in stopped)
        orderly = [ended.code for ended in stopped] == [0, 0] and waited < IN_TIME and bool(checkpoints(run))
        again = two_ranks(warm_process, run, max_steps=4)
        same = [a.value and a.value["digest"] for a in again] == [ended.value["digest"] for ended in whole]
        note = "" if orderly and same else f"{stopped[1 - sent_to].output[-300:]} {again[0].output[-300:]}"
        yield Trial(orderly and same, note=note)


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
