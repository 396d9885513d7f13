"""Files that are read or written: rows that name files elsewhere, decompression bombs, and secrets in outputs."""

import contextlib
import json
import os
import resource
import struct
import time
import zipfile
import zlib

import datasets
import pyarrow.parquet as pq
import pytest

from hf_captionrl.data import ImageError, check_captions, load_captions, open_image, sample_frames, verify_video
from hf_captionrl.data.columns import undecoded
from hf_captionrl.data.images import paths_without_bytes, refuse_outside
from hf_captionrl.metrics.columns import COLUMNS
from hf_captionrl.metrics.table import write_results
from hf_captionrl.scenes import load_scenes
from tests.data.photos import make_folder, png
from tests.data.test_images import png_header
from tests.hub.conftest import has
from tests.hub.folders import make_results
from tests.tiny import tiny_captioner
from tests.trainers.one_step import train

ALL = (1, 0, 0)


@pytest.fixture
def world(tmp_path):
    """The data, a private picture beside it, and links from one to the other."""
    folder = make_folder(tmp_path / "data", 3)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "me.png").write_bytes(png(9))
    (tmp_path / "data-of-others").mkdir()  # its name begins alike
    (tmp_path / "data-of-others" / "me.png").write_bytes(png(9))
    (folder / "link.png").symlink_to(tmp_path / "private" / "me.png")
    (folder / "folder").symlink_to(tmp_path / "private")
    (folder / "inner.png").symlink_to(folder / "1.png")
    (folder / "sub").mkdir()
    (folder / "sub" / "back").symlink_to(folder)
    return tmp_path


OUTSIDE = {
    "absolute": "{world}/private/me.png",
    "parent": "../private/me.png",
    "absolute and parent": "{world}/data/../private/me.png",
    "a name that begins alike": "../data-of-others/me.png",
    "link": "link.png",
    "through a link and back": "folder/../private/me.png",
    "link to the data and out": "sub/back/../private/me.png",
    "not there": "/nowhere/at/all.png",
    "two slashes": "//{world}/private/me.png",
}
INSIDE = {
    "plain": "1.png",
    "absolute": "{world}/data/1.png",
    "dots": "./sub/../1.png",
    "link": "inner.png",
    "link of a folder": "sub/back/1.png",
    "not there": "sub/none.png",
}


def lines(path, name):
    row = {"file_name": name, "captions": ["a caption"]}
    good = {"file_name": "0.png", "captions": ["another"]}
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")


def as_folder(world, name):
    lines(world / "data" / "metadata.jsonl", name)
    return {"dataset_name": "imagefolder", "data_dir": world / "data"}


def as_lines(world, name):
    lines(world / "rows.jsonl", name)
    return {"dataset_name": str(world / "rows.jsonl"), "image_root": world / "data"}


def as_karpathy(world, name):
    folder, _, file = name.rpartition("/")
    folder = f"{folder}/" if folder else ""
    bad = {"filepath": folder, "filename": file, "cocoid": 7, "sentences": [{"raw": "a caption"}]}
    good = {"filepath": "", "filename": "0.png", "cocoid": 8, "sentences": [{"raw": "another"}]}
    (world / "k.json").write_text(json.dumps({"images": [bad, good]}))
    return {"dataset_name": str(world / "k.json"), "image_root": world / "data"}


def as_parquet_of_images(world, name):
    # The type says "image"; what it holds is a name, which datasets would open wherever it leads.
    path = name if os.path.isabs(name) or "://" in name else str(world / "data" / name)
    rows = [{"bytes": png(0), "path": "/anything"}, {"bytes": None, "path": path}]
    kinds = datasets.Features(
        {"image": datasets.Image(decode=False), "captions": datasets.List(datasets.Value("string"))}
    )
    table = datasets.Dataset.from_dict({"image": rows, "captions": [["another"], ["a caption"]]}, features=kinds)
    pq.write_table(table.data.table, world / "data" / "i.parquet")  # to_parquet would open the files
    return {"dataset_name": str(world / "data" / "i.parquet")}


SOURCES = [as_lines, as_karpathy, as_parquet_of_images]
FROM_EVERY_SOURCE = [(source, "parent") for source in SOURCES] + [(as_parquet_of_images, "absolute")]


@pytest.mark.parametrize(("source", "kind"), [(as_folder, kind) for kind in OUTSIDE] + FROM_EVERY_SOURCE)
def test_outside_is_refused(source, kind, world):
    given = source(world, OUTSIDE[kind].format(world=world))
    with pytest.raises(ValueError, match=r"row [01] names the file .* not below image_root.*Set image_root"):
        load_captions(**given, split_fractions=ALL)


@pytest.mark.parametrize("source", [as_folder, as_parquet_of_images])
@pytest.mark.parametrize("name", INSIDE.values(), ids=INSIDE)
def test_inside_is_not(source, name, world):
    found = load_captions(**source(world, name.format(world=world)), split_fractions=ALL)
    assert len(found) == 2
    if "none" not in name:
        assert open_image(undecoded(found)[1]["image"]).tobytes() == open_image(png(1)).tobytes()


def test_another_root_is_the_remedy(world):
    as_folder(world, "../private/me.png")
    # Behind the root itself there may be a link.
    (world / "whole").symlink_to(world)
    with pytest.raises(ValueError, match="not below"):
        load_captions("imagefolder", data_dir=world / "whole" / "data", split_fractions=ALL)
    lines(world / "rows.jsonl", "private/me.png")
    found = load_captions(str(world / "rows.jsonl"), image_root=world / "whole", split_fractions=ALL)
    assert open_image(undecoded(found)[1]["image"]).size == (12, 10)


ADDRESSES = [
    "http://a.example/1.png",
    "https://127.0.0.1:9/1.png",
    "hf://datasets/o/d/1.png",
    "file:///etc/hosts",
    "zip://1.png::{world}/private/a.zip",
    "zip://../../private/me.png::{world}/data/a.zip",
    "simplecache::http://a.example/1.png",
]


@pytest.mark.parametrize("source", [as_folder, as_parquet_of_images])
@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses_and_members_of_archives_are_never_opened(source, name, world):
    for folder in ("private", "data"):
        with zipfile.ZipFile(world / folder / "a.zip", "w") as archive:
            archive.writestr("1.png", png(1))
            archive.writestr("../../private/me.png", png(1))
    name = name.format(world=world)
    given = source(world, name)
    found = load_captions(**given, split_fractions=ALL)
    # Looking at the row fetches nothing, though datasets.Image would.
    assert found[1]["image"] == {"bytes": None, "path": name}
    if name.startswith("zip://1.png"):
        assert datasets.Image().decode_example(found[1]["image"]).size == (12, 10)  # the control
    good, entries = check_captions(found, max_bad_fraction=0.5)
    assert [entry.reason for entry in entries] in (["image_remote"], ["image_not_found"])
    assert len(good) == 1


def test_without_a_folder_of_the_data_no_file_is_named():
    with pytest.raises(ValueError, match="not below image_root"):
        refuse_outside(["a.png"], None, "a data set of the Hub")
    refuse_outside([None, "", "http://a.example/x.png"], None, "a data set of the Hub")
    refuse_outside([os.path.join(datasets.config.HF_DATASETS_CACHE, "a.png")], None, "a data set of the Hub")
    assert paths_without_bytes(datasets.Dataset.from_dict({"image": [1, 2]}).data.column("image")).to_pylist() == []


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


TOO_LARGE = {"png": png_header(100_000, 100_000), "gif": gif(65_000, 1)}


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.filterwarnings("ignore")
def test_a_header_that_promises_gigabytes(name):
    with pytest.raises(ImageError) as caught:
        open_image(TOO_LARGE[name])
    assert caught.value.reason == "image_too_large"


ZEROS = zlib.compress(bytes(200 << 20), 9)  # 200 MiB in 200 kB

TEXTS = {
    "zTXt": chunk(b"zTXt", b"Comment\0\0" + ZEROS),
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
    assert len(sample_frames(gif(32, 3_000), 4)) == 4  # many frames of a usual size are not a bomb
    # As an image it is its first frame, and that may be that large.
    assert open_image(gif(300, 50_000)).size == (300, 300)


@pytest.mark.filterwarnings("ignore")
def test_bombs_among_the_rows_are_left_out_and_said(tmp_path):
    folder = make_folder(tmp_path / "data", 6)
    (folder / "4.png").write_bytes(TOO_LARGE["png"])
    (folder / "5.png").write_bytes(png_with(TEXTS["zTXt"])[:-30])
    found = load_captions("imagefolder", data_dir=folder, split_fractions=(1, 0, 0))
    good, entries = check_captions(found, max_bad_fraction=0.5)
    assert len(good) == 4
    assert {entry.image_id for entry in entries} == {"4.png", "5.png"}


TOKEN, KEY, PASSWORD = "hf_" + "Q" * 34, "sk-very-secret-key", "a-password-of-somebody"
SECRETS = [secret.encode() for secret in (TOKEN, KEY, PASSWORD)]


def leaks(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and has(path.read_bytes(), SECRETS)]


def test_a_run_leaves_none(tmp_path, monkeypatch, capfd):
    for name, value in {"HF_TOKEN": TOKEN, "OPENAI_API_KEY": KEY, "WANDB_API_KEY": PASSWORD}.items():
        monkeypatch.setenv(name, value)
    rows = load_scenes(num_train=4, num_validation=0, num_test=0)["train"]
    settings = {"save_strategy": "steps", "per_device_train_batch_size": 2, "hub_token": TOKEN}
    trainer = train(tmp_path / "run", rows, captioner=tiny_captioner("blip"), **settings)
    trainer.save_model()
    config = {"model": {"api_key": KEY, "password": PASSWORD, "first_token": "mle"}, "training": trainer.args}
    write_results(tmp_path / "run", make_results()["rows"], columns=COLUMNS, seed=0, config=config)
    text = (tmp_path / "run" / "results.json").read_text()
    assert json.loads(text)["config"]["model"]["first_token"] == "mle"
    # A Trainer's file of arguments is a pickle that holds what it was given; it is not kept.
    assert leaks(tmp_path) == []
    said = capfd.readouterr()
    assert not has((said.out + said.err).encode(), SECRETS)
    (tmp_path / "a.json").write_text(f'{{"x": "{KEY}"}}')  # the control
    assert leaks(tmp_path) == [str(tmp_path / "a.json")]
