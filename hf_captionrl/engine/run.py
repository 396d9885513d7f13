"""Runs a stage on the unfinished shards of a folder: in this process, in several processes, or on Ray Data.

Every process takes a shard, processes it and writes its file. The files alone show which shards are finished. If a worker
dies, at most its current shard is lost, and another worker repeats it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from hf_captionrl.engine.actor import MAX_DEATHS, Actor, deaths_error, raise_packed, share_cores
from hf_captionrl.engine.options import EngineOptions
from hf_captionrl.engine.shards import ShardFolder, launched
from hf_captionrl.engine.stages import Stage

__all__ = ["run_stage"]


def run_stage(
    stage: Stage,
    shards: ShardFolder,
    options: EngineOptions | None = None,
    *,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Process every unfinished shard.

    Under `accelerate launch` or torchrun, each process takes its part of the shards.

    Args:
        stage ([`Stage`]): The work.
        shards ([`ShardFolder`]): Where the results are written.
        options ([`EngineOptions`], *optional*): Processes of this machine or Ray actors. None: in this process.
        progress (`Callable`, *optional*): Called with the rows of each shard that this run has finished.

    Returns:
        `dict[str, Any]`: `shards`, `resumed` (shards of an earlier run), and `manifest`, which is None under `accelerate launch`
        while other processes are working.

    Raises:
        ImportError: If Ray is needed and not installed.
        RuntimeError: If workers die repeatedly.
        ValueError: If there is no cluster at the address. Errors of the stage are raised, too.
    """
    options = options or EngineOptions()
    options.check_engine()
    todo = shards.unfinished()
    summary: dict[str, Any] = {"shards": len(shards.names), "resumed": len(shards.names) - len(todo)}
    world = launched()[1]
    if world > 1 and options.uses_shards and (options.engine == "ray" or (options.processes or 1) > 1):
        raise ValueError(
            f"{world} processes were launched, and each would start more. Use either `accelerate launch`, or "
            "--processes or --engine ray."
        )
    for shard in _finished(stage, shards, [shard for shard in todo if shards.is_mine(shard)], options):
        if progress is not None:
            progress(len(shards.rows(shard)))
    summary["manifest"] = shards.finish() if world == 1 or not shards.unfinished() else None
    return summary


def _finished(stage: Stage, shards: ShardFolder, todo: list[int], options: EngineOptions) -> Iterator[int]:
    """Yield the numbers of finished shards."""
    if not todo:
        return
    if options.engine == "ray":
        from hf_captionrl.engine.ray_engine import run_on_ray

        yield from run_on_ray(Actor(stage, shards), todo, options)
        return
    number = options.processes or (1 if launched()[1] > 1 or not stage.needs_gpu else _num_gpus() or 1)
    if number > 1:
        yield from _in_processes(Actor(stage, shards), todo, min(number, len(todo)))
        return
    _use_gpu_of_rank()
    actor = Actor(stage, shards)
    for shard in todo:
        actor.work(shard)
        yield shard


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _use_gpu_of_rank() -> None:
    """Under `accelerate launch`, make "cuda" the GPU of this process."""
    if (rank := os.environ.get("LOCAL_RANK")) is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(int(rank))


# --- processes of this machine ------------------------------------------------------------------------------------

_actor: Actor | None = None


def _start_worker(actor: Actor, numbers: Any, gpus: list[str], processes: int) -> None:
    global _actor
    share_cores(processes)
    if gpus:
        # Before CUDA is used: "cuda" is then this worker's GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[numbers.get() % len(gpus)]
    _actor = actor


def _work(shard: int) -> str:
    assert _actor is not None
    return _actor.attempt(shard)


def _gpu_names() -> list[str]:
    count = _num_gpus()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if names is None else names.split(",")[:count]


def _in_processes(actor: Actor, todo: list[int], number: int) -> Iterator[int]:
    """Process shards in spawned processes; if one dies, start a new pool for the missing shards."""
    from multiprocessing import get_context

    deaths, gpus = 0, _gpu_names()
    while todo:
        context = get_context("spawn")
        numbers: Any = context.Queue()
        for worker in range(number):
            numbers.put(worker)
        pool = ProcessPoolExecutor(
            number, mp_context=context, initializer=_start_worker, initargs=(actor, numbers, gpus, number)
        )
        try:
            waiting: dict[Future[str], int] = {pool.submit(_work, shard): shard for shard in todo}
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    raise_packed(future.result())
                    shard = waiting.pop(future)
                    todo.remove(shard)
                    deaths = 0
                    yield shard
        except BrokenProcessPool as error:
            # A worker may have died after it wrote its shard.
            missing = set(actor.shards.unfinished())
            written = [shard for shard in todo if shard not in missing]
            todo = [shard for shard in todo if shard in missing]
            deaths = 0 if written else deaths + 1
            yield from written
            if deaths >= MAX_DEATHS:
                raise deaths_error(deaths, len(todo), number) from error
        finally:
            pool.shutdown(cancel_futures=True)
