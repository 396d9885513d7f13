"""Any image file gives RGB pixels or one `ImageError` with the reason."""

import io
import json
import os
import random
import struct
import sys
import types
import zlib

import evaluate
import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.captioners.language_model_clients import image_url
from hf_captionrl.data import ImageError, load_captions, open_image
from hf_captionrl.data.images import IMAGE_REMEDIES, image_formats, is_address, verify_image
from hf_captionrl.retrieval import image_hash, load_scorer
from hf_captionrl.trainers.trl_grpo import _ROW, _with_rgb
from tests.captioners.models import captioner_of
from tests.data.photos import make_folder, png
from tests.tolerances import close, within

RED, WHITE = (255, 0, 0), (255, 255, 255)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # a portrait photo: rotate by 90 degrees


def picture(size=(40, 30), seed=0):
    """Smooth noise, which JPEG nearly preserves, with different rows."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8), "RGB")
    return small.resize(size, Image.Resampling.BICUBIC)


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width, height):
    """A PNG of 57 bytes with a large size in its header and no pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IEND", b"")


def reason_of(value, **options):
    with pytest.raises(ImageError) as caught:
        open_image(value, **options)
    assert caught.value.remedy == IMAGE_REMEDIES[caught.value.reason]
    assert caught.value.remedy in str(caught.value)
    with pytest.raises(ImageError) as verified:
        verify_image(value, **options)
    assert verified.value.reason == caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_common_formats_from_bytes_path_dict_and_object(tmp_path, kind):
    image = picture()
    data = encode(image, kind)
    path = tmp_path / "picture"  # without a suffix the content decides
    path.write_bytes(data)
    dicts = [{"bytes": None, "path": str(path)}, {"bytes": data, "path": "elsewhere.jpg"}]
    values = [data, bytearray(data), str(path), path, *dicts, Image.open(path)]
    opened = [open_image(value) for value in values]
    for value in values[:-1]:
        verify_image(value)
    assert {(o.mode, o.size, type(o)) for o in opened} == {("RGB", (40, 30), Image.Image)}
    assert len({o.tobytes() for o in opened}) == 1
    error = np.abs(np.asarray(opened[0], float) - np.asarray(image, float)).mean()
    assert error < (12 if kind == "JPEG" else 1e-9)


def test_every_mode_becomes_rgb():
    grey = picture().convert("L")
    modes = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"]
    for mode in modes:
        via = {"La": "LA", "PA": "P", "RGBa": "RGBA", "HSV": "RGB"}.get(mode)
        if mode == "LAB":
            image = Image.new("LAB", (40, 30), (128, 128, 128))
        elif mode == "PA":
            image = Image.new("PA", (40, 30))
        else:
            image = (picture().convert(via) if via else picture()).convert(mode)
        out = open_image(image)
        assert (out.mode, out.size) == ("RGB", (40, 30)), mode
        if mode in {"L", "LA", "La", "I", "F"}:  # opaque pixels keep their values
            assert np.abs(np.asarray(out)[..., 0].astype(int) - np.asarray(grey)).max() <= 1, mode
    red = np.asarray(open_image(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG")))
    assert np.abs(red.astype(int) - RED).max() < 12


def test_image_of_the_caller_is_not_changed_or_shared():
    image = Image.open(io.BytesIO(encode(picture((400, 300)), "JPEG")))
    verify_image(image)
    assert image.size == (400, 300)  # not shrunk
    loaded = picture()
    before = loaded.tobytes()
    out = open_image(loaded)
    out.putpixel((0, 0), (1, 2, 3))
    assert loaded.tobytes() == before


def test_transparency_becomes_white():
    image = Image.new("RGBA", (4, 2), (*RED, 255))
    image.paste((0, 0, 0, 0), (0, 0, 2, 2))  # black where invisible, so dropping alpha would show it
    out = open_image(encode(image, "PNG"))
    assert out.getpixel((0, 0)) == WHITE
    assert out.getpixel((3, 0)) == RED
    half = open_image(Image.new("RGBA", (2, 2), (0, 0, 0, 127))).getpixel((0, 0))
    assert half[0] == within(128, 1)
    # A transparent colour of a palette, and a transparent grey.
    image = Image.new("P", (4, 2), 0)
    image.putpalette([0, 0, 0, *RED])
    image.paste(1, (2, 0, 4, 2))
    for kind in ("PNG", "GIF"):
        out = open_image(encode(image, kind, transparency=0))
        assert (out.getpixel((0, 0)), out.getpixel((3, 1))) == (WHITE, RED)
    grey = Image.new("L", (4, 2), 7)
    assert open_image(encode(grey, "PNG", transparency=7)).getpixel((0, 0)) == WHITE


def test_16_bit_is_scaled_not_clipped():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    want = np.round(ramp / 257.0)
    for kind in ("PNG", "TIFF"):
        out = np.asarray(open_image(encode(Image.fromarray(ramp), kind)))
        assert np.abs(out[..., 0] - want).max() <= 1, kind
    # Pillow's convert("L") would clip such an image to two values nearly everywhere.
    assert len(np.unique(out)) > 50


def test_floats_of_any_range():
    unit = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    for scale in (1.0, 255.0, 65535.0, 1e9):
        out = np.asarray(open_image(Image.fromarray(unit * scale)))[..., 0]
        assert np.abs(out - np.round(unit * 255)).max() <= 1, scale
    broken = unit.copy()
    broken[0] = [np.nan, np.inf, -np.inf, -5.0]
    assert np.asarray(open_image(Image.fromarray(broken)))[0, :, 0].tolist() == [0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore")
def test_exif_orientation_is_applied_once_and_damaged_exif_ignored():
    image = Image.new("RGB", (20, 10), WHITE)
    image.paste(RED, (0, 0, 10, 10))
    out = open_image(encode(image, "PNG", exif=TURNED))
    assert out.size == (10, 20)
    assert (out.getpixel((5, 2)), out.getpixel((5, 17))) == (RED, WHITE)
    assert open_image(out).tobytes() == out.tobytes()
    data = encode(picture(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")
    assert open_image(data).size == (40, 30)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_images_are_refused(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "RGB")
    data = encode(noise, kind)
    for share in (0.5, 0.9, 0.97):
        reason = reason_of(data[: int(len(data) * share)])
        assert reason in {"image_truncated", "image_unreadable"}
        if kind in {"JPEG", "PNG", "BMP"}:
            assert reason == "image_truncated"


@pytest.mark.filterwarnings("ignore")
def test_small_and_huge():
    for size in ((1, 500), (500, 1)):
        assert reason_of(encode(Image.new("RGB", size), "PNG")) == "image_too_small"
    assert open_image(encode(Image.new("RGB", (2, 2)), "PNG")).size == (2, 2)
    assert reason_of(picture((40, 30)), max_pixels=1199) == "image_too_large"
    assert open_image(picture((40, 30)), max_pixels=1200).size == (40, 30)
    for side in (10_000, 14_000, 60_000, 2**31 - 1):  # over our limit, over Pillow's, over its double, over memory
        assert reason_of(png_header(side, side)) == "image_too_large", side
    assert reason_of(png_header(12_000, 12_000), max_pixels=10**9) == "image_too_large"  # Pillow's limit also applies


def test_not_an_image_at_all(tmp_path):
    (tmp_path / "page.jpg").write_text("<html>404 Not Found</html>")
    (tmp_path / "empty.jpg").touch()
    os.mkfifo(tmp_path / "pipe.jpg")  # to open it would hang
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"  # Pillow would pass it to Ghostscript
    for value in (postscript, tmp_path / "page.jpg", tmp_path / "empty.jpg", b"", b"\x00" * 1000, 17):
        assert reason_of(value) == "image_unreadable"
    for value in (tmp_path / "nowhere.jpg", str(tmp_path), "a\x00b.jpg", tmp_path / "pipe.jpg"):
        assert reason_of(value) == "image_not_found"
    for value in (None, "", {"bytes": None, "path": None}):
        assert reason_of(value) == "image_missing"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_raise_only_image_errors(kind):
    rng = random.Random(kind)
    data = encode(picture((24, 24)), kind)
    outcomes = set()
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(rng.choice([1, 3, 30])):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            assert open_image(bytes(broken), max_pixels=10**6).mode == "RGB"
            outcomes.add("opened")
        except ImageError as error:
            outcomes.add(error.reason)
    assert len(outcomes) > 1, outcomes


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("http://a.example/1.png", True),
        ("file:///etc/hosts", True),
        ("simplecache::http://a.example/1.png", True),
        ("x://../1.png", False),  # a single letter is a drive
        ("../ab://1.png", False),
    ],
)
def test_paths_that_are_not_addresses_are_files(path, expected):
    assert is_address(path) is expected
    with pytest.raises(ImageError) as error:
        open_image(path)
    assert error.value.reason == ("image_remote" if expected else "image_not_found")


def test_a_file_that_looks_like_an_address_stays_below_the_folder(tmp_path):
    (tmp_path / "secret.png").write_bytes(png(0))
    folder = make_folder(tmp_path / "data", 1)
    row = {"file_name": "x://../../../secret.png", "caption": "a"}
    (folder / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"row 0 names the file .*secret.png', which is not below image_root"):
        load_captions("imagefolder", data_dir=folder)


def test_heic_is_registered_where_pillow_heif_is_installed(monkeypatch):
    calls: list[str] = []
    fake = types.SimpleNamespace(register_heif_opener=lambda: calls.append("registered"))
    monkeypatch.setitem(sys.modules, "pillow_heif", fake)
    image_formats.cache_clear()
    image_formats()
    assert calls == ["registered"]


# --- Wherever an image enters, it is the picture of its file ---------------------------------------------------------


def deep(mode):
    """A grey ramp of 16 bits."""
    ramp = np.linspace(300, 65535, 40 * 30).astype(np.uint16).reshape(30, 40)
    return Image.fromarray(ramp if mode == "I;16" else ramp.astype(np.int32))


def clear(mode):
    """A picture whose left half is transparent."""
    image = picture()
    image.putalpha(Image.fromarray(np.repeat([0, 255], 20).astype(np.uint8)[None].repeat(30, 0)))
    if mode != "P":
        return image.convert(mode)
    image = image.convert("RGB").quantize(8)
    image.info["transparency"] = 0
    return image


def turned(orientation):
    image, exif = picture(), Image.Exif()
    exif[0x0112] = orientation
    image.info["exif"] = exif.tobytes()
    return image


UNUSUAL = {  # an image in memory, the format of its file, what is saved with it, and whether `convert("RGB")` gives the same
    "I;16": (lambda: deep("I;16"), "PNG", {}, False),
    "I": (lambda: deep("I"), "PNG", {}, False),
    **{f"EXIF {n}": (lambda n=n: turned(n), "PNG", {"exif": turned(n).getexif()}, n == 1) for n in range(1, 9)},
    **{mode: (lambda mode=mode: clear(mode), "PNG", {}, False) for mode in ("RGBA", "LA", "P")},
    "CMYK": (lambda: picture().convert("CMYK"), "TIFF", {}, True),
    "1": (lambda: picture().convert("1"), "PNG", {}, True),
}


@pytest.fixture(scope="module")
def every_entry():
    """Functions from an image to what a model reads or returns for it, by name."""
    scorer = load_scorer("scenes:clip-reward")
    found = {
        "image_hash": lambda image: torch.tensor(list(bytes.fromhex(image_hash(image)))),
        "scorer": lambda image: scorer.image_features([image]),
        "endpoint": lambda image: torch.tensor(list(image_url(image).encode())),
        "GRPO": lambda image: torch.from_numpy(np.array(_with_rgb([{"image": image, _ROW: 0}])[0]["image"])),
    }
    for name in ("blip", "llava", "smolvlm"):
        captioner = captioner_of(name)
        found[name] = lambda image, captioner=captioner: captioner.encode_images([image])["pixel_values"]
        if name == "blip":
            found["prepared pixels"] = lambda image, captioner=captioner: captioner.prepare_pixels([image])
    metric = evaluate.load("clip_score")
    found["evaluate"] = lambda image: metric.compute(predictions=["a red car"], references=[image], scorer=scorer)
    return found


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_image_in_memory_is_the_picture_of_its_file_at_every_entry(tmp_path, every_entry, name):
    make, kind, saved, is_plain = UNUSUAL[name]
    path = tmp_path / f"picture.{kind.lower()}"
    make().save(path, **saved)
    expected = open_image(path)
    assert (expected.size == make().size) == (name not in SIDEWAYS)
    for entry, read in every_entry.items():
        of_file = read(expected)
        for image in (make(), Image.open(path)):
            assert same(read(image), of_file), (entry, name)
        # The negative control: what Pillow's own conversion shows is another picture.
        assert same(read(Image.fromarray(np.asarray(make().convert("RGB")))), of_file) == is_plain, (entry, name)


SIDEWAYS = {f"EXIF {n}" for n in range(5, 9)}


def same(one, other):
    if isinstance(one, dict):
        return one["clip_score"] == close(other["clip_score"])
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("name", ["I;16", "RGBA", "LA", "1"])
def test_arrays_are_the_picture_of_their_file(tmp_path, every_entry, name):
    image = UNUSUAL[name][0]()
    image.save(tmp_path / "picture.png")
    read = every_entry["evaluate"]
    assert same(read(np.asarray(image)), read(str(tmp_path / "picture.png")))
