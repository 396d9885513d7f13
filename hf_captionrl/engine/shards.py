"""A result in Parquet shards of equal numbers of rows, with a manifest.

    folder/manifest.json                  settings and their digest; when all shards exist, also their list
    folder/part-00000-of-00012.parquet    rows 0 to rows_per_shard - 1, complete if the file exists

Every shard is written to a temporary name and renamed. No process writes a file that another one reads from, so a killed
process leaves complete shards only, and two processes that write the same shard write the same rows.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine.parquet_shard import DamagedShardError, read_footer, read_shard, write_shard
from hf_captionrl.io import json_digest, to_plain, write_json

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "MANIFEST",
    "ShardFolder",
    "launched",
    "read_manifest",
    "read_shards",
    "read_tables",
    "refuse_other_settings",
    "shard_files",
]

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
