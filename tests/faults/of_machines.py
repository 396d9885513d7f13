"""Faults of what training stands on: processes that die, disks that are full or closed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.campaign import IN_TIME, Trial, area, checkpoints, steps_of


@area("worker", "a worker that loads images is killed")
def worker(warm_process, folder, rng, kills):
    for number in range(kills):
        ended = warm_process.run("train_with_workers", folder=str(folder / str(number)), kill_worker=True, timeout=90)
        waited = ended.seconds_since()
        fine = ended.code == 1 and "torch/utils/data" in ended.output and waited < IN_TIME
        yield Trial(fine, note="" if fine else f"{ended.code}, {waited} s: {ended.output[-300:]}", waited=waited)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def two_ranks(warm_process, folder, *, kill_at=None, kill_rank=1, timeout=90.0, **changes):
    """Two processes over gloo, of which one perhaps gets a signal; how both ended."""
    port = free_port()
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


@area("rank", "one of two processes is killed: the other one ends, and says so")
def rank(warm_process, folder, rng, kills):
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
        yield Trial(noticed, note="" if noticed else f"{other.code}, {waited} s: {other.output[-300:]}", waited=waited)


@area("signal_rank", "SIGTERM or SIGINT to one of two processes: both stop, save, exit with 0 and resume")
def signal_rank(warm_process, folder, rng, kills):
    whole = two_ranks(warm_process, folder / "whole", max_steps=4)
    assert [ended.code for ended in whole] == [0, 0], whole
    for number in range(kills):
        run, sent_to = folder / str(number), number % 2
        signal = {"kill_at": rng.randint(1, 3), "kill_rank": sent_to, "name": rng.choice(["SIGTERM", "SIGINT"])}
        stopped = two_ranks(warm_process, run, **signal, save_on_signal=True, save_steps=500, max_steps=4)
        waited = max(ended.seconds_since(stopped[sent_to]) for ended in stopped)
        orderly = [ended.code for ended in stopped] == [0, 0] and waited < IN_TIME and bool(checkpoints(run))
        again = two_ranks(warm_process, run, max_steps=4)
        same = [a.value and a.value["digest"] for a in again] == [ended.value["digest"] for ended in whole]
        note = "" if orderly and same else f"{stopped[1 - sent_to].output[-300:]} {again[0].output[-300:]}"
        yield Trial(orderly and same, note=note, waited=waited)


@contextlib.contextmanager
def small_disk(folder: Path, size: int, options: str = "") -> Iterator[bool]:
    """A file system of its own, where mounting is allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder), 2**16) as mounted:
        return mounted


@area("full_disk", "the disk is full while a checkpoint is saved")
def full_disk(warm_process, folder, rng, kills):
    whole = warm_process.run("train", kind="smile", folder=str(folder / "whole"), save_total_limit=None)
    assert whole.code == 0, whole.output
    sizes = [
        sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in (folder / "whole").glob("checkpoint-*")
    ]
    largest = max(f.stat().st_size for f in (folder / "whole").rglob("*") if f.is_file())
    mounts = can_mount()
    for number in range(kills):
        run = folder / f"run-{number}"
        steps = folder / f"steps-{number}"
        with small_disk(run, int(max(sizes) * rng.uniform(1.3, 2.8))) if mounts else contextlib.nullcontext():
            # Where mounting is not allowed: no file may grow beyond a limit, from the first checkpoint on.
            limit = {} if mounts else {"limit": rng.randrange(2**17, largest)}
            full = warm_process.run(
                "train", kind="smile", folder=str(run), steps_file=str(steps), save_total_limit=None, **limit
            )
            said = full.code == 1 and not list(run.glob(".partial/*"))
            before = checkpoints(run)
            # Somebody makes room.
            if mounts:
                subprocess.run(["mount", "-o", f"remount,size={8 * max(sizes)}", str(run)], check=True)
            again = warm_process.run(
                "train", kind="smile", folder=str(run), steps_file=str(steps), save_total_limit=None
            )
            same = again.code == 0 and again.value["digest"] == whole.value["digest"]
            lost = len(set(before) - set(checkpoints(run)))
        made = steps_of(steps)
        note = "" if said and same else f"{full.code} {full.output[-300:]} {again.output[-300:]}"
        yield Trial(said and same and not lost, lost, len(made) - len(set(made)), note)


@area("read_only", "the output folder is read-only")
def read_only(warm_process, folder, rng, kills):
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as base:
            os.chmod(base, 0o755)
            run = Path(base) / "run"
            run.mkdir(mode=0o555)
            ended = warm_process.run("as_nobody", folder=str(run))
            said = ended.code == 1 and f"PermissionError: Nothing can be written to '{run}'" in ended.output
            yield Trial(said and not list(run.iterdir()), note="" if said else ended.output[-300:])
