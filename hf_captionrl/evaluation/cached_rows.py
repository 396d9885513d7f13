"""Shards with one row per image that fill a cache: the code shared by `captionrl features` and `captionrl pixels`."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import EngineOptions, read_shards
from hf_captionrl.options import option

if TYPE_CHECKING:
    import numpy as np

    from hf_captionrl.data import ImageReader
    from hf_captionrl.retrieval import FeatureCache

__all__ = ["CachedRowsOptions", "fill_cache", "keys_and_cached", "print_summary"]

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


def keys_and_cached(
    reader: ImageReader, cache: FeatureCache, hashes: FeatureCache, rows: Sequence[int]
) -> tuple[dict[int, str], dict[int, np.ndarray]]:
    """Keys of the images that have a file, and what the cache has of them, both by row of the data set; opens no image.

    Files are hashed in threads, and those of the table `hashes` are not read: see `source_keys`. Damaged rows of the cache are dropped with a warning, and are not among what it has.
    """
    from hf_captionrl.data.source_keys import keys_of

    keys = reader.read_all(rows, lambda values: keys_of(values, hashes))
    while known := [row for row, key in keys.items() if key in cache]:
        # Fails after it has dropped damaged rows, whose keys are unknown in the next round.
        with contextlib.suppress(KeyError):
            return keys, dict(zip(known, cache.get([keys[row] for row in known]).tensor().numpy(), strict=True))
    return keys, {}


def fill_cache(cache: FeatureCache, folder: Path, column: str, shape: Sequence[int] = (-1,)) -> int:
    """Put one column of finished shards into a cache, by the column `key`; returns the number of rows that were new.

    Bytes are stored as uint8, lists of numbers as fp32; None stands for an unreadable image. The check of the images before
    a training then opens none of them.
    """
    import numpy as np

    from hf_captionrl.data.checked_images import checked_images

    before, is_complete, checked = len(cache), True, checked_images(cache.root)
    # The values are read only if a key is new; neither keys nor values of all rows are held in memory.
    for part in _parts(read_shards(folder, ["key"])):
        keys = [row["key"] for row in part]
        if decoded := [keys[at] for at in checked.missing(keys)]:
            checked.put(decoded, np.ones((len(decoded), 1), np.uint8))
        is_complete &= not cache.missing(keys)
    if not is_complete:
        for part in _parts(read_shards(folder, ["key", column])):
            new = [part[at] for at in cache.missing([row["key"] for row in part])]
            if new:
                values = [row[column] for row in new]
                arrays = [
                    np.frombuffer(v, np.uint8) if isinstance(v, bytes) else np.array(v, np.float32) for v in values
                ]
                cache.put([row["key"] for row in new], np.stack(arrays).reshape(len(new), *shape))
    return len(cache) - before


def _parts(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Lists of readable rows."""
    readable = (row for row in rows if row["key"] is not None)
    while part := list(itertools.islice(readable, _ROWS_AT_ONCE)):
        yield part


def print_summary(arguments: Any, summary: Mapping[str, Any], what: str) -> None:
    """Print the summary as a sentence or as JSON; `what` names the content of the rows."""
    if arguments.json:
        print(json.dumps(summary))
        return
    text = f"{summary['output']}: {what} of {summary['images']:,} of {summary['of']:,} images in {summary['shards']:,} shards"
    if bad := len(summary["unreadable"]):
        text += f"; {bad:,} cannot be read and are listed in {arguments.output / 'quarantine.jsonl'}"
    print(text + ".")
