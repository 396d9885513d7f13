"""Results in Parquet parts, and the work on the parts that are missing: in this process, in several, or on Ray.

folder/manifest.json                  settings and their digest; when all parts exist, also their list
folder/part-00000-of-00012.parquet    rows 0 to rows_per_shard - 1 of the source; complete if the file exists

A part (shard) is written to a temporary name and renamed, so a killed process leaves complete parts only. The files alone show
which parts are finished. A command locks the folder, and each part names its place and the settings of its run, so parts of two
runs are never mixed. The processes of one launch share the lock: two that write the same part write the same rows.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import json
import os
import re
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hf_captionrl.utils.io import FolderLock, atomic_file, json_digest, refuse_file, to_plain, write_json
from hf_captionrl.utils.options import EngineOptions

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
MANIFEST = "manifest.json"
_PART = re.compile(r"part-\d{5,}-of-\d{5,}\.parquet")
_MADE_BY, _PLACE = b"made_by", b"place"
_REMEDY = "Use --overwrite to start again, or another --output."


# --- One part --------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, read: Callable[[Any], T]) -> T:
    """What `read` reads from a Parquet file, whose checksums are verified."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            return read(file)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file system
            raise
        raise ValueError(f"{path} is damaged ({error}). Remove the file and use the same command again.") from error


def read_shard(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """Read one part and verify the checksums of its pages."""

    def read(file: Any) -> pa.Table:
        names = file.schema_arrow.names
        wanted = names if columns is None else list(columns)
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(
                f"{path} lacks the column(s) {missing}; it has {names}. Use the output of another command."
            )
        return file.read(wanted).select(wanted)

    return _read_parquet(Path(path), read)


def _check_place(path: Path, schema: pa.Schema, place: Sequence[Any]) -> None:
    """Refuse the part of another run, or of another place: `place` is the digest of the settings and the number of the part."""
    if json.loads((schema.metadata or {}).get(_PLACE, b"null")) != list(place):
        raise ValueError(
            f"{path} is of another run or another place, or was written by an older version. Remove the file and use the same "
            "command again."
        )


# --- A folder of parts -----------------------------------------------------------------------------------------------


def launched() -> tuple[int, int]:
    """Rank of this process and number of processes under `accelerate launch` or torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any], remedy: str = _REMEDY) -> None:
    """Raise ValueError if a setting of an existing output differs from that of this run."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"The output was written with {name} {before.get(name)!r}, but {name} is now {now.get(name)!r}. {remedy}"
            )


class ShardFolder:
    """The parts of one result: `rows_per_shard` of `num_rows` rows of the source each.

    A folder with parts of other `settings` is refused. `overwrite` discards existing parts. As a context manager, which may be
    nested, it keeps other commands out of the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        num_rows: int,
        rows_per_shard: int,
        overwrite: bool = False,
    ) -> None:
        if num_rows < 1:
            raise ValueError("num_rows is 0, but there must be at least 1. Use more images.")
        self.folder = Path(folder)
        refuse_file(self.folder)
        self.num_rows, self.rows_per_shard = num_rows, rows_per_shard
        number = -(-num_rows // rows_per_shard)
        self.names = [f"part-{shard:05d}-of-{number:05d}.parquet" for shard in range(number)]
        self._settings = to_plain({**settings, "num_rows": num_rows, "rows_per_shard": rows_per_shard})
        self._digest = json_digest(self._settings, size=16)
        self._locks: list[FolderLock | None] = []  # one for each `with`; only the outermost locks
        if overwrite and launched()[1] > 1:
            raise ValueError(
                f"Launched processes start at different times, so none can discard the shards of {str(folder)!r}. Remove the folder "
                "instead of using --overwrite."
            )
        with self._locked():
            if overwrite:
                for name in (MANIFEST, *self._found()):
                    (self.folder / name).unlink(missing_ok=True)
            self._prepare()

    def _locked(self) -> FolderLock:
        return FolderLock(self.folder, shared=launched()[1] > 1)

    def _prepare(self) -> None:
        """Write the manifest, or refuse parts with other settings."""
        has_manifest = (self.folder / MANIFEST).is_file()
        settings = read_manifest(self.folder)["settings"] if has_manifest else None  # refuses a file of something else
        if not self._found():  # nothing, or a run that ended before its first part
            self._write_manifest()
        elif settings is None:
            raise ValueError(
                f"{str(self.folder)!r} has shards, but {MANIFEST} with their settings is missing. {_REMEDY}"
            )
        else:
            refuse_other_settings(settings, self._settings)

    def __enter__(self) -> Self:
        self._locks.append(None if self._locks else self._locked())
        try:
            self._prepare()  # another command may have had the folder since
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if lock := self._locks.pop():
            if any(error) and not lock.shared and not self._found():  # a run that failed leaves nothing
                (self.folder / MANIFEST).unlink(missing_ok=True)
            lock.close()
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # if it is empty

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_locks": []}  # the process that sends it to workers keeps the lock

    def _write_manifest(self, **more: Any) -> None:
        write_json(self.folder / MANIFEST, {"format": 1, "digest": self._digest, "settings": self._settings, **more})

    def _found(self) -> set[str]:
        """Names of parts, also of other runs."""
        return {path.name for path in self.folder.glob("part-*.parquet") if _PART.fullmatch(path.name)}

    def _footer(self, shard: int) -> tuple[int, dict[str, Any]]:
        """Number of rows of a part, and the [`Stage.made_by`] that it contains."""
        path = self.folder / self.names[shard]
        schema, rows = _read_parquet(path, lambda file: (file.schema_arrow, file.metadata.num_rows))
        _check_place(path, schema, (self._digest, shard))
        return rows, json.loads(schema.metadata[_MADE_BY])

    def rows(self, shard: int) -> range:
        """Rows of the source that a part covers."""
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.num_rows))

    def is_mine(self, shard: int) -> bool:
        """Whether this process works on a part under `accelerate launch`."""
        # Depends on its number only, because launched processes look for missing parts at different times.
        rank, world = launched()
        return shard % world == rank

    def unfinished(self) -> list[int]:
        """Parts that are missing, ascending."""
        found = self._found()
        return [shard for shard, name in enumerate(self.names) if name not in found]

    def check_made_by(self, made_by: Mapping[str, Any]) -> None:
        """Raise ValueError if another stage, such as a model that was trained further, wrote the first finished part."""
        done = set(range(len(self.names))).difference(self.unfinished())
        if done:
            refuse_other_settings(self._footer(min(done))[1], to_plain(dict(made_by)))

    def write(
        self, shard: int, rows: Sequence[Mapping[str, Any]], schema: pa.Schema, made_by: Mapping[str, Any]
    ) -> None:
        """Write one part, atomically."""
        import pyarrow as pa
        import pyarrow.parquet

        facts = {_MADE_BY: json.dumps(to_plain(dict(made_by))), _PLACE: json.dumps([self._digest, shard])}
        described = schema.with_metadata(facts)
        with atomic_file(self.folder / self.names[shard]) as file:
            table = pa.Table.from_pylist(list(rows), schema=described)
            pyarrow.parquet.write_table(table, file, write_page_checksum=True)

    def finish(self) -> dict[str, Any]:
        """Check that every part exists and that one model made all, and add their list to the manifest."""
        if missing := self.unfinished():
            raise ValueError(
                f"{len(missing)} of {len(self.names)} shards are unfinished, such as {self.names[missing[0]]}. Use the same "
                "command again."
            )
        footers = [self._footer(shard) for shard in range(len(self.names))]
        made_by = footers[0][1]
        for _, other in footers:
            refuse_other_settings(made_by, other)
        shards = [{"file": name, "rows": rows} for name, (rows, _) in zip(self.names, footers, strict=True)]
        self._write_manifest(made_by=made_by, rows=sum(rows for rows, _ in footers), shards=shards)
        return read_manifest(self.folder)


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Manifest of a folder of parts: `settings`, and if all parts exist `shards`, `rows` and `made_by`."""
    path = Path(folder) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). {_REMEDY}") from None
    if not isinstance(found, dict) or found.get("format") != 1 or not isinstance(found.get("settings"), dict):
        raise ValueError(f"{path} is not a manifest of shards. {_REMEDY}")
    return found


def read_tables(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Parts of a finished folder, in the order of the source. Only one is in memory."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no {MANIFEST}. Use a folder that --processes or --engine wrote.")
    manifest = read_manifest(folder)
    if "shards" not in manifest:
        raise ValueError(f"{str(folder)!r} is unfinished. Use the same command again to resume.")
    for number, shard in enumerate(manifest["shards"]):
        table = read_shard(path := folder / shard["file"], columns)
        _check_place(path, table.schema, (manifest["digest"], number))
        yield table


def read_shards(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a finished folder, in the order of the source; see [`read_tables`]."""
    for table in read_tables(folder, columns):
        yield from table.to_pylist()


def shard_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Files of a finished folder, in the order of the source, for readers that map them into memory."""
    for _ in read_tables(folder):  # those readers do not verify the checksums
        pass
    return [Path(folder) / shard["file"] for shard in read_manifest(folder)["shards"]]


# --- The work --------------------------------------------------------------------------------------------------------


def seed_of_batch(seed: int, image_id: str) -> int:
    """Seed, at most 56 bits, of the samples of the batch whose first image has this id; independent of processes and batches."""
    text = f"{seed}/{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Stage(ABC):
    """A function of a part, with models and data that are loaded once per process.

    A stage is pickled and sent to every process before `load`, so `__init__` holds only settings; paths must name the same data on
    every machine. The result of a part must not depend on the process or on earlier parts. Seeds come from the rows.
    """

    needs_gpu: bool = True
    """Whether the stage computes on a GPU if there is one. By default, each GPU then has one process; a stage without need has
    as many Ray actors as the cluster has CPUs."""

    @abstractmethod
    def load(self) -> None:
        """Load models and data, before the first part."""

    def made_by(self) -> dict[str, Any]:
        """Facts that are known after `load` and affect the result, such as a fingerprint of the weights; equal in all parts."""
        return {}

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Columns of the result."""

    @abstractmethod
    def __call__(self, rows: range) -> list[dict[str, Any]]:
        """Rows of the result, in the order of the source, for some rows of the source."""


class Actor:
    """Runs a stage, which is loaded when the first part is written."""

    def __init__(self, stage: Stage, shards: ShardFolder) -> None:
        self.stage, self.shards = stage, shards
        self._made_by: dict[str, Any] | None = None

    def attempt(self, shard: int) -> str:
        """Write one part; return the packed error, or an empty text. Packed errors are the same in all kinds of workers.

        An error is text, with the traceback of this process; its class may be unknown, or not picklable, elsewhere.
        """
        try:
            self.work(shard)
        except Exception as error:
            # Only Unicode errors cannot be constructed from a message.
            built_in = (k for k in type(error).__mro__ if k.__module__ == "builtins" and "Unicode" not in k.__name__)
            kind = next(built_in).__name__
            name = "" if kind == type(error).__name__ else f"{type(error).__name__}: "
            return json.dumps([kind, f"{name}{error}", "".join(traceback.format_exception(error))])
        return ""

    def work(self, shard: int) -> None:
        """Write one part."""
        if self._made_by is None:
            self.stage.load()
            self.shards.check_made_by(made_by := self.stage.made_by())
            self._made_by = made_by
        self.shards.write(shard, self.stage(self.shards.rows(shard)), self.stage.schema(), self._made_by)


def raise_packed(text: str) -> None:
    """Raise the error of a worker, if there is one, as its built-in class or as the built-in class that it inherits from."""
    if text:
        kind, message, trace = json.loads(text)
        error = getattr(builtins, kind)(message)
        error.add_note(trace)
        raise error


def run_stage(
    stage: Stage,
    shards: ShardFolder,
    options: EngineOptions | None = None,
    *,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Write every missing part: in this process, or with the processes or Ray actors of `options`.

    Under `accelerate launch` or torchrun, each process takes its share of the parts. `progress` is called with the rows of each
    part that this run has finished.

    Returns `shards`, `resumed` (parts of an earlier run), and `manifest`, which is None under `accelerate launch` while other
    processes are working.
    """
    options = options or EngineOptions()
    options.check_engine()
    world = launched()[1]
    if world > 1 and options.uses_shards and (options.engine == "ray" or (options.processes or 1) > 1):
        raise ValueError(
            f"{world} processes were launched, and each would start more. Use either `accelerate launch`, or "
            "--processes or --engine ray."
        )
    with shards:
        todo = shards.unfinished()
        summary: dict[str, Any] = {"shards": len(shards.names), "resumed": len(shards.names) - len(todo)}
        for shard in _finished(stage, shards, [shard for shard in todo if shards.is_mine(shard)], options):
            if progress is not None:
                progress(len(shards.rows(shard)))
        summary["manifest"] = shards.finish() if world == 1 or not shards.unfinished() else None
    return summary


def _finished(stage: Stage, shards: ShardFolder, todo: list[int], options: EngineOptions) -> Iterator[int]:
    """Yield the numbers of finished parts."""
    if not todo:
        return
    actor = Actor(stage, shards)
    if options.engine == "ray":
        from hf_captionrl.utils.ray_engine import run_on_ray

        yield from run_on_ray(actor, todo, options)
        return
    number = options.processes or (1 if launched()[1] > 1 or not stage.needs_gpu else _num_gpus() or 1)
    if number > 1:
        yield from _in_processes(actor, todo, min(number, len(todo)))
        return
    if (rank := os.environ.get("LOCAL_RANK")) is not None and _num_gpus():
        import torch

        torch.cuda.set_device(int(rank))  # "cuda" is then the GPU of this process
    for shard in todo:
        actor.work(shard)
        yield shard


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


# --- Several workers -------------------------------------------------------------------------------------------------

_MAX_DEATHS = 3
"""The run stops after this many deaths of workers without a finished part in between."""

Submit = Callable[[int], "Future[str]"]
"""Gives a part to a worker."""


def in_workers(
    start: Callable[[int], Submit], todo: Sequence[int], number: int, died: type[Exception]
) -> Iterator[int]:
    """Yield the numbers of finished parts of `todo`. `start` starts the worker with a number from 0.

    `died` is the error of a part whose worker has died: another worker takes its place and the part.
    """
    left, idle, deaths = list(todo), list(range(number)), 0
    workers = [start(worker) for worker in idle]
    running: dict[Future[str], tuple[int, int]] = {}
    while left or running:
        while left and idle:
            worker, shard = idle.pop(), left.pop(0)
            running[workers[worker](shard)] = (worker, shard)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            worker, shard = running.pop(future)
            try:
                raise_packed(future.result())
            except died as error:
                deaths += 1
                if deaths >= _MAX_DEATHS:
                    raise RuntimeError(
                        f"A worker died {deaths} times without finishing a shard ({len(left) + len(running) + 1} are left), "
                        f"perhaps because memory ran out. Use fewer --processes than {number}, or a smaller --batch_size; the "
                        "same command resumes."
                    ) from error
                workers[worker] = start(worker)
                left.insert(0, shard)
            else:
                deaths = 0
                yield shard
            idle.append(worker)


_actor: Actor | None = None


def _exit_with_parent() -> None:
    """End this process when its parent ends; a killed parent cannot end it, and it would keep its models in memory."""
    from multiprocessing import parent_process

    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _start_worker(actor: Actor, gpu: str | None, processes: int) -> None:
    global _actor
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The thread pools of a process then know that it is one of several on its machine, as under torchrun.
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is used: "cuda" is then this worker's GPU
    _actor = actor


def _work(shard: int) -> str:
    assert _actor is not None
    return _actor.attempt(shard)


def _in_processes(actor: Actor, todo: list[int], number: int) -> Iterator[int]:
    """Yield the parts that spawned processes have finished; each is a pool of its own, so that a death breaks only one."""
    from multiprocessing import get_context

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(_num_gpus())] if visible is None else visible.split(",")[: _num_gpus()]
    pools: list[ProcessPoolExecutor] = []

    def start(worker: int) -> Submit:
        arguments = (actor, gpus[worker % len(gpus)] if gpus else None, number)
        pools.append(
            ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start_worker, initargs=arguments)
        )
        return lambda shard, pool=pools[-1]: pool.submit(_work, shard)  # type: ignore[misc]

    try:
        yield from in_workers(start, todo, number, BrokenProcessPool)
    finally:
        for pool in pools:  # waits: after an error, no part may appear in a folder that is free again
            pool.shutdown()
