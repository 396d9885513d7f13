"""torchvision's decoder gives the pixels of `open_image`, or leaves the image to it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.data import ImageError, open_image
from hf_captionrl.data import images as decoding
from hf_captionrl.data.images import decode_image
from tests.data.photos import png
from tests.data.sample_photo import photograph


def encoded(image, kind="JPEG", **settings):
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


PHOTO = photograph(1, side=161)
PLAIN = {
    "4:2:0": encoded(PHOTO, quality=75, subsampling=2),
    "4:2:2": encoded(PHOTO, quality=90, subsampling=1),
    "4:4:4": encoded(PHOTO, quality=98, subsampling=0),
    "progressive": encoded(PHOTO, progressive=True),
    "upright": encoded(PHOTO, exif=Image.Exif()),
    "one pixel wider": encoded(PHOTO.resize((33, 17))),
}
OTHERS = {
    "turned": encoded(PHOTO, exif=turned()),
    "grey": encoded(PHOTO.convert("L")),
    "CMYK": encoded(PHOTO.convert("CMYK")),
    "PNG": png(3),
    "bytes behind the end": PLAIN["4:2:0"] + b"more",
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_pixels_are_those_of_open_image(tmp_path, monkeypatch, name):
    data = (PLAIN | OTHERS)[name]
    expected = torch.from_numpy(np.array(open_image(data))).permute(2, 0, 1)
    (tmp_path / "image").write_bytes(data)
    if name in PLAIN:
        monkeypatch.setattr(decoding, "open_image", None)  # not called
    else:
        monkeypatch.setattr(decoding, "decode_jpeg", None)
    for value in (data, {"bytes": data, "path": None}, str(tmp_path / "image")):
        found = decode_image(value)
        assert found.dtype == torch.uint8
        assert torch.equal(found, expected)


def test_an_image_object_is_converted():
    found = decode_image(PHOTO.convert("L"))
    assert torch.equal(found[0], torch.from_numpy(np.array(PHOTO.convert("L"))))


def outcome(decode, data):
    """The pixels as lists, or the reason why there are none."""
    try:
        return decode(data).tolist()
    except ImageError as error:
        return error.reason


@pytest.mark.parametrize("keep", [20, 300, 2000, -2])
@pytest.mark.parametrize("end", [b"", b"\xff\xd9"])
def test_damaged_jpegs_fail_as_in_open_image(keep, end):
    data = PLAIN["4:4:4"][:keep] + end
    assert outcome(decode_image, data) == outcome(
        lambda value: torch.from_numpy(np.array(open_image(value))).permute(2, 0, 1), data
    )


def test_a_jpeg_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError) as error:
        decode_image(PLAIN["4:2:0"])
    assert error.value.reason == "image_too_large"
