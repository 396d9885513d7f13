"""Runs a stage on the unfinished shards of a folder: in this process, in several processes, or on Ray Data.

Every process takes a shard, processes it and writes its file. The files alone show which shards are finished. If a worker
dies, at most its current shard is lost, and another worker repeats it.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import json
import os
import re
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.utils.io import atomic_write_bytes, json_digest, to_plain, write_json
from hf_captionrl.utils.options import EngineOptions

if TYPE_CHECKING:
    import pyarrow as pa


# --- One Parquet shard whose damage is noticed -----------------------------------------------------------------------
# Checksums cover every byte that readers use: those of Parquet's pages, and a digest of the footer, which Parquet lacks.

_MADE_BY = b"made_by"
_DIGEST = re.compile(rb"footer ([0-9a-f]{32})")
_NO_DIGEST = b"footer " + b"0" * 32
_END = 8  # bytes after the footer: its length and Parquet's magic number


class DamagedShardError(ValueError):
    """A shard whose bytes are not those that were written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}). Remove the file and use the same command again.")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the Parquet reader become a [`DamagedShardError`]; those of the file system have a number, and stay."""
    try:
        yield
    except DamagedShardError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedShardError(path, f"{type(error).__name__}: {error}") from error


def _footer_bytes(end: bytes) -> int:
    """Bytes of the footer, from the last 8 bytes of a file, with these."""
    return int.from_bytes(end[:4], "little") + _END


def _hex_digest(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=16).hexdigest().encode()


def _check_footer(path: Path) -> None:
    """Compare the footer with its digest, which was computed with zeros in its place."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        number = _footer_bytes(file.read())
        if not _END < number <= size:
            raise DamagedShardError(path, "it is truncated")
        file.seek(size - number)
        footer = file.read()
    found = _DIGEST.search(footer)  # None: a shard of an earlier version
    if found is not None and _hex_digest(footer.replace(found[0], _NO_DIGEST)) != found[1]:
        raise DamagedShardError(path, "wrong checksum of the footer")


def write_shard(
    path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema, made_by: Mapping[str, Any] | None
) -> None:
    """Write a shard atomically, with [`Stage.made_by`]."""
    import pyarrow as pa
    import pyarrow.parquet

    described = schema.with_metadata({_MADE_BY: json.dumps(to_plain(dict(made_by or {}))), b"digest": _NO_DIGEST})
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(list(rows), schema=described)
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    data = buffer.getvalue()
    start = len(data) - _footer_bytes(data[-_END:])
    footer = data[start:].replace(_NO_DIGEST, b"footer " + _hex_digest(data[start:]))
    atomic_write_bytes(path, data[:start] + footer)


def read_footer(path: Path) -> tuple[int, dict[str, Any]]:
    """Number of rows of a shard, and the [`Stage.made_by`] that it contains."""
    import pyarrow.parquet

    with _naming(path):
        _check_footer(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.metadata.num_rows, json.loads((file.schema_arrow.metadata or {}).get(_MADE_BY, b"{}"))


def read_shard(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """Read one shard and verify its checksums.

    Args:
        path (`str` or `Path`): The file.
        columns (`Sequence[str]`, *optional*): Only these.

    Returns:
        `pyarrow.Table`: Its rows.

    Raises:
        ValueError: If the file is truncated or damaged, or lacks a column.
    """
    import pyarrow.parquet

    path = Path(path)
    with _naming(path):
        _check_footer(path)
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    with file:
        names = file.schema_arrow.names
        wanted = names if columns is None else list(columns)
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(
                f"{path} lacks the column(s) {missing}; it has {names}. Use the output of another command."
            )
        with _naming(path):
            return file.read(wanted).select(wanted)


# --- A result in Parquet shards of equal numbers of rows, with a manifest --------------------------------------------
# folder/manifest.json                  settings and their digest; when all shards exist, also their list
#     folder/part-00000-of-00012.parquet    rows 0 to rows_per_shard - 1, complete if the file exists
#
# Every shard is written to a temporary name and renamed. No process writes a file that another one reads from, so a killed
# process leaves complete shards only, and two processes that write the same shard write the same rows.

MANIFEST = "manifest.json"
"""Name of the manifest."""

_REMEDY = "Use --overwrite to start again, or another --output."


def launched() -> tuple[int, int]:
    """Rank of this process and number of processes, under `accelerate launch` or torchrun.

    Returns:
        `tuple[int, int]`: (0, 1) without a launcher.
    """
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any], remedy: str = _REMEDY) -> None:
    """Compare the settings of an existing output with those of this run.

    Args:
        before (`Mapping[str, Any]`): Settings of the output.
        now (`Mapping[str, Any]`): Settings of this run.
        remedy (`str`): End of the error message.

    Raises:
        ValueError: If a setting differs.
    """
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"The output was written with {name} {before.get(name)!r}, but {name} is now {now.get(name)!r}. {remedy}"
            )


class ShardFolder:
    """The shards of one result. The manifest is written or compared when the object is made.

    Args:
        folder (`str` or `Path`): Folder of the shards; created if missing.
        settings (`Mapping[str, Any]`): Settings that affect the result. A folder with other settings is refused.
        num_rows (`int`): Rows of the source.
        rows_per_shard (`int`): Rows of the source per shard.
        overwrite (`bool`): Discard existing shards.

    Raises:
        ValueError: If a number is below 1, the folder has shards of other settings, or its manifest is missing.
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
        if min(num_rows, rows_per_shard) < 1:
            raise ValueError(
                f"num_rows ({num_rows}) and rows_per_shard ({rows_per_shard}) must be at least 1. Use more images."
            )
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--output {str(folder)!r} is a file, but shards need a folder. Name a folder.")
        self.num_rows, self.rows_per_shard = num_rows, rows_per_shard
        number = -(-num_rows // rows_per_shard)
        self.names = [f"part-{shard:05d}-of-{number:05d}.parquet" for shard in range(number)]
        sizes = {"num_rows": num_rows, "rows_per_shard": rows_per_shard}
        self._settings = to_plain({**settings, **sizes})
        path = self.folder / MANIFEST
        if overwrite and launched()[1] > 1:
            raise ValueError(
                f"Launched processes start at different times, so none can discard the shards of {str(folder)!r}. Remove the folder "
                "instead of using --overwrite."
            )
        if overwrite:
            for old in (path, *self.folder.glob("part-*.parquet")):
                old.unlink(missing_ok=True)
        if path.is_file():
            refuse_other_settings(read_manifest(self.folder)["settings"], self._settings)
            self._discard_damaged()
        elif any(self.folder.glob("part-*.parquet")):
            raise ValueError(
                f"{str(self.folder)!r} has shards, but {MANIFEST} with their settings is missing. {_REMEDY}"
            )
        else:
            self._write_manifest()

    def _write_manifest(self, **more: Any) -> None:
        digest = json_digest(self._settings, size=16)
        write_json(self.folder / MANIFEST, {"format": 1, "digest": digest, "settings": self._settings, **more})

    def rows(self, shard: int) -> range:
        """Rows of the source that a shard covers.

        Args:
            shard (`int`): From 0.

        Returns:
            `range`: Numbers of rows.
        """
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.num_rows))

    def is_mine(self, shard: int) -> bool:
        """Whether this process works on a shard. Under `accelerate launch`, every process works on a part of the shards.

        Args:
            shard (`int`): From 0.

        Returns:
            `bool`: Depends on the number of the shard only, because launched processes look for missing shards at different
            times.
        """
        rank, world = launched()
        return shard % world == rank

    def unfinished(self) -> list[int]:
        """Shards that are missing.

        Returns:
            `list[int]`: Ascending.
        """
        found = {path.name for path in self.folder.glob("part-*.parquet")}
        return [shard for shard, name in enumerate(self.names) if name not in found]

    def _discard_damaged(self) -> None:
        """Remove shards of this process whose footer is truncated or damaged, so that they are unfinished.

        Only the footers are read. Damage elsewhere is an error of whoever reads the shard.
        """
        missing, found = set(self.unfinished()), []
        for shard, name in enumerate(self.names):
            if shard in missing or not self.is_mine(shard):
                continue
            try:
                read_footer(self.folder / name)
            except DamagedShardError:
                (self.folder / name).unlink()
                found.append(shard)
        if found:
            warnings.warn(
                f"{len(found)} of {len(self.names)} shards in {self.folder} are damaged, such as {self.names[found[0]]}. They "
                "are written again.",
                stacklevel=3,
            )

    def check_made_by(self, made_by: Mapping[str, Any]) -> None:
        """Compare the loaded stage with the stage that wrote the first finished shard.

        Args:
            made_by (`Mapping[str, Any]`): [`Stage.made_by`].

        Raises:
            ValueError: If they differ, for example because the model was trained further.
        """
        done = set(range(len(self.names))).difference(self.unfinished())
        if done:
            refuse_other_settings(read_footer(self.folder / self.names[min(done)])[1], to_plain(dict(made_by)))

    def write(
        self,
        shard: int,
        rows: Sequence[Mapping[str, Any]],
        schema: pa.Schema,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one shard, atomically.

        Args:
            shard (`int`): From 0.
            rows (`Sequence[Mapping[str, Any]]`): Its result.
            schema (`pyarrow.Schema`): Columns of the result.
            made_by (`Mapping[str, Any]`, *optional*): [`Stage.made_by`].
        """
        write_shard(self.folder / self.names[shard], rows, schema, made_by)

    def finish(self) -> dict[str, Any]:
        """Check that every shard exists, and add their list to the manifest.

        Returns:
            `dict[str, Any]`: The manifest.

        Raises:
            ValueError: If a shard is missing, or two shards were made by different models.
        """
        if missing := self.unfinished():
            raise ValueError(
                f"{len(missing)} of {len(self.names)} shards are unfinished, such as {self.names[missing[0]]}. Use the same "
                "command again."
            )
        shards, made_by = [], None
        for name in self.names:
            count, loaded = read_footer(self.folder / name)
            if made_by is not None:
                refuse_other_settings(made_by, loaded)
            made_by = loaded
            shards.append({"file": name, "rows": count})
        self._write_manifest(made_by=made_by, rows=sum(shard["rows"] for shard in shards), shards=shards)
        return read_manifest(self.folder)


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the manifest of a folder of shards.

    Args:
        folder (`str` or `Path`): The folder.

    Returns:
        `dict[str, Any]`: `settings`, and if all shards exist `shards`, `rows` and `made_by`.

    Raises:
        ValueError: If it is not a manifest.
    """
    folder = Path(folder)
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST} is not JSON ({error}). {_REMEDY}") from None
    if not isinstance(found, dict) or found.get("format") != 1 or not isinstance(found.get("settings"), dict):
        raise ValueError(f"{folder / MANIFEST} is not a manifest of shards. {_REMEDY}")
    return found


def _finished_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose shards all exist."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no {MANIFEST}. Use a folder that --processes or --engine wrote.")
    manifest = read_manifest(folder)
    if "shards" not in manifest:
        raise ValueError(f"{str(folder)!r} is unfinished. Use the same command again to resume.")
    return manifest


def _check_rows(path: Path, rows: int, expected: int) -> None:
    if rows != expected:
        raise ValueError(
            f"{path} has {rows} rows, but {MANIFEST} says {expected}. Remove the file and use the same command again."
        )


def shard_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Files of a finished folder, in the order of the source, for readers that map them into memory.

    All files are read once, to verify their checksums.

    Args:
        folder (`str` or `Path`): The folder.

    Returns:
        `list[Path]`: One Parquet file per shard.

    Raises:
        FileNotFoundError: If the folder has no manifest.
        ValueError: If shards are missing, incomplete or damaged.
    """
    folder = Path(folder)
    shards = _finished_manifest(folder)["shards"]
    for shard in shards:
        _check_rows(folder / shard["file"], read_shard(folder / shard["file"]).num_rows, shard["rows"])
    return [folder / shard["file"] for shard in shards]


def read_tables(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Shards of a finished folder, in the order of the source. Only one is in memory.

    Args:
        folder (`str` or `Path`): The folder.
        columns (`Sequence[str]`, *optional*): Only these.

    Returns:
        `Iterator[pyarrow.Table]`: One table per shard.

    Raises:
        FileNotFoundError: If the folder has no manifest.
        ValueError: If shards are missing, incomplete or damaged.
    """
    folder = Path(folder)
    for shard in _finished_manifest(folder)["shards"]:
        table = read_shard(folder / shard["file"], columns)
        _check_rows(folder / shard["file"], table.num_rows, shard["rows"])
        yield table


def read_shards(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a finished folder, in the order of the source. Only one shard is in memory.

    Args:
        folder (`str` or `Path`): The folder.
        columns (`Sequence[str]`, *optional*): Only these.

    Returns:
        `Iterator[dict[str, Any]]`: The rows.

    Raises:
        FileNotFoundError: If the folder has no manifest.
        ValueError: If shards are missing, incomplete or damaged.
    """
    for table in read_tables(folder, columns):
        yield from table.to_pylist()


# --- A stage: what each process does with a shard of rows ------------------------------------------------------------


def seed_of_batch(seed: int, image_id: str) -> int:
    """Seed of the samples of one batch. It is the same in every process and does not depend on skipped batches.

    Args:
        seed: Seed of the command.
        image_id: Id of the first image of the batch.

    Returns:
        A seed for `torch.manual_seed`, at most 56 bits.
    """
    text = f"{seed}/{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Stage(ABC):
    """A function of a shard of rows, with models and data that are loaded once per process.

    A stage is pickled and sent to every process before `load`, so `__init__` holds only settings. Every process reads its
    rows from the source itself: on several machines, paths must name the same data on each.

    The result of a shard must not depend on the process or on earlier shards. Seeds come from the rows.

    Attributes:
        needs_gpu (`bool`): Whether the stage computes on a GPU if there is one. By default, each GPU then has one process; a
            stage without need has as many Ray actors as the cluster has CPUs.
    """

    needs_gpu: bool = True

    @abstractmethod
    def load(self) -> None:
        """Load models and data. Called once per process, before the first shard."""

    def made_by(self) -> dict[str, Any]:
        """Facts that are known after `load` and affect the result, such as a fingerprint of the weights; equal in all shards.

        Returns:
            `dict[str, Any]`: Values that JSON can represent.
        """
        return {}

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Columns of the result.

        Returns:
            `pyarrow.Schema`: Schema of every shard.
        """

    @abstractmethod
    def __call__(self, rows: range) -> list[dict[str, Any]]:
        """Process one shard.

        Args:
            rows (`range`): Numbers of the rows in the source.

        Returns:
            `list[dict[str, Any]]`: Rows of the result, in the order of the source.
        """


# --- The work of one process: it loads a stage once and writes its shards one after the other ------------------------

MAX_DEATHS = 3
"""The run stops after this many deaths of workers without a finished shard in between."""


class Actor:
    """Runs a stage, which is loaded when the first shard is written."""

    def __init__(self, stage: Stage, shards: ShardFolder) -> None:
        self.stage, self.shards = stage, shards
        self._made_by: dict[str, Any] | None = None

    def attempt(self, shard: int) -> str:
        """Write one shard; return the packed error, or an empty text. Packed errors are the same in all kinds of workers."""
        try:
            self.work(shard)
        except Exception as error:
            return pack_error(error)
        return ""

    def work(self, shard: int) -> None:
        """Write one shard."""
        if self._made_by is None:
            self.stage.load()
            made_by = self.stage.made_by()
            self.shards.check_made_by(made_by)
            self._made_by = made_by
        self.shards.write(shard, self.stage(self.shards.rows(shard)), self.stage.schema(), self._made_by)


def share_cores(processes: int) -> None:
    """Tell the thread pools of this process that it is one of several on its machine, as torchrun does."""
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)


def deaths_error(deaths: int, left: int, number: int) -> RuntimeError:
    """The error of a run whose `number` workers die without finishing any of the `left` shards."""
    return RuntimeError(
        f"A worker died {deaths} times without finishing a shard ({left} are left), perhaps because memory ran "
        f"out. Use fewer --processes than {number}, or a smaller --batch_size; the same command resumes."
    )


def pack_error(error: Exception) -> str:
    """An error as text, with the traceback of this process."""
    # Only Unicode errors cannot be constructed from a message.
    kinds = (each for each in type(error).__mro__ if each.__module__ == "builtins" and "Unicode" not in each.__name__)
    kind = next(each.__name__ for each in kinds)
    name = "" if kind == type(error).__name__ else f"{type(error).__name__}: "
    return json.dumps([kind, f"{name}{error}", "".join(traceback.format_exception(error))])


def raise_packed(text: str) -> None:
    """Raise the error of a worker, if there is one, as its built-in class or as the built-in class that it inherits from."""
    if text:
        kind, message, trace = json.loads(text)
        error = getattr(builtins, kind)(message)
        error.add_note(trace)
        raise error


# --- Runs a stage on the unfinished shards of a folder: in this process, in several processes, or on Ray Data --------


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
        from hf_captionrl.utils.ray_engine import run_on_ray

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
