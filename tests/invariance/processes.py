"""Worker processes forked from the warm test process: no imports to pay for, and gloo starts after the fork."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
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
