"""Videos as a few frames: GIFs through Pillow, films through PyAV.

Legend: F frames that are taken, n frames that the video has.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import os
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, BinaryIO

from PIL import Image

from hf_captionrl.data.columns import VIDEO_FRAMES, VIDEO_SUFFIXES
from hf_captionrl.data.images import MAX_PIXELS, ImageError, check_size, media_source, open_image, opened_image
from hf_captionrl.utils.images import to_rgb

# Most pixels of all frames of a GIF (3,000 frames of 800 x 600): a small file may take days to decode.
_MAX_GIF_PIXELS = 16 * MAX_PIXELS
# The same of a film (an hour of 720p): one of a single colour compresses a thousand times better than others.
_MAX_FILM_PIXELS = 1024 * MAX_PIXELS

_HEAD_BYTES = 256  # first bytes of a file that `_video_format` needs
# Still pictures and sound use the same container format as MP4.
_NOT_VIDEO_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"M4A ", b"M4B ", b"crx ")
_BROWSER_MS = 100  # browsers play a delay of 0 or 10 ms as 100 ms
# Films whose last frames are never shown, or whose header counts too many frames, are common and harmless.
_ENOUGH = 0.9


def _video_format(head: bytes) -> str | None:
    """Format by the first bytes: "gif", a demuxer of FFmpeg, or None."""
    signs = {
        "gif": head[:6] in (b"GIF87a", b"GIF89a"),
        "mp4": head[4:8] == b"ftyp" and head[8:12] not in _NOT_VIDEO_BRANDS,
        "avi": head[:4] == b"RIFF" and head[8:12] == b"AVI ",
        "matroska": head[:4] == b"\x1a\x45\xdf\xa3",  # WebM as well
        "mov": head[4:8] in (b"moov", b"mdat", b"wide"),
        "mpeg": head[:4] == b"\x00\x00\x01\xba",
        "flv": head[:4] == b"FLV\x01",
        "mpegts": head[:1] == b"\x47" == head[188:189],
    }
    return next((name for name, matches in signs.items() if matches), None)


@contextlib.contextmanager
def _opened_video(value: Any) -> Iterator[tuple[BinaryIO, str]]:
    """The bytes of a video, and its name in messages."""
    source, name = media_source(value, "video")
    if isinstance(source, Image.Image):
        raise ImageError("video_unreadable", f"a PIL image ({name}) is a picture; a video is a path or bytes")
    with source if isinstance(source, io.BytesIO) else open(source, "rb") as file:
        yield file, name


def _refuse_many_pixels(size: tuple[int, int], count: int, name: str, most: int) -> None:
    """Refuse a video that would take too long to decode; `size` is width and height in pixels."""
    if size[0] * size[1] * count > most:
        detail = f"{name} is {size[0]} x {size[1]} pixels in {count} frames, and all frames may have {most} together"
        raise ImageError("image_too_large", detail)


def _frames_on_screen(starts: list[int], end: int, num_frames: int) -> list[int]:
    """Frames on screen at the F times of `sample_frames`, in integer arithmetic: no frame is missed by rounding; for F = 0 the last."""
    if not num_frames:
        return [len(starts) - 1]
    moments = [(2 * i + 1) * end // (2 * num_frames) for i in range(num_frames)]
    return [max(bisect.bisect_right(starts, moment) - 1, 0) for moment in moments]


def _sample_film(file: BinaryIO, kind: str, name: str, num_frames: int, max_pixels: int) -> list[Image.Image]:
    try:
        import av
    except ImportError:
        raise ImportError(f"{name} is a film, which PyAV reads. Install hf-captionrl[video].") from None
    try:
        # The format is given: by guessing, FFmpeg would also accept playlists, which contain addresses.
        with av.open(file, mode="r", format=kind) as container:
            if not container.streams.video or container.streams.video[0].codec_context is None:
                raise ImageError("video_no_frames", f"{name} has no pictures, or in a codec that FFmpeg lacks here")
            stream = container.streams.video[0]
            size = stream.codec_context.width, stream.codec_context.height
            check_size(size, name, max_pixels)
            starts, end = _packet_times(container, stream)
            announced = max(stream.frames, len(starts))
            if not starts:
                reason = "video_truncated" if announced else "video_no_frames"
                raise ImageError(reason, f"{name} holds no frame ({announced} announced)")
            _refuse_many_pixels(size, len(starts), name, _MAX_FILM_PIXELS)
            # Matroska stores the duration, not the number of frames; in other formats sound may be longer.
            plays = stream.duration
            if plays is None and container.duration and len(container.streams) == 1:
                plays = int(container.duration / 1_000_000 / (stream.time_base or Fraction(1, 1)))
            if len(starts) < _ENOUGH * announced or (plays and end < _ENOUGH * plays):
                detail = f"{name} ends early: {len(starts)} of {announced} frames are present"
                raise ImageError("video_truncated", detail)
            container.seek(0)
            chosen = _frames_on_screen(starts, end, num_frames)
            frames: dict[int, Image.Image] = {}
            last, decoded = None, 0
            for last in container.decode(stream):
                check_size((last.width, last.height), name, max_pixels)  # it may change on the way
                if decoded in chosen:
                    frames[decoded] = last.to_image().convert("RGB")
                decoded += 1
                if decoded > chosen[-1]:
                    break
            if last is None or decoded < _ENOUGH * (chosen[-1] + 1):
                raise ImageError("video_truncated", f"{name} decodes to {decoded} of {announced} frames")
            if decoded <= chosen[-1]:
                frames |= dict.fromkeys(set(chosen) - set(frames), last.to_image().convert("RGB"))
            return [frames[k] for k in chosen]
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("image_too_large", f"{name} does not fit into memory") from None
    except Exception as error:
        # FFmpeg's errors are OSError, ValueError and more, by their number.
        reason = "video_truncated" if isinstance(error, EOFError) or kind in ("mp4", "mov") else "video_unreadable"
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__  # no number, no path
        raise ImageError(reason, f"{name} does not decode ({text.strip().splitlines()[0]})") from error


def _packet_times(container: Any, stream: Any) -> tuple[list[int], int]:
    """Start time of each frame and end time of the last one, in units of the stream, without decoding."""
    times: list[int] = []
    length = 0
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            time = packet.pts if packet.pts is not None else packet.dts
            times.append(len(times) if time is None else time)
            length = packet.duration or 0
    if not times:
        return [], 0
    times.sort()  # packets come in the order of decoding
    starts = [time - times[0] for time in times]
    return starts, starts[-1] + (length or (starts[-1] // max(len(starts) - 1, 1)) or 1)


def is_video(value: Any) -> bool:
    """Whether a value is a video (a GIF of one frame too): by its first bytes, or by its name if the file does not exist."""
    try:
        with _opened_video(value) as (file, _):
            return _video_format(file.read(_HEAD_BYTES)) is not None
    except (ImageError, OSError):
        path: Any = value.get("path") if isinstance(value, dict) else value
        is_path = isinstance(path, str | os.PathLike) and not os.path.exists(path)
        return is_path and os.path.splitext(os.fsdecode(path))[1].lower() in VIDEO_SUFFIXES | {".gif"}


def sample_frames(value: Any, num_frames: int, *, max_pixels: int = MAX_PIXELS) -> list[Image.Image]:
    r"""Sample frames of a video, evenly over its duration.

    The frames are those on screen in the middle of $F$ equal parts of a video of duration $T$, $t_i = T (i + 1/2) / F$. If
    a video has fewer than $F$ frames, frames are repeated in proportion to their duration. GIF delays below 20 ms count as
    100 ms, as in browsers.

    The video is decoded from the start and only the chosen frames are kept. Rotation metadata of films is not applied.

    Args:
        value (`Any`): Path, bytes, or the `{"bytes": ..., "path": ...}` of an undecoded column; never an address.
        num_frames (`int`): F.
        max_pixels (`int`): Largest accepted width * height of a frame.

    Returns:
        `list[PIL.Image.Image]`: F decoded RGB frames in temporal order.

    Raises:
        ImageError: If it is not a video, has no frames, is truncated (a GIF without its end mark, or a film with less than
            0.9 of the frames or duration in its header), or a frame or all frames together are too large; `.reason` says
            which.
        ImportError: If it is a film and PyAV is not installed.
    """
    if num_frames < 1:
        raise ValueError(f"num_frames is {num_frames}. Use 1 or more.")
    return _frames(value, num_frames, max_pixels)


def verify_video(value: Any, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check that `sample_frames` would read a video up to its last frame."""
    _frames(value, 0, max_pixels)


def _frames(value: Any, num_frames: int, max_pixels: int) -> list[Image.Image]:
    with _opened_video(value) as (file, name):
        kind = _video_format(file.read(_HEAD_BYTES))
        file.seek(0)
        if kind is None:
            raise ImageError("video_unreadable", f"{name} is not a GIF, MP4, MOV, WebM, MKV, AVI, MPEG or FLV")
        if kind == "gif":
            return _sample_gif(value, _gif_delays(file.read(), name), name, num_frames, max_pixels)
        return _sample_film(file, kind, name, num_frames, max_pixels)


def _gif_delays(data: bytes, name: str) -> list[int]:
    """Milliseconds of each frame of a GIF, from its blocks: Pillow does not detect a file that ends early."""
    delays: list[int] = []
    delay = 0

    def table(flags: int) -> int:
        return 3 * 2 ** ((flags & 7) + 1) if flags & 128 else 0

    try:
        at = 13 + table(data[10])
        while data[at] != 0x3B:
            is_frame = data[at] == 0x2C
            if is_frame:
                at += 11 + table(data[at + 9])  # descriptor, its colours, size of the first code
            elif data[at] == 0x21:
                if data[at + 1] == 0xF9:
                    delay = 10 * int.from_bytes(data[at + 4 : at + 6], "little")
                at += 2
            else:
                block = f"a block 0x{data[at]:02x} at byte {at}, after {len(delays)} frames"
                raise ImageError("video_unreadable", f"{name} has {block}")
            while data[at]:
                at += data[at] + 1
            at += 1
            if is_frame:
                delays.append(delay if delay >= 20 else _BROWSER_MS)
                delay = 0
    except IndexError:
        size = f"{len(data)} bytes and {len(delays)} whole frames"
        raise ImageError("video_truncated", f"{name} ends after {size}, before its end mark") from None
    return delays


def _sample_gif(value: Any, delays: list[int], name: str, num_frames: int, max_pixels: int) -> list[Image.Image]:
    if not delays:
        raise ImageError("video_no_frames", f"{name} is a GIF without a frame")
    with opened_image(value, max_pixels, "video") as image:
        _refuse_many_pixels(image.size, len(delays), name, _MAX_GIF_PIXELS)
        starts = [0, *itertools.accumulate(delays[:-1])]
        chosen = _frames_on_screen(starts, sum(delays), num_frames)
        frames = {}
        for k in sorted(set(chosen)):
            image.seek(k)  # draws every frame in between: most hold only what changed
            image.load()
            frames[k] = to_rgb(image)
    return [frames[k] for k in chosen]


def open_still(row: Mapping[str, Any]) -> Image.Image:
    """The picture that represents a row, as RGB: its image, or the middle frame of its video (a row with `VIDEO_FRAMES`)."""
    return sample_frames(row["image"], 1)[0] if row.get(VIDEO_FRAMES) else open_image(row["image"])
