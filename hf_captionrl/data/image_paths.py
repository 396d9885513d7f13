"""Checks the files named by rows: only files below the folder of the data are allowed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["is_address", "paths_without_bytes", "refuse_outside", "resolved"]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(path: str) -> bool:
    """Whether a path is not a local file: a URL, or a member of an archive (`zip://a::b`)."""
    return _ADDRESS.match(path) is not None


def resolved(path: str, folders: dict[str, str]) -> str:
    """The target of a path, with every link and `..` resolved."""
    folder, name = os.path.split(path)
    if name in ("", ".", "..") or os.path.islink(path):
        return os.path.realpath(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], name)


def _caches() -> list[str]:
    """Folders of the files that `datasets` and the Hub client downloaded and unpacked."""
    return [
        *(str(getattr(datasets.config, name)) for name in ("HF_DATASETS_CACHE", "EXTRACTED_DATASETS_PATH")),
        huggingface_hub.constants.HF_HUB_CACHE,
    ]


def refuse_outside(paths: Iterable[str | None], root: str | Path | None, where: str) -> None:
    """Refuse rows that name files elsewhere: a list of images from others must not show or publish other files.

    Links are resolved as they are now. The root may be a link, and a path may be absolute, as long as it leads below the
    root or into the caches of `datasets` and the Hub.
    """
    roots = [*([] if root is None else [str(root)]), *_caches()]
    tops = tuple(os.path.join(os.path.realpath(top), "") for top in roots)
    folders: dict[str, str] = {}
    for row, path in enumerate(paths):
        if not path or is_address(path) or "\0" in path:
            continue
        if not resolved(path, folders).startswith(tops):
            below = f"image_root ({str(root)!r})" if root is not None else "any folder of the data (there is none)"
            raise ValueError(
                f"{where}: row {row} names the file {path!r}, which is not below {below}. Set image_root to the folder "
                "that holds the files themselves, behind any links."
            )


def paths_without_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Path per row of a column of `bytes` and `path`; None for rows with bytes, empty for columns of other types."""
    kind = column.type
    nothing = pa.chunked_array([], pa.string())
    if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
        return nothing
    paths = pc.struct_field(column, "path")
    if kind.get_field_index("bytes") >= 0:
        held = pc.is_valid(pc.struct_field(column, "bytes"))
        paths = pc.if_else(held, pa.scalar(None, paths.type), paths)
    return nothing if paths.null_count == len(paths) else paths
