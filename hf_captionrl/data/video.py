"""Videos as a few frames: GIF, WebP and PNG animations through Pillow, films through PyAV.

Legend: F frames that are taken, n frames that the video has.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, ClassVar, Literal

import datasets
from PIL import Image

from hf_captionrl.data.images import (
    MAX_PIXELS,
    ImageError,
    check_all_frames,
    media_source,
    open_image,
    opened_image,
    to_rgb,
)

__all__ = [
    "VIDEO_FRAMES",
    "VIDEO_REMEDIES",
    "VideoError",
    "frames_of",
    "frames_on_screen",
    "is_video",
    "open_still",
    "sample_frames",
    "verify_video",
    "video_hash",
]

VIDEO_FRAMES = "video_frames"
"""Column that a data set of videos has beside `image`: how many frames of each video are looked at."""

VIDEO_REMEDIES: dict[str, str] = {
    "video_unreadable": "re-export the video as GIF or MP4, or remove the row",
    "video_truncated": "download or copy the file again, or remove the row",
    "video_no_frames": "replace the video by one with pictures, or remove the row",
}
"""What can be wrong with a video beside what can be wrong with an image, and the remedy of each."""

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".ts", ".flv"})
"""File names of films; `.gif` is not among them, since a data set of images may hold GIFs as well."""

MAX_ANIMATION_PIXELS = 16 * MAX_PIXELS
"""Most pixels of all frames of an animation together (3,000 frames of 800 x 600): a small file may draw for days."""

_ANIMATIONS = ("gif", "webp", "png")
_HEAD = 65536
# Still pictures and sound live in the same box format as MP4.
_NOT_VIDEO_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"M4A ", b"M4B ", b"crx ")
_BROWSER_MS = 100  # what every browser makes of a delay of 0 or 10 ms


class VideoError(ImageError):
    """A video that cannot be used.

    Args:
        reason (`str`): What is wrong, a key of `VIDEO_REMEDIES`.
        detail (`str`): The value and the rule it broke.
    """

    remedies: ClassVar[dict[str, str]] = VIDEO_REMEDIES


# --- what is a video ----------------------------------------------------------------------------------------------


def _kind(head: bytes) -> str | None:
    """Format by the first bytes: one of `_ANIMATIONS`, a demuxer of FFmpeg, or None."""
    found = None
    if head[:6] in (b"GIF87a", b"GIF89a"):
        found = "gif"
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        found = "webp" if head[12:16] == b"VP8X" and head[20:21] and head[20] & 2 else None
    elif head[:8] == b"\x89PNG\r\n\x1a\n":
        found = "png" if b"acTL" in head.partition(b"IDAT")[0] else None
    elif head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        found = "avi"
    elif head[:4] == b"\x1a\x45\xdf\xa3":
        found = "matroska"  # WebM as well
    elif head[4:8] == b"ftyp":
        found = None if head[8:12] in _NOT_VIDEO_BRANDS else "mp4"
    elif head[4:8] in (b"moov", b"mdat", b"wide"):
        found = "mov"
    elif head[:4] == b"\x00\x00\x01\xba":
        found = "mpeg"
    elif head[:4] == b"FLV\x01":
        found = "flv"
    elif head[:1] == b"\x47" == head[188:189]:
        found = "mpegts"
    return found


@contextlib.contextmanager
def _file(value: Any) -> Iterator[tuple[BinaryIO, str]]:
    """The bytes of a video, and how to call it in a message."""
    try:
        source, name = media_source(value, "video")
    except ImageError as error:
        if error.reason != "image_unreadable":
            raise
        # Nothing to make a JPEG of: an empty file is what a broken download leaves.
        empty = error.detail.endswith("0 bytes")
        raise VideoError("video_truncated" if empty else "video_unreadable", error.detail) from None
    if isinstance(source, Image.Image):
        raise VideoError("video_unreadable", f"a PIL image ({name}) is a picture; a video is a path or bytes")
    if isinstance(source, io.BytesIO):
        yield source, name
        return
    try:
        file = open(source, "rb")  # noqa: SIM115
    except OSError as error:
        raise VideoError("video_unreadable", f"{name} cannot be opened ({error.strerror})") from None
    with file:
        yield file, name


def is_video(value: Any) -> bool:
    """Whether something is a video: by its first bytes, and by its name where there is no such file yet.

    Args:
        value (`Any`): Path, bytes, or `{"bytes": ..., "path": ...}`; anything else is none.

    Returns:
        `bool`: True for GIFs (of one frame too), animated WebP and PNG, MP4, MOV, WebM, Matroska, AVI, MPEG and FLV.
    """
    try:
        with _file(value) as (file, _):
            return _kind(file.read(_HEAD)) is not None
    except ImageError as error:
        path = value.get("path") if isinstance(value, dict) else value
        if error.reason != "image_not_found" or not isinstance(path, str | os.PathLike):
            return False
        return os.path.splitext(os.fsdecode(path))[1].lower() in VIDEO_SUFFIXES | {".gif"}


# --- which frames -------------------------------------------------------------------------------------------------


def frames_on_screen(starts: list[int], end: int, num_frames: int, how: str) -> list[int]:
    """Frames on screen at the F moments of `sample_frames`; integers throughout: no frame is missed by a rounding."""
    if how == "uniform":
        moments = [(2 * i + 1) * end // (2 * num_frames) for i in range(num_frames)]
    else:
        moments = [starts[-1] * i // max(num_frames - 1, 1) for i in range(num_frames)]
    return [max(bisect.bisect_right(starts, moment) - 1, 0) for moment in moments]


def sample_frames(
    value: Any,
    num_frames: int,
    *,
    how: Literal["uniform", "ends"] = "uniform",
    max_pixels: int = MAX_PIXELS,
) -> list[Image.Image]:
    r"""Take frames of a video, evenly over the time that it plays.

    A video that plays from 0 to $T$ is looked at in $F$ moments, and the frame on screen at each is taken:
    `"uniform"` cuts it into $F$ equal parts and looks at the middle of each, $t_i = T (i + 1/2) / F$; `"ends"` takes
    first and last frame and what lies between, $t_i = s_n i / (F - 1)$ with $s_n$ the time at which the last frame
    comes up (and the first frame for $F = 1$). A video of fewer frames than asked for gives some of them several times,
    so that each counts in a mean as long as it is seen. Delays of a GIF below 20 ms count 100 ms, as browsers play them.

    The video is decoded from the start and only the chosen frames are kept. Rotation marks of films are not applied.

    Args:
        value (`Any`): Path, bytes, or the `{"bytes": ..., "path": ...}` of an undecoded column. Addresses are never
            fetched.
        num_frames (`int`): F.
        how (`"uniform"` or `"ends"`): Which moments.
        max_pixels (`int`): Largest accepted width * height of a frame.

    Returns:
        `list[PIL.Image.Image]`: F decoded RGB frames in the order of time.

    Raises:
        ImageError: If there is no such file, a frame does not decode or is too large, or all of them together are;
            `.reason` says which.
        VideoError: If it is no video, has no frames, or its stream is broken or truncated: a GIF without its end mark, a
            film of which less than nine tenths of what its header says are there.
        ImportError: If it is a film and PyAV is not there.
        ValueError: If `num_frames` is below 1 or `how` is unknown.
    """
    if num_frames < 1:
        raise ValueError(f"num_frames is {num_frames}, and a video is seen by at least one. Use 1 or more.")
    if how not in ("uniform", "ends"):
        raise ValueError(f"how is {how!r}. Use 'uniform' or 'ends'.")
    with _file(value) as (file, name):
        kind = _kind(file.read(_HEAD))
        file.seek(0)
        if kind is None:
            raise VideoError(
                "video_unreadable",
                f"{name} begins like none of GIF, animated WebP or PNG, MP4, MOV, WebM, MKV, AVI, MPEG, FLV",
            )
        if kind in _ANIMATIONS:
            return _sample_animation(value, file.read() if kind == "gif" else None, name, num_frames, how, max_pixels)
        from hf_captionrl.data.films import sample_film  # which builds on this module

        return sample_film(file, kind, name, num_frames, how, max_pixels)


# --- animations ---------------------------------------------------------------------------------------------------


def _gif_delays(data: bytes, name: str) -> list[int]:
    """Milliseconds of each frame of a GIF, by its blocks: Pillow takes a file that ends early for a shorter one."""
    delays: list[int] = []
    delay = 0

    def table(flags: int) -> int:
        return 3 * 2 ** ((flags & 7) + 1) if flags & 128 else 0

    try:
        at = 13 + table(data[10])
        while data[at] != 0x3B:
            if data[at] == 0x21:
                if data[at + 1] == 0xF9:
                    delay = 10 * int.from_bytes(data[at + 4 : at + 6], "little")
                at += 2
                whole = False
            elif data[at] == 0x2C:
                at += 11 + table(data[at + 9])  # descriptor, its colours, size of the first code
                whole = True
            else:
                raise VideoError(
                    "video_unreadable", f"{name} has a block 0x{data[at]:02x} at byte {at}, after {len(delays)} frames"
                )
            while data[at]:
                at += data[at] + 1
            at += 1
            if whole:
                delays.append(delay if delay >= 20 else _BROWSER_MS)
                delay = 0
    except IndexError:
        raise VideoError(
            "video_truncated",
            f"{name} ends after {len(data)} bytes and {len(delays)} whole frames, before its end mark",
        ) from None
    return delays


def _sample_animation(
    value: Any, gif: bytes | None, name: str, num_frames: int, how: str, max_pixels: int
) -> list[Image.Image]:
    delays = None if gif is None else _gif_delays(gif, name)
    if delays == []:
        raise VideoError("video_no_frames", f"{name} is a GIF without a frame")
    with opened_image(value, max_pixels, "video") as image:
        if delays is None:
            delays = []
            check_all_frames(image.size, getattr(image, "n_frames", 1), name, MAX_ANIMATION_PIXELS)
            for k in range(getattr(image, "n_frames", 1)):
                image.seek(k)
                image.load()  # WebP knows the time of a frame only then
                delays.append(int(image.info.get("duration") or _BROWSER_MS))
        check_all_frames(image.size, len(delays), name, MAX_ANIMATION_PIXELS)
        starts = [0, *itertools.accumulate(delays[:-1])]
        chosen = frames_on_screen(starts, sum(delays), num_frames, how)
        frames = {}
        for k in sorted(set(chosen)):
            image.seek(k)  # draws every frame in between: most hold only what changed
            image.load()
            frames[k] = to_rgb(image)
    return [frames[k] for k in chosen]


# --- uses ---------------------------------------------------------------------------------------------------------


def verify_video(value: Any, *, mode: Literal["header", "full"] = "full", max_pixels: int = MAX_PIXELS) -> None:
    """Check that `sample_frames` would read a video.

    Args:
        value (`Any`): As for `sample_frames`.
        mode (`"header"` or `"full"`): Read up to the first frame, or decode to the last.
        max_pixels (`int`): As for `sample_frames`.

    Raises:
        ImageError: As `sample_frames` would.
        ImportError: If it is a film and PyAV is not there.
        ValueError: If `mode` is neither `"header"` nor `"full"`.
    """
    if mode not in ("header", "full"):
        raise ValueError(f"mode ({mode!r}) must be 'header' or 'full'. Choose one of them.")
    sample_frames(value, 2 if mode == "full" else 1, how="ends", max_pixels=max_pixels)


def video_hash(value: Any) -> str:
    """Content hash of a video's file: the same file has one key, whatever it is called.

    Args:
        value (`Any`): As for `sample_frames`.

    Returns:
        `str`: 32 hex digits, BLAKE2b over the bytes.

    Raises:
        ImageError: If there is no such file.
    """
    digest = hashlib.blake2b(b"video\n", digest_size=16)
    with _file(value) as (file, _):
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_still(row: Mapping[str, Any]) -> Image.Image:
    """A picture to show of a row: its image, or the frame in the middle of its video.

    Args:
        row (`Mapping`): With `image`, and with `VIDEO_FRAMES` where that is a video.

    Returns:
        `PIL.Image.Image`: RGB.

    Raises:
        ImageError: As `open_image` or `sample_frames`.
    """
    return sample_frames(row["image"], 1)[0] if row.get(VIDEO_FRAMES) else open_image(row["image"])


def frames_of(dataset: datasets.Dataset) -> int:
    """How many frames of each row are looked at.

    Args:
        dataset (`datasets.Dataset`): As `load_captions` gives it.

    Returns:
        `int`: F, or 0 where the rows are images.

    Raises:
        ValueError: If rows differ.
    """
    if VIDEO_FRAMES not in dataset.column_names:
        return 0
    numbers = set(dataset[VIDEO_FRAMES][:])
    if len(numbers) > 1 or not all(isinstance(number, int) and number > 0 for number in numbers):
        raise ValueError(
            f"The column {VIDEO_FRAMES!r} holds {sorted(map(str, numbers))[:5]}; all rows need one number of frames. "
            "Load the data with num_frames."
        )
    return numbers.pop() if numbers else 0
