"""Keys of images from the bytes of their files, so that no image is decoded to find it in a cache."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import datasets
import numpy as np
from PIL import Image

from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.images import ImageError, media_source, open_image
from hf_captionrl.retrieval import FeatureCache, image_hash
from hf_captionrl.retrieval.feature_cache import progress_bar

__all__ = ["file_hashes", "in_threads", "keys_of", "source_key", "source_keys", "workers"]

T = TypeVar("T")

_ROWS_AT_ONCE = 256
_FILES_AT_ONCE = 16_384
_UNREADABLE = "00" * 16  # in place of a hash
# A file that changes twice within the resolution of its file system's clock keeps its modification time.
_SETTLED_NS = 2_000_000_000


class _Keys(Sequence[str]):
    """Keys that are stored as digests, `(N, 16)` uint8, and become text when they are indexed."""

    def __init__(self, digests: np.ndarray) -> None:
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> _Keys: ...
    @overload
    def __getitem__(self, index: list[int]) -> list[str]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return [self[row] for row in index]
        found = self._digests[index]
        return _Keys(found) if isinstance(index, slice) else _key(found.tobytes().hex())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class _File(NamedTuple):
    path: str
    state: str  # path, size and modification time


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads of this process, as many as its share of the processor's cores.

    Threads, because hashing, decoding and resizing release the interpreter lock and nothing is copied between processes.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def source_keys(
    dataset: datasets.Dataset,
    directory: str | os.PathLike | None = None,
    *,
    progress: str | bool = False,
    skip_unreadable: bool = False,
) -> Sequence[str]:
    """One key per row: the hash of its image's bytes.

    A file that was hashed before is known by its path, size and modification time, and is not read again.

    `directory` is the root of the feature caches. Raises ImageError for a row without image, or whose file does not
    exist; with `skip_unreadable`, such rows have one key in common.
    """
    column = undecoded(dataset).select_columns("image").with_format(None)
    known: FeatureCache | None = None
    digests: np.ndarray = np.empty((len(column), 16), np.uint8)
    files: list[tuple[int, _File]] = []
    row = 0
    with workers() as pool, progress_bar(len(column), progress, "image files", delay=1.0) as bar:
        for batch in column.iter(_ROWS_AT_ONCE):
            for found in pool.map(_hash_if_readable if skip_unreadable else _hash_or_file, batch["image"]):
                if isinstance(found, _File):
                    files.append((row, found))
                else:
                    digests[row] = np.frombuffer(bytes.fromhex(found), np.uint8)
                row += 1
            if files and (len(files) >= _FILES_AT_ONCE or row == len(column)):
                rows = [row for row, _ in files]
                known = file_hashes(directory) if known is None else known
                digests[rows] = _file_hashes(known, [file for _, file in files], pool, progress and "Hashing files")
                files = []
            if bar is not None:
                bar.update(len(batch["image"]))
    return _Keys(digests)


def _file_hashes(
    known: FeatureCache, files: Sequence[_File], pool: ThreadPoolExecutor, progress: str | bool
) -> np.ndarray:
    """Hashes of files, `(N, 16)` uint8, from the cache if they are in it."""

    def compute(rows: list[int]) -> np.ndarray:
        hashes = pool.map(_file_hash, (files[i].path for i in rows))
        return np.stack([np.frombuffer(bytes.fromhex(h), np.uint8) for h in hashes])  # (rows, 16)

    states = [file.state for file in files]
    return np.asarray(known.get_or_compute(states, compute, batch_size=_ROWS_AT_ONCE, progress=progress))


def file_hashes(directory: str | os.PathLike | None) -> FeatureCache:
    """Hashes of files, `(16,)` uint8, by path, size and modification time."""
    return FeatureCache(directory, model_id="blake2b", revision="1", what="file_hashes", dtype="uint8")


def in_threads(function: Callable[[Any], T]) -> Callable[[Sequence[Any]], list[T | ImageError]]:
    """A function that applies `function` to each of several undecoded images in [`workers`].

    An image that cannot be read has its `ImageError` as result.
    """

    def attempt(value: Any) -> T | ImageError:
        try:
            return function(value)
        except ImageError as error:
            return error

    def apply(values: Sequence[Any]) -> list[T | ImageError]:
        with workers() as pool:
            return list(pool.map(attempt, values))

    return apply


def keys_of(values: Sequence[Any], known: FeatureCache) -> list[str | ImageError]:
    """Keys of a few undecoded images, as [`source_keys`] gives them, or their errors; `known` is [`file_hashes`]."""
    found = in_threads(_hash_or_file)(values)
    files = [each for each in found if isinstance(each, _File)]
    if files:
        with workers() as pool:
            hashes = dict(zip(files, _file_hashes(known, files, pool, False), strict=True))
        found = [hashes[each].tobytes().hex() if isinstance(each, _File) else each for each in found]
    return [each if isinstance(each, ImageError) else _key(str(each)) for each in found]


def source_key(value: Any) -> str:
    """Key of one undecoded image, as [`source_keys`] gives it; its file is read."""
    found = _hash_or_file(value)
    return _key(_file_hash(found.path) if isinstance(found, _File) else found)


def _key(digest: str) -> str:
    return f"file {digest}"  # keys of `image_hash` are those of decoded pixels


def _hash_or_file(value: Any) -> str | _File:
    source, _ = media_source(value)
    if isinstance(source, Image.Image):
        return image_hash(open_image(source))
    if isinstance(source, io.BytesIO):
        return hashlib.blake2b(source.getbuffer(), digest_size=16).hexdigest()
    status = os.stat(source)
    if abs(time.time_ns() - status.st_mtime_ns) < _SETTLED_NS:
        return _file_hash(source)
    return _File(source, f"{Path(source).absolute()}\n{status.st_size}\n{status.st_mtime_ns}")


def _hash_if_readable(value: Any) -> str | _File:
    try:
        found = _hash_or_file(value)
    except (ImageError, OSError):
        return _UNREADABLE
    return found if isinstance(found, str) or os.access(found.path, os.R_OK) else _UNREADABLE


def _file_hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
