"""Rows that stages have computed for the images of an album: a repeated command computes only the missing ones.

    NAME.shards/images-1b2c.../       hashes, small pictures, features
    NAME.shards/candidates-3d4e.../   captions and their features

A folder contains the shards of the ids that were in no finished folder when it was created; its name is a digest of these ids.
The same command therefore finds its unfinished folder again. If images are added, only these are written to a new folder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_captionrl.engine import MANIFEST, EngineOptions, ShardFolder, Stage, read_manifest, read_tables, run_stage
from hf_captionrl.engine.parquet_shard import read_shard
from hf_captionrl.io import json_digest, to_plain

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KeptRow", "KeptRows", "kept_rows", "remove_kept"]

_TABLES = 4
"""Largest number of shards in memory. The shards of added images may alternate with others."""


class KeptRows:
    """Rows of one kind; the column `id` names them.

    Folders with other `settings` are left alone.
    """

    def __init__(self, folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.kind = folder, kind
        self.settings: dict[str, Any] = to_plain(dict(settings))
        self.made_by: dict[str, Any] | None = None
        self._files: list[Path] = []
        self._place: dict[str, tuple[int, int]] = {}
        self._read: OrderedDict[int, Any] = OrderedDict()
        for path in sorted(folder.glob(f"{kind}-*/{MANIFEST}")):
            manifest = read_manifest(path.parent)
            is_same = self.settings.items() <= manifest["settings"].items()
            shards = [path.parent / shard["file"] for shard in manifest.get("shards", ())]
            if is_same and shards and all(shard.is_file() for shard in shards):
                self._add(path.parent, manifest)

    def _add(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.made_by = manifest["made_by"]
        for shard, table in zip(manifest["shards"], read_tables(folder, ["id"]), strict=True):
            at = len(self._files)
            self._files.append(folder / shard["file"])
            self._place |= {name: (at, row) for row, name in enumerate(table["id"].to_pylist())}

    def complete(
        self,
        ids: Sequence[str],
        make_stage: Callable[[list[int]], Stage],
        options: EngineOptions,
        rows_per_shard: int,
        progress: Callable[[int], Any] | None = None,
    ) -> None:
        """Compute the rows that are missing."""
        asked = [at for at, name in enumerate(ids) if name not in self._place]
        if progress is not None and len(asked) < len(ids):
            progress(len(ids) - len(asked))
        if not asked:
            if options.engine is None and options.processes == 1:
                make_stage([]).load()  # other models are refused, too, if there is nothing to compute
            return
        folder = self.folder / f"{self.kind}-{json_digest([self.settings, [ids[at] for at in asked]])}"
        shards = ShardFolder(folder, self.settings, num_rows=len(asked), rows_per_shard=rows_per_shard)
        self._add(folder, run_stage(make_stage(asked), shards, options, progress=progress)["manifest"])

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """All shards."""
        for path in self._files:
            yield read_shard(path, columns)

    def row(self, name: str) -> tuple[pa.Table, int]:
        """The shard that has a row, and its number there."""
        file, row = self._place[name]
        if file not in self._read:
            self._read[file] = read_shard(self._files[file])
            if len(self._read) > _TABLES:
                self._read.popitem(last=False)
        self._read.move_to_end(file)
        return self._read[file], row


class KeptRow(NamedTuple):
    """A row of a finished shard."""

    value: Any
    written: int  # when its shard was written, in nanoseconds
    ended: int | None  # when the last shard of its folder was written; None if some are missing


def kept_rows(folder: Path, kind: str, settings: Mapping[str, Any], column: str) -> dict[str, KeptRow]:
    """A column of the rows of all finished shards, also those of unfinished folders, by id."""
    found: dict[str, KeptRow] = {}
    wanted = to_plain(dict(settings))
    for path in sorted(folder.glob(f"{kind}-*/{MANIFEST}")):
        manifest = read_manifest(path.parent)
        if not wanted.items() <= manifest["settings"].items():
            continue
        ended = path.stat().st_mtime_ns if "shards" in manifest else None
        for shard in sorted(path.parent.glob("part-*.parquet")):
            table = read_shard(shard, list(dict.fromkeys(["id", column])))
            written = shard.stat().st_mtime_ns
            values = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
            found |= {name: KeptRow(value, written, ended) for name, value in values}
    return found


def remove_kept(folder: Path, kinds: Sequence[str]) -> None:
    """Remove the shards of these kinds, and folders that are then empty."""
    for kind in kinds:
        for part in folder.glob(f"{kind}-*"):
            for file in (*part.glob("part-*.parquet"), part / MANIFEST):
                file.unlink(missing_ok=True)
            if part.is_dir() and not any(part.iterdir()):
                part.rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
