"""Processes forked from the test process, which has imported everything: ten CPU-seconds saved for each.

[`run_in_processes`] makes a gloo group of them, [`Forked`] one that stands for a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

SECONDS = 240


def run_in_processes(number: int, function: Callable[..., None], *arguments: Any, folder: Path) -> None:
    """Call `function(*arguments)` in so many processes of one gloo group, and wait.

    A process that has used its GPU cannot be forked; there the workers import everything anew.
    """
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    meeting = folder / f"meeting-of-{number}"
    errors = [folder / f"error-of-{rank}-in-{number}.txt" for rank in range(number)]
    processes = [
        context.Process(target=_work, args=(rank, number, str(meeting), str(errors[rank]), function, arguments))
        for rank in range(number)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    said = "\n".join(error.read_text() for error in errors if error.exists())
    assert not late, f"{len(late)} of {number} processes hung.\n{said}"
    assert all(process.exitcode == 0 for process in processes), said


def _work(
    rank: int, number: int, meeting: str, error: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ACCELERATE_USE_CPU": "true",
    }
    try:
        torch.set_num_threads(1)
        from accelerate.state import AcceleratorState, GradientState

        # What the parent made of these was made for one process.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=number)
        function(*arguments)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        Path(error).write_text(f"Process {rank} of {number}:\n{traceback.format_exc()}")
        os._exit(1)
    # Whatever the parent registered to run at its own end must not run here.
    os._exit(0)


class Forked:
    """A function in a process of its own, like `subprocess.Popen` as far as tests need it; what it returns is the exit code.

    Its standard output and error are pipes. Signals do in it what they do in a new interpreter.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        pipes = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number, (reading, writing) in enumerate(pipes, start=1):
                os.close(reading)
                os.dup2(writing, number)
            _run(function, arguments, environment, cwd)
        for _, writing in pipes:
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading) for reading, _ in pipes)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = SECONDS) -> int:
        """The exit code; negative for a signal."""
        if self.returncode is None:
            late = threading.Timer(timeout, os.kill, (self.pid, signal.SIGKILL))
            late.start()
            _, status = os.waitpid(self.pid, 0)
            late.cancel()
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """All that it said, once it has ended."""
        said: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda name=name: said.update({name: getattr(self, name).read()}))
            for name in ("stdout", "stderr")
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()
        return said["stdout"], said["stderr"]


def _run(
    function: Callable[..., int | None],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> None:
    """In the child; never returns."""
    code: int | None = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that fails leaves no process behind
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Other ones than those of the test process, which pytest has replaced.
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment or {})
        if cwd is not None:
            os.chdir(cwd)
        code = function(*arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # Whatever the parent registered to run at its own end must not run here.
    os._exit(code or 0)
