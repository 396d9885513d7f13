"""Shards with one row per image that fill a cache: the code shared by `captionrl features` and `captionrl pixels`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import EngineOptions, read_shards
from hf_captionrl.options import option

if TYPE_CHECKING:
    from hf_captionrl.retrieval import FeatureCache

__all__ = ["CachedRowsOptions", "fill_cache", "print_summary"]

_ROWS_AT_ONCE = 256


@dataclass
class CachedRowsOptions(EngineOptions):
    """How shards are processed, and whether their rows are put into the cache."""

    overwrite: bool = option(False, help="start again even if the folder has shards")
    fill_cache: bool = option(True, help="put the rows into the cache of this machine")

    @property
    def uses_shards(self) -> bool:
        """Always."""
        return True


def fill_cache(cache: FeatureCache, folder: Path, column: str, shape: Sequence[int] = (-1,)) -> int:
    """Put one column of finished shards into a cache, by the column `key`; returns the number of rows that were new.

    Bytes are stored as uint8, lists of numbers as fp32; None stands for an unreadable image.
    """
    import numpy as np

    before = len(cache)
    keys = [row["key"] for row in read_shards(folder, ["key"]) if row["key"] is not None]
    new = {keys[at] for at in cache.missing(keys)}
    rows = (row for row in read_shards(folder, ["key", column]) if row["key"] in new)
    while new and (part := list(itertools.islice(rows, _ROWS_AT_ONCE))):
        values = [row[column] for row in part]
        arrays = [np.frombuffer(v, np.uint8) if isinstance(v, bytes) else np.array(v, np.float32) for v in values]
        cache.put([row["key"] for row in part], np.stack(arrays).reshape(len(part), *shape))
    return len(cache) - before


def print_summary(arguments: Any, summary: Mapping[str, Any], what: str) -> None:
    """Print the summary as a sentence or as JSON; `what` names the content of the rows."""
    if arguments.json:
        print(json.dumps(summary))
        return
    text = f"{summary['output']}: {what} of {summary['images']:,} of {summary['of']:,} images in {summary['shards']:,} shards"
    if bad := len(summary["unreadable"]):
        text += f"; {bad:,} cannot be read and are listed in {arguments.output / 'quarantine.jsonl'}"
    print(text + ".")
