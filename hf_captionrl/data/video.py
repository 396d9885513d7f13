"""Videos as a few frames: GIF, WebP and PNG animations through Pillow, films through PyAV.

Legend: F frames that are taken, n frames that the video has.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from typing import Any, Literal

import datasets
from PIL import Image

from hf_captionrl.data.images import (
    MAX_PIXELS,
    ImageError,
    check_all_frames,
    open_image,
    opened_image,
    to_rgb,
)
from hf_captionrl.data.video_decoding import sample_film
from hf_captionrl.data.video_files import (
    ANIMATIONS,
    HEAD_BYTES,
    VIDEO_SUFFIXES,
    VideoError,
    frames_on_screen,
    opened_video,
    video_format,
)

__all__ = [
    "VIDEO_FRAMES",
    "frames_of",
    "is_video",
    "open_still",
    "sample_frames",
    "verify_video",
    "video_hash",
]

VIDEO_FRAMES = "video_frames"
"""Column of data sets of videos: the number of frames that are sampled from each video."""

MAX_ANIMATION_PIXELS = 16 * MAX_PIXELS
"""Maximum number of pixels of all frames of an animation (3,000 frames of 800 x 600): a small file may take days to decode."""

_BROWSER_MS = 100  # browsers play a delay of 0 or 10 ms as 100 ms


def is_video(value: Any) -> bool:
    """Whether a value is a video: by its first bytes, or by its name if the file does not exist.

    Args:
        value (`Any`): Path, bytes, or `{"bytes": ..., "path": ...}`; anything else is not a video.

    Returns:
        `bool`: True for GIFs (of one frame too), animated WebP and PNG, MP4, MOV, WebM, Matroska, AVI, MPEG and FLV.
    """
    try:
        with opened_video(value) as (file, _):
            return video_format(file.read(HEAD_BYTES)) is not None
    except ImageError as error:
        path = value.get("path") if isinstance(value, dict) else value
        if error.reason != "image_not_found" or not isinstance(path, str | os.PathLike):
            return False
        return os.path.splitext(os.fsdecode(path))[1].lower() in VIDEO_SUFFIXES | {".gif"}


def sample_frames(
    value: Any,
    num_frames: int,
    *,
    how: Literal["uniform", "ends"] = "uniform",
    max_pixels: int = MAX_PIXELS,
) -> list[Image.Image]:
    r"""Sample frames of a video, evenly over its duration.

    The frames are those on screen at $F$ times of a video of duration $T$. `"uniform"` divides it into $F$ equal parts
    and takes the middle of each, $t_i = T (i + 1/2) / F$. `"ends"` takes the first and the last frame and equidistant
    times between them, $t_i = s_n i / (F - 1)$ with $s_n$ the time at which the last frame appears (and the first frame
    for $F = 1$). If a video has fewer than $F$ frames, frames are repeated in proportion to their duration. GIF delays
    below 20 ms count as 100 ms, as in browsers.

    The video is decoded from the start and only the chosen frames are kept. Rotation metadata of films is not applied.

    Args:
        value (`Any`): Path, bytes, or the `{"bytes": ..., "path": ...}` of an undecoded column. Addresses are never
            fetched.
        num_frames (`int`): F.
        how (`"uniform"` or `"ends"`): Times of the frames.
        max_pixels (`int`): Largest accepted width * height of a frame.

    Returns:
        `list[PIL.Image.Image]`: F decoded RGB frames in temporal order.

    Raises:
        ImageError: If there is no such file, a frame cannot be decoded, or a frame or all frames together are too large;
            `.reason` says which.
        VideoError: If it is not a video, has no frames, or its stream is broken or truncated: a GIF without its end mark, or
            a film with less than 0.9 of the frames or duration in its header.
        ImportError: If it is a film and PyAV is not installed.
        ValueError: If `num_frames` is below 1 or `how` is unknown.
    """
    if num_frames < 1:
        raise ValueError(f"num_frames is {num_frames}, but must be at least 1. Use 1 or more.")
    if how not in ("uniform", "ends"):
        raise ValueError(f"how is {how!r}. Use 'uniform' or 'ends'.")
    with opened_video(value) as (file, name):
        kind = video_format(file.read(HEAD_BYTES))
        file.seek(0)
        if kind is None:
            raise VideoError(
                "video_unreadable",
                f"{name} is not a GIF, animated WebP or PNG, MP4, MOV, WebM, MKV, AVI, MPEG or FLV",
            )
        if kind in ANIMATIONS:
            return _sample_animation(value, file.read() if kind == "gif" else None, name, num_frames, how, max_pixels)
        return sample_film(file, kind, name, num_frames, how, max_pixels)


# --- animations ---------------------------------------------------------------------------------------------------


def _gif_delays(data: bytes, name: str) -> list[int]:
    """Milliseconds of each frame of a GIF, from its blocks: Pillow does not detect a file that ends early."""
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
        ImportError: If it is a film and PyAV is not installed.
        ValueError: If `mode` is neither `"header"` nor `"full"`.
    """
    if mode not in ("header", "full"):
        raise ValueError(f"mode ({mode!r}) must be 'header' or 'full'. Choose one of them.")
    sample_frames(value, 2 if mode == "full" else 1, how="ends", max_pixels=max_pixels)


def video_hash(value: Any) -> str:
    """Content hash of a video file: the same file has the same key under any name.

    Args:
        value (`Any`): As for `sample_frames`.

    Returns:
        `str`: 32 hex digits, BLAKE2b over the bytes.

    Raises:
        ImageError: If there is no such file.
    """
    digest = hashlib.blake2b(b"video\n", digest_size=16)
    with opened_video(value) as (file, _):
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_still(row: Mapping[str, Any]) -> Image.Image:
    """The picture that represents a row: its image, or the middle frame of its video.

    Args:
        row (`Mapping`): With `image`, and with `VIDEO_FRAMES` where that is a video.

    Returns:
        `PIL.Image.Image`: RGB.

    Raises:
        ImageError: As `open_image` or `sample_frames`.
    """
    return sample_frames(row["image"], 1)[0] if row.get(VIDEO_FRAMES) else open_image(row["image"])


def frames_of(dataset: datasets.Dataset) -> int:
    """Number of frames that are sampled from each row.

    Args:
        dataset (`datasets.Dataset`): As `load_captions` gives it.

    Returns:
        `int`: F, or 0 if the rows are images.

    Raises:
        ValueError: If rows differ.
    """
    if VIDEO_FRAMES not in dataset.column_names:
        return 0
    numbers = set(dataset[VIDEO_FRAMES][:])
    if len(numbers) > 1 or not all(isinstance(number, int) and number > 0 for number in numbers):
        raise ValueError(
            f"The column {VIDEO_FRAMES!r} holds {sorted(map(str, numbers))[:5]}; all rows need the same number of frames. "
            "Load the data with num_frames."
        )
    return numbers.pop() if numbers else 0
