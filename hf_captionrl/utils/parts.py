"""Rows of a long computation in Parquet parts, written by this process, by several, or on a Ray cluster; resumable.

folder/part-00000-of-00012.parquet    the result of the first range of rows; its metadata hold the settings of the run

A part is written to a temporary name, flushed and renamed: it is there, or it is not. The files alone show what is finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hf_captionrl.utils.io import FolderLock, atomic_file, refuse_file, to_plain
from hf_captionrl.utils.options import EngineOptions

if TYPE_CHECKING:
    import pyarrow as pa


class MakePart(Protocol):
    """Computes the rows of a part. It is pickled and sent to every worker before `load`, so `__init__` holds only settings.

    The result must not depend on the worker or on earlier parts; paths must name the same data on every machine.
    """

    needs_gpu: bool = True
    """Whether it computes on a GPU if there is one. By default each GPU then has one worker; otherwise each CPU of a Ray cluster."""

    def load(self) -> dict[str, Any]:
        """Load models and data, once per worker; returns what they are, such as a fingerprint of weights, equal in all workers."""

    def __call__(self, rows: range) -> pa.Table:
        """The result for a range of rows of the source, in their order."""


def split_rows(num_rows: int, rows_per_part: int) -> list[range]:
    """The rows of each part."""
    return [range(start, min(start + rows_per_part, num_rows)) for start in range(0, num_rows, rows_per_part)]


def run_parts(
    folder: str | os.PathLike[str],
    parts: Sequence[range],
    make_part: MakePart,
    engine: EngineOptions | None = None,
    *,
    settings: Mapping[str, Any],
    overwrite: bool = False,
    is_final: Callable[[pa.Table], bool] | None = None,
) -> dict[str, Any]:
    """Write the parts that are missing, in this process or with the processes or Ray actors of `engine`.

    Args:
        folder: Folder of the parts. While this function runs, other commands are refused the folder.
        parts: Rows of each part; see [`split_rows`].
        make_part: Computes a part.
        settings: What the result depends on. Parts of other settings are refused.
        overwrite: Remove all parts first.
        is_final: If given, parts for which it is False are made again.

    Returns:
        `resumed`, the number of rows of parts of an earlier run, and `made_by`, what `make_part.load` returned.

    Raises:
        ValueError: If the folder has parts of other settings or models.
        RuntimeError: If workers die again and again.
    """
    from tqdm import tqdm

    engine = engine or EngineOptions()
    engine.check_engine()
    folder, num_rows = Path(folder), parts[-1].stop
    refuse_file(folder)
    try:
        with FolderLock(folder):
            for path in _present(folder) if overwrite else ():
                path.unlink()
            worker = _Worker(make_part, parts, _paths(folder, len(parts)), check_settings(folder, parts, settings))
            todo = [
                number
                for number, path in enumerate(worker.paths)
                if not path.exists() or (is_final is not None and not is_final(_read(path)))
            ]
            resumed = num_rows - sum(len(parts[number]) for number in todo)
            with tqdm(total=num_rows, initial=resumed, unit=" rows", disable=None) as progress:
                for number in _finished(worker, todo, engine):
                    progress.update(len(parts[number]))
            made_by = _run_of(worker.paths[0])["made_by"]
            for path in worker.paths[1:]:
                refuse_other_settings(made_by, _run_of(path)["made_by"])
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty: a run that failed before its first part leaves nothing
    return {"resumed": resumed, "made_by": made_by}


def _finished(worker: _Worker, todo: list[int], engine: EngineOptions) -> Iterator[int]:
    """Write the parts; yields the number of each."""
    import torch

    if engine.engine == "ray":
        yield from _on_ray(worker, todo, engine) if todo else ()
        return
    gpus, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in range(gpus)] if visible is None else visible.split(",")[:gpus]
    number = min(engine.processes or (gpus if worker.make_part.needs_gpu else 0) or 1, len(todo))
    if number > 1:
        yield from _in_processes(worker, todo, number, names)
        return
    for part in todo:
        worker.write(part)
        yield part


def check_settings(folder: Path, parts: Sequence[range], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JSON has them, with the sizes; raises ValueError if the folder has parts of others."""
    plain: dict[str, Any] = to_plain({**settings, "num_rows": parts[-1].stop, "rows_per_shard": len(parts[0])})
    for path in _present(folder)[:1]:
        refuse_other_settings(_run_of(path)["settings"], plain)
    return plain


def refuse_other_settings(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    remedy: str = "Use --overwrite to start again, or another --output.",
) -> None:
    """Raise ValueError if a setting of an existing output differs from that of this run."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"The output was written with {name} {before.get(name)!r}, but {name} is now {now.get(name)!r}. {remedy}"
            )


def seed_of_batch(seed: int, image_id: str) -> int:
    """Seed, at most 56 bits, of the samples of the batch whose first image has this id; independent of processes and batches."""
    text = f"{seed}/{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


# --- Files -----------------------------------------------------------------------------------------------------------


def _paths(folder: Path, number: int) -> list[Path]:
    return [folder / f"part-{part:05d}-of-{number:05d}.parquet" for part in range(number)]


def _present(folder: Path) -> list[Path]:
    return list(folder.glob("part-[0-9]*-of-[0-9]*.parquet"))


def _read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    import pyarrow.parquet

    # Without partitioning, folders such as "a=b" in the path would become columns.
    return pyarrow.parquet.read_table(path, columns=columns and list(columns), partitioning=None)


def _run_of(path: Path) -> dict[str, Any]:
    """`settings` and `made_by` of a part."""
    import pyarrow.parquet

    return json.loads(pyarrow.parquet.read_schema(path).metadata[b"run"])  # type: ignore[no-any-return]


def part_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Files of a finished folder, in the order of the source."""
    folder = Path(folder)
    present = _present(folder)
    if not present:
        raise FileNotFoundError(f"{str(folder)!r} has no parts. Use a folder that --processes or --engine wrote.")
    paths = _paths(folder, int(present[0].stem.rpartition("-")[2]))
    if missing := set(paths).difference(present):
        raise ValueError(
            f"{str(folder)!r} is unfinished: {len(missing)} of {len(paths)} parts are missing. Use the same command again."
        )
    return paths


def read_tables(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Parts of a finished folder, in the order of the source. Only one is in memory."""
    return (_read(path, columns) for path in part_files(folder))


def read_parts(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a finished folder, in the order of the source."""
    for table in read_tables(folder, columns):
        yield from table.to_pylist()


# --- Workers ---------------------------------------------------------------------------------------------------------

_MAX_DEATHS = 3
"""The run stops after this many deaths of workers without a finished part in between."""

_Fault = tuple[type[Any], str, str]
"""Built-in class, message and traceback of an error; other processes may not know, or not unpickle, its own class."""


@dataclass(repr=False)  # Ray shows an actor even if it could not be made
class _Worker:
    """Writes parts; loads the models for the first. A process of its own starts in `folder`, as one of `on_machine`."""

    make_part: MakePart
    parts: Sequence[range]
    paths: Sequence[Path]
    settings: dict[str, Any]
    folder: str = ""
    on_machine: int = 1
    made_by: dict[str, Any] | None = None

    def write(self, number: int) -> None:
        import pyarrow.parquet

        if self.made_by is None:
            made_by = to_plain(self.make_part.load())
            for path in _present(self.paths[0].parent)[:1]:  # such as of a model that was trained further
                refuse_other_settings(_run_of(path)["made_by"], made_by)
            self.made_by = made_by
        table = self.make_part(self.parts[number])
        run = json.dumps({"settings": self.settings, "made_by": self.made_by})
        with atomic_file(self.paths[number]) as file:
            pyarrow.parquet.write_table(table.replace_schema_metadata({"run": run}), file)

    def attempt(self, number: int) -> _Fault | None:
        """Write one part in a process of its own; returns the error if there is one."""
        try:
            os.environ["LOCAL_WORLD_SIZE"] = str(self.on_machine)  # as under torchrun: threads share the machine
            if os.path.isdir(self.folder):
                os.chdir(self.folder)  # relative paths then mean the same as in the process that started the command
            self.write(number)
        except Exception as error:
            # Unicode errors cannot be constructed from a message.
            kinds = (k for k in type(error).__mro__ if k.__module__ == "builtins" and not issubclass(k, UnicodeError))
            kind = next(kinds)
            name = "" if kind is type(error) else f"{type(error).__name__}: "
            return kind, f"{name}{error}", "".join(traceback.format_exception(error))
        return None


_Submit = Callable[[int], "Future[_Fault | None]"]
"""Gives a part to a worker."""


def _in_workers(
    start: Callable[[int], _Submit], todo: Sequence[int], number: int, died: type[Exception]
) -> Iterator[int]:
    """Yield the numbers of finished parts; `start` starts the worker with a number from 0, also again if it `died`."""
    left, idle, deaths = list(todo), list(range(number)), 0
    workers = [start(index) for index in idle]
    running: dict[Future[_Fault | None], tuple[int, int]] = {}
    while left or running:
        while left and idle:
            index, part = idle.pop(), left.pop(0)
            running[workers[index](part)] = index, part
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            index, part = running.pop(future)
            idle.append(index)
            try:
                fault = future.result()
            except died as error:
                deaths += 1
                if deaths == _MAX_DEATHS:
                    raise RuntimeError(
                        f"A worker died {deaths} times without finishing a part, perhaps because memory ran out. Use fewer "
                        f"--processes than {number}, or a smaller --batch_size; the same command resumes."
                    ) from error
                workers[index] = start(index)
                left.insert(0, part)
                continue
            if fault is not None:
                kind, message, trace = fault
                raised = kind(message)
                raised.add_note(trace)
                raise raised
            deaths = 0
            yield part


_worker: _Worker  # of a spawned process


def _start_process(worker: _Worker, gpu: str | None) -> None:
    global _worker
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is used: "cuda" is then this worker's GPU
    _worker = worker


def _exit_with_parent() -> None:
    """End this process with its parent; a killed parent cannot end it, and it would keep its models in memory."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _attempt(number: int) -> _Fault | None:
    return _worker.attempt(number)


def _in_processes(worker: _Worker, todo: list[int], number: int, gpus: Sequence[str]) -> Iterator[int]:
    """Yield the parts that spawned processes finished; each is a pool of its own, so that a death breaks only one."""
    pools: list[ProcessPoolExecutor] = []

    def start(index: int) -> _Submit:
        values = replace(worker, on_machine=number), gpus[index % len(gpus)] if gpus else None
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_process, values)
        pools.append(pool)
        return lambda part: pool.submit(_attempt, part)

    try:
        yield from _in_workers(start, todo, number, BrokenProcessPool)
    finally:
        for pool in pools:  # waits: after an error, no part may appear in a folder that is free again
            pool.shutdown()


def _on_ray(worker: _Worker, todo: list[int], engine: EngineOptions) -> Iterator[int]:
    """Yield the parts that actors of a cluster finished."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray starts, which would send statistics
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            "--engine ray needs Ray, which is not installed. Run `pip install 'hf-captionrl[ray]'`, or use --processes."
        ) from error
    is_new = _connect(ray, engine.address)
    actors: dict[int, Any] = {}
    try:
        machines = sum(node["Alive"] for node in ray.nodes())
        most, gpus = _num_actors(ray.cluster_resources(), machines, engine.processes, worker.make_part.needs_gpu)
        number, actor_of = min(most, len(todo)), ray.remote(num_cpus=1, num_gpus=gpus)(_Worker)
        placed = replace(worker, folder=os.getcwd(), on_machine=math.ceil(number / machines))

        def start(index: int) -> _Submit:
            actor = actors[index] = actor_of.remote(**vars(placed))
            return lambda part: actor.attempt.remote(part).future()

        yield from _in_workers(start, todo, number, ray.exceptions.RayActorError)
    finally:
        for actor in actors.values():
            ray.kill(actor)
        if is_new:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> bool:
    """Connect to the cluster, or start one on this machine; returns whether the connection is new."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        if place := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address or ""):
            # Ray itself tries for minutes, and then ends the process.
            socket.create_connection((place[1], int(place[2])), timeout=10).close()
        # None would join a cluster that runs on this machine, or the one that RAY_ADDRESS names.
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **settings)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--address {address!r}: no Ray cluster answers ({error}). Start one with `ray start --head`, or leave --address out."
        ) from error
    return True


def _num_actors(
    resources: Mapping[str, float], machines: int, processes: int | None, needs_gpu: bool
) -> tuple[int, int]:
    """Number of actors, no more than can start, and of GPUs per actor."""
    cpus, gpus = max(1, int(resources.get("CPU", 1))), int(resources.get("GPU", 0)) if needs_gpu else 0
    return min(processes or gpus or (machines if needs_gpu else cpus), gpus or cpus, cpus), min(gpus, 1)
