"""Opens images from untrusted sources: any file, bytes or PIL image becomes RGB or raises an `ImageError`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, JpegImagePlugin, UnidentifiedImageError

from hf_captionrl.utils.images import to_rgb

T = TypeVar("T")

# --- Files named by rows: only those below the folder of the data are allowed ----------------------------------------

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(path: str) -> bool:
    """Whether a path is not a local file: a URL, or a member of an archive (`zip://a::b`)."""
    return _ADDRESS.match(path) is not None


def outside(paths: Iterable[str | None], root: str | Path | None) -> Iterator[tuple[int, str]]:
    """Rows that name files elsewhere, and those names: a list of images from others must not show or publish other files.

    Links are resolved as they are now. The root may be a link, and a path may be absolute, as long as it leads below the
    root or into the caches of `datasets` and the Hub.
    """
    caches = (str(getattr(datasets.config, name)) for name in ("HF_DATASETS_CACHE", "EXTRACTED_DATASETS_PATH"))
    roots = [*([] if root is None else [str(root)]), *caches, huggingface_hub.constants.HF_HUB_CACHE]
    tops = tuple(os.path.join(os.path.realpath(top), "") for top in roots)
    real_folder = functools.cache(os.path.realpath)
    for row, path in enumerate(paths):
        if not path or is_address(path) or "\0" in path:
            continue
        folder, name = os.path.split(path)
        is_plain = name not in ("", ".", "..") and not os.path.islink(path)
        target = os.path.join(real_folder(folder), name) if is_plain else os.path.realpath(path)
        if not target.startswith(tops):
            yield row, path


def refuse_outside(paths: Iterable[str | None], root: str | Path | None, where: str) -> None:
    """Refuse rows that name files elsewhere: see [`outside`]."""
    for row, path in outside(paths, root):
        raise ValueError(
            f"{where}: row {row} names the file {path!r}, which is not below image_root ({str(root)!r}). Set image_root to "
            "the folder that holds the files themselves."
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


# --- Opening ---------------------------------------------------------------------------------------------------------

MAX_PIXELS = 89_478_485
"""Largest accepted width * height: Pillow's default limit (a quarter of a GiB as RGB)."""

_MIN_SIDE = 2  # a 1-pixel image is a tracking pixel or a failed download

# Faults of images and videos, and the remedy for each.
IMAGE_REMEDIES: dict[str, str] = {
    "image_missing": "give the row an image, or remove the row",
    "image_not_found": "check the path and set image_root to the folder it is relative to",
    "image_remote": "download the image first and give its path; addresses are never fetched",
    "image_unreadable": "re-export the image as JPEG or PNG, or remove the row",
    "image_truncated": "download or copy the file again, or remove the row",
    "image_too_small": f"replace the image: both sides need {_MIN_SIDE} pixels or more",
    "image_too_large": "shrink the image, or raise max_pixels if you trust the file",
    "video_unreadable": "re-export the video as GIF or MP4, or remove the row",
    "video_truncated": "download or copy the file again, or remove the row",
    "video_no_frames": "replace the video by one with pictures, or remove the row",
}

# Raster formats only: Pillow hands EPS to Ghostscript, and icon and font formats hold no photographs.
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF", "HEIF")
HEIC_SUFFIXES = frozenset({".heic", ".heics", ".heif", ".heifs", ".hif"})
"""Suffixes of photographs of phones, which need the extra `[heic]`."""
HEIC_REMEDY = "Run `pip install 'hf-captionrl[heic]'` to read HEIC files"
_TRUNCATED = ("truncated", "broken data stream", "unrecognized data stream", "incomplete", "unexpected end", "eof")
# JPEG's decoder can skip fine detail; it still reads the whole stream, so truncated files are still found.
_DRAFT_SIZE = (32, 32)


class ImageError(ValueError):
    """An unusable image or video: the reason, a key of `IMAGE_REMEDIES`, and the value with the rule it broke."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        self.remedy = IMAGE_REMEDIES[reason]
        super().__init__(f"{detail}. Remedy: {self.remedy}.")

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        # A worker process of a DataLoader sends its exception by pickle, which would call __init__ with one argument.
        return type(self), (self.reason, self.detail)


@functools.cache
def image_formats() -> tuple[str, ...]:
    """The formats that `open_image` accepts; HEIC if pillow-heif is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def media_source(value: Any, kind: str = "image") -> tuple[str | io.BytesIO | Image.Image, str]:
    """The path, bytes or PIL image to open, and its name in messages."""
    source: str | io.BytesIO
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            inner, name = media_source(value["bytes"], kind)
            return inner, f"{kind} {value['path']!r}" if value.get("path") else name
        value = value.get("path")
    if value is None or value == "":
        raise ImageError("image_missing", f"there is no {kind} in this row")
    if isinstance(value, Image.Image):
        return value, f"{kind} {getattr(value, 'filename', '') or f'of mode {value.mode}'!r}"
    if isinstance(value, bytes | bytearray | memoryview):
        source, size, name = io.BytesIO(value), len(value), f"{kind} of {len(value)} bytes"
    elif isinstance(value, str | os.PathLike):
        source = os.fsdecode(value)
        name = f"{kind} {source!r}"
        if is_address(source):
            raise ImageError("image_remote", f"{name} is an address, not a file")
        if not os.path.isfile(source):  # not exists(): opening a pipe or a device would hang
            raise ImageError("image_not_found", f"{name} is not a file")
        size = os.path.getsize(source)
    else:
        must = "must be a path, bytes, a PIL image or {bytes, path}"
        raise ImageError(f"{kind}_unreadable", f"the {kind} is a {type(value).__name__}, and {must}")
    if size == 0:
        raise ImageError(f"{kind}_unreadable", f"{name} has 0 bytes")
    return source, name


@contextlib.contextmanager
def opened_image(value: Any, max_pixels: int, kind: str = "image") -> Iterator[Image.Image]:
    """The image after its header and size are checked; every error inside the block becomes an `ImageError`."""
    source, name = media_source(value, kind)
    try:
        if isinstance(source, Image.Image):
            check_size(source.size, name, max_pixels)
            yield source
        else:
            with Image.open(source, formats=image_formats()) as image:
                check_size(image.size, name, max_pixels)
                yield image
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's limit, a process-wide setting, is never lifted here: other threads rely on it.
        raise ImageError("image_too_large", f"{name}: {error} (Image.MAX_IMAGE_PIXELS of Pillow)") from None
    except MemoryError:
        raise ImageError("image_too_large", f"{name} does not fit into memory") from None
    except UnidentifiedImageError:
        formats = ", ".join(image_formats())
        is_heic = os.path.splitext(name.rstrip("'\""))[1].lower() in HEIC_SUFFIXES and "HEIF" not in image_formats()
        hint = f". {HEIC_REMEDY}" if is_heic else ""
        raise ImageError("image_unreadable", f"{name} is not in a known format ({formats}){hint}") from None
    except Exception as error:
        # Decoders raise many kinds of errors on malicious files: struct.error, SyntaxError, IndexError, zlib.error, ...
        text = f"{type(error).__name__}: {error}"
        is_truncated = any(sign in text.lower() for sign in _TRUNCATED)
        reason = "image_truncated" if is_truncated else "image_unreadable"
        raise ImageError(reason, f"{name} does not decode ({text})") from error


def image_bytes(value: Mapping[str, Any]) -> dict[str, Any]:
    """An undecoded `datasets.Image` with its bytes, and of its path only the file name, so that no local path is published."""
    path, data = value.get("path"), value.get("bytes")
    if data is None:
        with open(value["path"], "rb") as file:
            data = file.read()
    return {"bytes": data, "path": None if path is None else os.path.basename(path)}


def check_size(size: tuple[int, int], name: str, max_pixels: int) -> None:
    """Refuse images that are too small to be a picture or too large to be safe; `size` is width and height in pixels."""
    width, height = size
    # Between once and twice its own limit Pillow only warns.
    max_pixels = min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels)
    if min(size) < _MIN_SIDE:
        raise ImageError("image_too_small", f"{name} is {width} x {height} pixels, both sides need {_MIN_SIDE}")
    if width * height > max_pixels:
        detail = f"{name} is {width} x {height} pixels, max_pixels allows {max_pixels} in all"
        raise ImageError("image_too_large", detail)


def open_image(value: Any, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image of any kind as RGB.

    The EXIF orientation is applied, transparency becomes white, CMYK, palette, greyscale and 16-bit images are converted,
    and the first frame of an animation is used. Addresses are never fetched.

    Args:
        value (`Any`): Path, bytes, PIL image, or the `{"bytes": ..., "path": ...}` of an undecoded `datasets.Image`.
        max_pixels (`int`): Largest accepted width * height. Pillow's `Image.MAX_IMAGE_PIXELS` also applies.

    Returns:
        `PIL.Image.Image`: A decoded RGB image without metadata and without an open file.

    Raises:
        ImageError: If there is no such image, or it is unreadable, truncated, smaller than 2 pixels per side or too
            large; with `.reason` and `.remedy`.
    """
    with opened_image(value, max_pixels) as image:
        # A file opens at its first frame. Decode first, because the conversion ignores a damaged EXIF block.
        image.load()
        rgb = to_rgb(image)
        return rgb.copy() if rgb is value else rgb


def verify_image(value: Any, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check, faster than `open_image`, that it would accept an image."""
    with opened_image(value, max_pixels) as image:
        # An image object belongs to the caller, and draft() would shrink it.
        if image is not value and isinstance(image, JpegImagePlugin.JpegImageFile):
            image.draft(None, _DRAFT_SIZE)
        image.load()


@contextlib.contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads, as many as this process's share of the cores: hashing, decoding and resizing release the interpreter lock."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def in_threads(function: Callable[[Any], T], values: Iterable[Any]) -> list[T | ImageError]:
    """The result of a function for each of several undecoded images, in [`workers`], or its `ImageError`."""

    def or_error(value: Any) -> T | ImageError:
        try:
            return function(value)
        except ImageError as error:
            return error

    with workers() as pool:
        return list(pool.map(or_error, values))
