"""Rows of a long computation in Parquet parts, written by this process, by several, or on a Ray cluster; resumable.

folder/part-00000-of-00012.parquet    the result of the first range of rows; its metadata hold the settings of the run

A part is written to a temporary name, flushed and renamed: it is there, or it is not. The files alone show what is finished.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.utils.io import FolderLock, atomic_file, to_plain
from hf_captionrl.utils.options import EngineOptions


def run_parts(
    folder: str | os.PathLike[str],
    num_rows: int,
    make_part: Any,
    engine: EngineOptions,
    *,
    settings: Mapping[str, Any],
    rows_per_shard: int,
    overwrite: bool = False,
) -> int:
    """Write the parts that are missing, in this process or with the processes or Ray actors of `engine`.

    Args:
        folder: Folder of the parts. While this function runs, other commands are refused the folder.
        num_rows: Number of rows of the source.
        make_part: Maps a range of rows to a table with a row for each, in their order, which must not depend on the worker or on
            earlier parts. It is pickled and sent to every worker; there, `make_part.load()` loads models and data and returns what
            they are, such as a fingerprint of weights. Paths must name the same data on every machine.
        settings: What the result depends on. Parts of other settings are refused.
        overwrite: Remove all parts first.

    Returns:
        `int`: Number of rows in parts of an earlier run.

    Raises:
        ValueError: If the folder has parts of other settings or models.
        RuntimeError: If a worker dies. The same call resumes.
    """
    import torch
    from tqdm import tqdm

    folder = Path(folder)
    parts = [range(start, min(start + rows_per_shard, num_rows)) for start in range(0, num_rows, rows_per_shard)]
    with FolderLock(folder):
        for path in _present(folder) if overwrite else ():
            path.unlink()
        plain = to_plain({**settings, "num_rows": num_rows, "rows_per_shard": len(parts[0])})
        _refuse_other_parts(folder, "settings", plain)
        worker = _Worker(make_part, parts, _paths(folder, len(parts)), plain)
        todo = [number for number, path in enumerate(worker.paths) if not path.exists()]
        gpus = torch.cuda.device_count()
        processes = min(engine.processes or gpus or 1, len(todo))
        if engine.engine == "ray" and todo:
            finished = _on_ray(worker, todo, engine)
        elif processes > 1:
            finished = _in_processes(worker, todo, processes, gpus)
        else:
            finished = map(worker.write, todo)
        resumed = num_rows - sum(len(parts[number]) for number in todo)
        with tqdm(total=num_rows, initial=resumed, unit=" rows", disable=None) as progress:
            for number in finished:
                progress.update(len(parts[number]))
    return resumed


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


def _refuse_other_parts(folder: Path, name: str, now: Mapping[str, Any]) -> None:
    """Compare `settings` or `made_by` with what the metadata of a part in the folder say."""
    import pyarrow.parquet

    for path in _present(folder)[:1]:
        refuse_other_settings(json.loads(pyarrow.parquet.read_schema(path).metadata[b"run"])[name], now)


def part_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Files of a finished folder, in the order of the source."""
    folder = Path(folder)
    present = _present(folder)
    if not present:
        raise FileNotFoundError(f"{str(folder)!r} has no parts. Use a folder that --processes or --engine wrote.")
    paths = _paths(folder, int(present[0].stem.rpartition("-")[2]))
    if missing := set(paths).difference(present):
        raise ValueError(
            f"{str(folder)!r} is unfinished; missing parts: {len(missing)} of {len(paths)}. Use the same command again."
        )
    return paths


def read_parts(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a finished folder, in the order of the source. Only one part is in memory."""
    import pyarrow.parquet

    for path in part_files(folder):
        # Without partitioning, folders such as "a=b" in the path would become columns.
        yield from pyarrow.parquet.read_table(path, columns=columns, partitioning=None).to_pylist()


# --- Workers ---------------------------------------------------------------------------------------------------------


@dataclass(repr=False)  # Ray shows an actor even if it could not be made
class _Worker:
    """Writes parts; loads the models for the first. An actor of Ray starts in `folder`, as one of `on_machine`."""

    make_part: Any
    parts: Sequence[range]
    paths: Sequence[Path]
    settings: dict[str, Any]
    folder: str = ""
    on_machine: int = 1
    made_by: dict[str, Any] | None = None

    def write(self, number: int) -> int:
        """Write one part; returns its number."""
        import pyarrow.parquet

        if os.path.isdir(self.folder):
            os.environ["LOCAL_WORLD_SIZE"] = str(self.on_machine)
            os.chdir(self.folder)  # relative paths then mean the same as in the process that started the command
        if self.made_by is None:
            made_by = to_plain(self.make_part.load())
            _refuse_other_parts(
                self.paths[0].parent, "made_by", made_by
            )  # such as of a model that was trained further
            self.made_by = made_by
        table = self.make_part(self.parts[number])
        run = json.dumps({"settings": self.settings, "made_by": self.made_by})
        with atomic_file(self.paths[number]) as file:
            pyarrow.parquet.write_table(table.replace_schema_metadata({"run": run}), file)
        return number


_REMEDY = "perhaps because memory ran out. The same command resumes; use fewer --processes."

_worker: _Worker  # of a spawned process


def _start_process(worker: _Worker, gpus: Sequence[str], index: Any) -> None:
    global _worker
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["LOCAL_WORLD_SIZE"] = str(worker.on_machine)  # as under torchrun: threads share the machine
    with index.get_lock():
        if gpus:  # before CUDA is used: "cuda" is then this worker's GPU
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index.value % len(gpus)]
        index.value += 1
    _worker = worker


def _exit_with_parent() -> None:
    """A killed parent cannot end this process, which would keep its models in memory."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _write(number: int) -> int:
    return _worker.write(number)


def _in_processes(worker: _Worker, todo: list[int], number: int, gpus: int) -> Iterator[int]:
    """Yield the parts that spawned processes finished."""
    visible, context = os.environ.get("CUDA_VISIBLE_DEVICES"), multiprocessing.get_context("spawn")
    names = [str(gpu) for gpu in range(gpus)] if visible is None else visible.split(",")[:gpus]
    worker.on_machine = number
    pool = ProcessPoolExecutor(number, context, _start_process, (worker, names, context.Value("i", 0)))
    try:
        for future in as_completed([pool.submit(_write, part) for part in todo]):
            yield future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(f"A worker died, {_REMEDY}") from error
    finally:
        pool.shutdown(cancel_futures=True)  # waits: after an error, no part may appear in a folder that is free again


def _on_ray(worker: _Worker, todo: list[int], engine: EngineOptions) -> Iterator[int]:
    """Yield the parts that actors of a cluster finished. Ray starts a dead actor again, at most three times."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray starts, which would send statistics
    try:
        ray: Any = importlib.import_module("ray")
        actor_pool: Any = importlib.import_module("ray.util").ActorPool
    except ImportError as error:
        raise ImportError("--engine ray needs Ray. Run `pip install 'hf-captionrl[ray]'`.") from error
    if is_new := not ray.is_initialized():
        more = {} if engine.address else {"include_dashboard": False}  # only for Ray that starts here
        # None would join a cluster that runs on this machine, or the one that RAY_ADDRESS names.
        ray.init(address=engine.address or "local", log_to_driver=False, logging_level="ERROR", **more)
    actors: list[Any] = []
    try:
        machines = sum(node["Alive"] for node in ray.nodes())
        total = ray.cluster_resources()
        cpus, gpus = int(total.get("CPU", 1)), int(total.get("GPU", 0))
        number = min(engine.processes or gpus or machines, gpus or cpus, cpus, len(todo))  # no more than can start
        worker.folder, worker.on_machine = os.getcwd(), math.ceil(number / machines)
        made = ray.remote(num_cpus=1, num_gpus=min(gpus, 1), max_restarts=3, max_task_retries=3)(_Worker)
        actors += [made.remote(**vars(worker)) for _ in range(number)]
        yield from actor_pool(actors).map_unordered(lambda actor, part: actor.write.remote(part), todo)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"A worker died again and again, {_REMEDY}") from error
    finally:
        for actor in actors:
            ray.kill(actor)
        if is_new:
            ray.shutdown()
