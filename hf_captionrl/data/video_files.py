"""Video files: formats, faults and their remedies, and the frames on screen at given times."""

from __future__ import annotations

import bisect
import contextlib
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar

from PIL import Image

from hf_captionrl.data.images import ImageError, media_source

__all__ = ["VIDEO_REMEDIES", "VIDEO_SUFFIXES", "VideoError", "frames_on_screen", "opened_video", "video_format"]

VIDEO_REMEDIES: dict[str, str] = {
    "video_unreadable": "re-export the video as GIF or MP4, or remove the row",
    "video_truncated": "download or copy the file again, or remove the row",
    "video_no_frames": "replace the video by one with pictures, or remove the row",
}
"""Faults of videos in addition to those of images, and the remedy for each."""

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".ts", ".flv"})
"""Suffixes of films; `.gif` is not included, because a data set of images may contain GIFs."""

ANIMATIONS = ("gif", "webp", "png")
"""Formats that Pillow reads; FFmpeg reads the others."""
HEAD_BYTES = 65536
"""First bytes of a file that `video_format` needs."""
# Still pictures and sound use the same container format as MP4.
_NOT_VIDEO_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"M4A ", b"M4B ", b"crx ")


class VideoError(ImageError):
    """A video that cannot be used.

    Args:
        reason (`str`): What is wrong, a key of `VIDEO_REMEDIES`.
        detail (`str`): The value and the rule it broke.
    """

    remedies: ClassVar[dict[str, str]] = VIDEO_REMEDIES


def video_format(head: bytes) -> str | None:
    """Format by the first bytes: one of `ANIMATIONS`, a demuxer of FFmpeg, or None."""
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
def opened_video(value: Any) -> Iterator[tuple[BinaryIO, str]]:
    """The bytes of a video, and its name in messages."""
    try:
        source, name = media_source(value, "video")
    except ImageError as error:
        if error.reason != "image_unreadable":
            raise
        # The remedy for images does not apply; an empty file is left by a broken download.
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


def frames_on_screen(starts: list[int], end: int, num_frames: int, how: str) -> list[int]:
    """Frames on screen at the F times of `sample_frames`, in integer arithmetic: no frame is missed by rounding."""
    if how == "uniform":
        moments = [(2 * i + 1) * end // (2 * num_frames) for i in range(num_frames)]
    else:
        moments = [starts[-1] * i // max(num_frames - 1, 1) for i in range(num_frames)]
    return [max(bisect.bisect_right(starts, moment) - 1, 0) for moment in moments]
