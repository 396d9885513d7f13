"""Decodes films with PyAV, from the start; only the requested frames are kept."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, BinaryIO

from PIL import Image

from hf_captionrl.data.images import MAX_PIXELS, ImageError, check_all_frames, check_size
from hf_captionrl.data.video_files import VideoError, frames_on_screen

__all__ = ["sample_film"]

# Films whose last frames are never shown, or whose header counts too many frames, are common and harmless.
_ENOUGH = 0.9
# Pixels of all frames: an hour of 720p. A film of a single colour compresses a thousand times better than others.
_MAX_FILM_PIXELS = 1024 * MAX_PIXELS


def sample_film(file: BinaryIO, kind: str, name: str, num_frames: int, how: str, max_pixels: int) -> list[Image.Image]:
    """Take frames of a film."""
    try:
        import av
    except ImportError:
        raise ImportError(
            f"{name} is a film, and reading it needs PyAV. Install hf-captionrl[video], or convert it to GIF."
        ) from None
    read = "its header"
    try:
        # The format is given: by guessing, FFmpeg would also accept playlists, which contain addresses.
        with av.open(file, mode="r", format=kind) as container:
            if not container.streams.video:
                raise VideoError("video_no_frames", f"{name} has no pictures, only {_streams(container)}")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise VideoError(
                    "video_unreadable", f"{name} has pictures in a codec that this FFmpeg does not support"
                )
            check_size((stream.codec_context.width, stream.codec_context.height), name, max_pixels)
            tick = stream.time_base or Fraction(1, 1)  # seconds
            starts, end = _packet_times(container, stream)
            announced = max(stream.frames, len(starts))
            read = f"{len(starts)} of {announced} frames"
            if not starts:
                raise VideoError(
                    "video_truncated" if announced else "video_no_frames",
                    f"{name} holds no frame ({announced} announced)",
                )
            size = stream.codec_context.width, stream.codec_context.height
            check_all_frames(size, len(starts), name, _MAX_FILM_PIXELS)
            # Matroska stores the duration, not the number of frames; in other formats sound may be longer.
            plays = stream.duration
            if plays is None and container.duration and len(container.streams) == 1:
                plays = int(container.duration / 1_000_000 / tick)
            if len(starts) < _ENOUGH * announced or (plays and end < _ENOUGH * plays):
                seconds = [float((time or 0) * tick) for time in (end, plays)]
                of_time = f", {seconds[0]:.2f} of {seconds[1]:.2f} s" if plays else ""
                raise VideoError("video_truncated", f"{name} ends early: {read}{of_time} are present")
            container.seek(0)
            chosen = frames_on_screen(starts, end, num_frames, how)
            frames: dict[int, Image.Image] = {}
            decoded = 0
            last = None
            for frame in container.decode(stream):
                check_size((frame.width, frame.height), name, max_pixels)  # it may change on the way
                if decoded in chosen:
                    frames[decoded] = frame.to_image().convert("RGB")
                last = frame
                decoded += 1
                read = f"{decoded} of {announced} frames"
                if decoded > chosen[-1]:
                    break
            if last is None or decoded < _ENOUGH * (chosen[-1] + 1):
                raise VideoError("video_truncated", f"{name} decodes to {read}")
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
        raise VideoError(reason, f"{name} does not decode beyond {read} ({_said(error)})") from error


def _packet_times(container: Any, stream: Any) -> tuple[list[int], int]:
    """Start time of each frame and end time of the last one, in units of the stream, without decoding."""
    times: list[int] = []
    lengths: list[int] = []
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            time = packet.pts if packet.pts is not None else packet.dts
            times.append(len(times) if time is None else time)
            lengths.append(packet.duration or 0)
    if not times:
        return [], 0
    times.sort()  # packets come in the order of decoding
    first = times[0]
    starts = [time - first for time in times]
    usual = lengths[-1] or (starts[-1] // max(len(starts) - 1, 1)) or 1
    return starts, starts[-1] + usual


def _streams(container: Any) -> str:
    """For instance "1 stream of audio"."""
    kinds = [stream.type for stream in container.streams]
    number = f"{len(kinds)} stream{'s' if len(kinds) != 1 else ''}"
    return f"{number} of {' and '.join(sorted(set(kinds)))}" if kinds else "an empty container"


def _said(error: BaseException) -> str:
    """The error message of FFmpeg without its number and path."""
    said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return said.splitlines()[0].rstrip(".")
