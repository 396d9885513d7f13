"""Small files that would be large, or slow: an error in a moment, before anything is decoded."""

import contextlib
import io
import resource
import struct
import time
import zlib

import pytest
from PIL import Image

from hf_captionrl.data import ImageError, check_captions, load_captions, open_image, sample_frames, verify_video
from hf_captionrl.data.video import MAX_ANIMATION_PIXELS
from tests.data.films import film
from tests.data.photos import make_folder, png
from tests.data.test_images import png_header

MEGABYTES = 300
SECONDS = 2.0


@pytest.fixture(autouse=True)
def small():
    """Nothing here may take long or much memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - started < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_with(*chunks):
    """A small picture with more chunks before its pixels."""
    data = png(0)
    at = data.index(b"IDAT") - 4
    return data[:at] + b"".join(chunks) + data[at:]


def gif(side, frames):
    """A large canvas, and frames of a pixel each: 26 bytes a frame."""
    frame = b"\x21\xf9\x04\x04\x0a\x00\x00\x00\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HH", side, side) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff" + frame * frames + b"\x3b"


def bmp(width, height):
    return (
        b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 1000, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
        + b"\0" * 99
    )


def tiff(width, height):
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 100}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)


TOO_LARGE = {
    "png": png_header(100_000, 100_000),
    "gif": gif(65_000, 1),
    "bmp": bmp(60_000, 60_000),
    "tiff": tiff(90_000, 90_000),
    "ppm": b"P6 90000 90000 255\n" + b"\0" * 99,
    "tga": struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 60_000, 60_000, 24, 0) + b"\0" * 99,
}


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.filterwarnings("ignore")
def test_a_header_that_promises_gigabytes(name):
    with pytest.raises(ImageError) as caught:
        open_image(TOO_LARGE[name])
    assert caught.value.reason == "image_too_large"


ZEROS = zlib.compress(bytes(200 << 20), 9)  # 200 MiB in 200 kB

TEXTS = {
    "zTXt": chunk(b"zTXt", b"Comment\0\0" + ZEROS),
    "iTXt": chunk(b"iTXt", b"Comment\0\x01\0\0\0" + ZEROS),
    "iCCP": chunk(b"iCCP", b"profile\0\0" + ZEROS),
    "many": b"".join(chunk(b"zTXt", b"C%d\0\0" % n + zlib.compress(bytes(1 << 20))) for n in range(200)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_unpack_to_hundreds_of_megabytes(name):
    with contextlib.suppress(ImageError):  # whichever the decoder likes: refused, or the text left out
        assert open_image(png_with(TEXTS[name])).size == (12, 10)


def test_an_animation_of_a_large_canvas_and_many_small_frames():
    bomb = gif(9_000, 50_000)
    assert len(bomb) < 1_300_000
    for take in (lambda: sample_frames(bomb, 4), lambda: verify_video(bomb)):
        with pytest.raises(ImageError, match="all frames may have") as caught:
            take()
        assert caught.value.reason == "image_too_large"
    many = 9_000**2 * 50_000
    assert many / MAX_ANIMATION_PIXELS > 1000
    # As an image it is its first frame, and that may be that large.
    assert open_image(gif(300, 50_000)).size == (300, 300)


def test_many_frames_of_a_usual_size_are_not_a_bomb():
    assert len(sample_frames(gif(32, 3_000), 4)) == 4


def test_an_animation_that_promises_frames_it_has_not():
    pages = [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(3)]
    buffer = io.BytesIO()
    pages[0].save(buffer, "PNG", save_all=True, append_images=pages[1:])
    data = buffer.getvalue()
    at = data.index(b"acTL") - 4
    data = data[:at] + chunk(b"acTL", struct.pack(">II", 2**30, 0)) + data[at + 20 :]
    with pytest.raises(ImageError):
        sample_frames(data, 2)


def test_a_film_of_more_pixels_than_allowed(monkeypatch):
    data = film(10)
    assert len(sample_frames(data, 2)) == 2
    monkeypatch.setattr("hf_captionrl.data.video._MAX_FILM_PIXELS", 64 * 48 * 10 - 1)
    with pytest.raises(ImageError, match="64 x 48 pixels in 10 frames"):
        sample_frames(data, 2)


@pytest.mark.filterwarnings("ignore")
def test_bombs_among_the_rows_are_left_out_and_said(tmp_path):
    folder = make_folder(tmp_path / "data", 6)
    (folder / "4.png").write_bytes(TOO_LARGE["png"])
    (folder / "5.png").write_bytes(png_with(TEXTS["zTXt"])[:-30])
    found = load_captions("imagefolder", data_dir=folder, split_fractions=(1, 0, 0))
    good, report = check_captions(found, max_bad_fraction=0.5)
    assert len(good) == 4
    assert {entry.image_id for entry in report.entries} == {"4.png", "5.png"}
