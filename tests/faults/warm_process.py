"""A fork of the test process that forks a new one for every job: no kill costs the imports again.

A job is a function of `tests.faults.jobs`, its arguments and perhaps a moment: the n-th call that Python makes, at which
the process gets a signal. Moments are counted in calls, not in seconds, so that a seed gives the same moments on a
loaded machine, and so that every one of them falls into the job.
"""

import importlib
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tqdm.std

from tests.processes import Forked, _run

ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
SIGNAL = "A signal is sent at"
IN_TIME = 30.0
"""Seconds that `accelerate launch`, and many a scheduler, leaves between SIGTERM and SIGKILL."""
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


class Moment:
    """Sends this process a signal at the n-th call from when it is entered; at 0 it only counts, at None not even that."""

    def __init__(self, at: int | None = None, name: str = "SIGKILL") -> None:
        self.at, self.number, self.calls = at, signal.Signals[name], 0

    def _tick(self, frame, event, argument):
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls == self.at:
                # Its time is said, for how long it takes to act on it.
                os.write(2, f"{SIGNAL} {time.monotonic():.3f}\n".encode())
                os.kill(os.getpid(), self.number)

    def __enter__(self):
        if self.at is not None:
            threading.setprofile(self._tick)
            sys.setprofile(self._tick)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


@dataclass
class Ended:
    """How a job ended.

    `code` is that of the process, negative for a signal, None where it had to be ended because it hung; `at` is seconds on
    the machine's monotonic clock.
    """

    code: int | None
    output: str
    value: Any
    at: float

    @property
    def killed(self):
        return self.code == -signal.SIGKILL

    def seconds_since(self) -> float:
        """From the signal that this process sent to its end; infinite where there was none."""
        said = re.search(rf"{SIGNAL} ([\d.]+)", self.output)
        return self.at - float(said[1]) if said else math.inf


class WarmProcess:
    """Runs jobs in new processes; a context manager."""

    def __enter__(self):
        # Made and removed here: a worker forked by a job would run the clean-up of the process it comes from.
        self.folder = tempfile.mkdtemp()
        reading, writing = os.pipe()
        self.process = Forked(main, reading, self.folder, environment={**OFFLINE, **QUIET}, cwd=ROOT)
        os.close(reading)
        self.requests, self.answers = os.fdopen(writing, "w"), self.process.stdout
        return self

    def __exit__(self, *_):
        self.requests.close()
        self.process.__exit__()
        shutil.rmtree(self.folder)

    def _ask(self, **request):
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        answer = self.answers.readline()
        assert answer, "the warm_process has ended"
        return json.loads(answer)

    def warm(self, job, **arguments):
        """Run a job in the warm_process itself, so that those forked later have what it imports."""
        said = self._ask(warm=job, arguments=arguments)
        assert not said, said

    def start(self, job, **arguments):
        """Start a job; the number of its process."""
        return self._ask(start=job, arguments=arguments)

    def wait(self, number, timeout=120.0):
        """Wait for a job."""
        return Ended(**self._ask(wait=number, timeout=timeout))

    def run(self, job, *, timeout=120.0, **arguments):
        """Start a job and wait for it."""
        return self.wait(self.start(job, **arguments), timeout)


def child(request, folder):
    """What a forked process does; never returns."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # By default progress bars share a lock with forked processes, which one that is killed would keep forever.
    kinds = [tqdm.std.tqdm]
    while kinds:
        kind = kinds.pop()
        kind.set_lock(threading.RLock())
        kinds += kind.__subclasses__()
    _run(job, (request, folder), None, None)


def job(request, folder):
    value = getattr(importlib.import_module("tests.faults.jobs"), request["start"])(**request["arguments"])
    (folder / "value").write_text(json.dumps(value))
    return 0


def wait_for(number, folder, timeout):
    """How a child ended; killed after the time given."""
    deadline, status, hung = time.monotonic() + timeout, None, False
    while status is None:
        done, found = os.waitpid(number, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(found)
        elif time.monotonic() > deadline and not hung:
            os.kill(number, signal.SIGKILL)
            hung = True
        else:
            time.sleep(0.005)
    ended = time.monotonic()
    value = json.loads((folder / "value").read_text()) if (folder / "value").exists() and status == 0 else None
    said = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    return {"code": None if hung else status, "output": said, "value": value, "at": ended}


def main(requests, place):
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(Path(place, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):  # what libraries print is not an answer
        os.dup2(log, number)
    logging.getLogger().handlers.clear()  # pytest's
    tqdm.std.tqdm.monitor_interval = 0  # no thread of a bar while a process is forked
    importlib.import_module("tests.faults.jobs").warm_up()
    running = {}
    for line in os.fdopen(requests):
        request = json.loads(line)
        answer: Any = None
        if "start" in request:
            folder = Path(tempfile.mkdtemp(dir=place))
            number = os.fork()
            if number == 0:
                child(request, folder)
            running[number] = folder
            answer = number
        elif "warm" in request:
            try:
                getattr(importlib.import_module("tests.faults.jobs"), request["warm"])(**request["arguments"])
            except Exception as error:
                answer = repr(error)
        else:
            answer = wait_for(request["wait"], running.pop(request["wait"]), request["timeout"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
