"""Small videos of known frames for the tests."""

import io
import tempfile
from fractions import Fraction

import numpy as np
from PIL import Image

COLOURS = [
    (220, 30, 30),
    (30, 200, 40),
    (40, 50, 220),
    (230, 220, 40),
    (30, 210, 220),
    (210, 40, 200),
    (240, 240, 240),
]
SIZE = (32, 24)


def plain(colour, size=SIZE):
    return Image.new("RGB", size, colour)


def gif(frames, durations, **options):
    """A GIF as bytes; durations in milliseconds."""
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, **options)
    return buffer.getvalue()


def film(number, *, kind="mp4", codec="mpeg4", times=None, index_first=False):
    """A film as bytes: frame k has colour k (modulo 7) and appears at `times[k]` eighths of a second."""
    import av

    # FFmpeg reads the file again to move its index to the start.
    buffer = tempfile.NamedTemporaryFile(suffix=".mp4") if index_first else io.BytesIO()  # noqa: SIM115
    target = buffer.name if index_first else buffer
    with av.open(target, "w", format=kind, options={"movflags": "faststart"} if index_first else {}) as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 8)
        for k in range(number):
            pixels = np.asarray(plain(COLOURS[k % len(COLOURS)], (64, 48)))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = k if times is None else times[k]
            frame.time_base = Fraction(1, 8)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    if index_first:
        with buffer:
            return buffer.read()
    return buffer.getvalue()


def colour_of(image):
    """Index of the colour of `COLOURS` that is nearest to the centre of a picture."""
    pixel = np.asarray(image.getpixel((image.width // 2, image.height // 2)), float)
    return int(np.argmin([np.abs(pixel - colour).sum() for colour in np.asarray(COLOURS, float)]))


def on_screen(durations, moment):
    """The frame on screen at a time, by a loop over the frames."""
    passed = 0
    for number, duration in enumerate(durations):
        passed += duration
        if moment < passed:
            return number
    return len(durations) - 1


def middles(durations, number):
    total = sum(durations)
    return [on_screen(durations, total * (2 * i + 1) / (2 * number)) for i in range(number)]


def colours_of(frames):
    return [colour_of(frame) for frame in frames]


KINDS = {
    "mp4": {},
    "mov": {"kind": "mov"},
    "avi": {"kind": "avi"},
    "mkv": {"kind": "matroska"},
    "webm": {"kind": "webm", "codec": "libvpx"},
}


def write_gifs(folder, count, first=0):
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(first, first + count):
        frames = [plain(COLOURS[(n + k) % 7]) for k in range(3)]
        (folder / f"t{n}.gif").write_bytes(gif(frames, [50, 50, 100 + 10 * n]))


def make_tgif(folder, count=6):
    """TGIF's layout: the second to last video is validation, the last test; the first has two captions."""
    write_gifs(folder / "gifs", count)
    address = [f"https://media.example/{n:x}/t{n}.gif" for n in range(count)]
    rows = [f"{address[n]}\ta {n} moves" for n in range(count)] + [f"{address[0]}\tit is a 0"]
    (folder / "tgif-v1.0.tsv").write_text("\n".join(rows) + "\n")
    (folder / "splits").mkdir()
    parts = {"train": address[:-2], "val": address[-2:-1], "test": address[-1:]}
    for name, lines in parts.items():
        (folder / "splits" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder
