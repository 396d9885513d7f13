"""`captionrl pixels`: rows of the shards equal `cached_pixels`, and training reads them without opening an image."""

import json
import os
import shutil
import threading

import datasets
import pytest
import torch
from PIL import Image

from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli import main
from hf_captionrl.data import cached_pixels
from hf_captionrl.data import features as pixel_cache
from hf_captionrl.data.columns import replace_column, undecoded
from hf_captionrl.data.features import source_keys
from hf_captionrl.data.images import decode_image
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.parts import read_shards
from tests.data.photos import png
from tests.tiny import tiny_captioner
from tests.tiny_families import tiny_family
from tests.trainers.one_step import PLAIN_SGD, weights

IMAGES = 10


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blip")
    tiny_captioner("blip").save_pretrained(folder)
    return folder


def pixels(model, folder, *more):
    few = ["--max_images", str(IMAGES), "--batch_size", "2", "--rows_per_shard", "4"]
    places = ["--output", str(folder / "out"), "--cache_dir", str(folder / "cache")]
    return main(["pixels", "--model", str(model), *few, *places, *more])


def refuse(*args, **kwargs):
    raise AssertionError("an image was opened")


@pytest.mark.parametrize(("form", "processes"), [("uint8", "1"), ("jpeg", "2")])
def test_shards_and_filled_cache_equal_cached_pixels_row_by_row(
    scenes, blip, tmp_path, capsys, monkeypatch, form, processes
):
    parts = load_captioner(blip).prepared_pixels
    expected = cached_pixels(scenes, parts, form=form, directory=tmp_path / "other", progress=False)
    assert pixels(blip, tmp_path, "--form", form, "--processes", processes, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["shards"], summary["cached"]) == (IMAGES, 3, IMAGES)
    rows = list(read_shards(tmp_path / "out"))
    assert [row["image_id"] for row in rows] == scenes["image_id"][:]
    assert [row["key"] for row in rows] == source_keys(scenes, tmp_path / "keys")
    assert [row["pixels"] for row in rows] == [expected.rows[number].tobytes() for number in range(IMAGES)]

    monkeypatch.setattr(pixel_cache, "decode_image", refuse)
    found = cached_pixels(scenes, parts, form=form, directory=tmp_path / "cache", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(AssertionError, match="an image was opened"):
        cached_pixels(scenes, parts, form=form, directory=tmp_path / "cold", progress=False)
    # The same command prepares nothing; with an empty cache it fills it again.
    assert pixels(blip, tmp_path, "--form", form, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["resumed"], again["cached"]) == (IMAGES, 0)
    shutil.rmtree(tmp_path / "cache")
    assert pixels(blip, tmp_path, "--form", form, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cached"] == IMAGES


@pytest.mark.parametrize("form", ["uint8", "jpeg"])
def test_images_of_a_warm_cache_are_not_opened(scenes, blip, tmp_path, capsys, monkeypatch, form):
    parts = load_captioner(blip).prepared_pixels
    cached_pixels(scenes.select(range(6)), parts, form=form, directory=tmp_path / "cache", progress=False)
    opened = []
    monkeypatch.setattr(pixel_cache, "decode_image", lambda value: opened.append(value) or decode_image(value))
    assert pixels(blip, tmp_path, "--form", form, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["cached"], len(opened)) == (IMAGES - 6, IMAGES - 6)
    shutil.copytree(tmp_path / "out", tmp_path / "before")
    monkeypatch.setattr(Image, "open", refuse)
    assert pixels(blip, tmp_path, "--form", form, "--overwrite") == 0
    assert len(opened) == IMAGES - 6
    assert list(read_shards(tmp_path / "out")) == list(read_shards(tmp_path / "before"))


def test_a_changed_image_is_prepared_again(blip, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png(number, size=(40, 40)))
    source = ["--dataset", "imagefolder", "--data_dir", str(folder), "--split", "all"]
    assert pixels(blip, tmp_path, *source) == 0
    before = list(read_shards(tmp_path / "out"))
    (folder / "3.png").write_bytes(png(9, size=(40, 40)))
    opened = []
    monkeypatch.setattr(pixel_cache, "decode_image", lambda value: opened.append(value) or decode_image(value))
    assert pixels(blip, tmp_path, *source, "--overwrite") == 0
    assert len(opened) == 1
    after = list(read_shards(tmp_path / "out"))
    assert after[:3] == before[:3]
    assert after[3] != before[3]
    parts = load_captioner(blip).prepared_pixels
    assert after[3]["pixels"] == parts.prepare(decode_image(folder / "3.png")).numpy().tobytes()


def test_training_from_the_filled_cache_opens_no_image_and_is_equal_to_the_last_bit(
    scenes, blip, tmp_path, monkeypatch
):
    def outcome(folder, **settings):
        settings = {**PLAIN_SGD, "freeze_vision_tower": False, "max_steps": 2, "report_to": "none", **settings}
        config = SmileConfig(str(tmp_path / folder), per_device_train_batch_size=4, **settings)
        trainer = SmileTrainer(load_captioner(blip), config, train_dataset=scenes)
        return trainer.train().training_loss, weights(trainer)

    plain = outcome("plain")
    assert pixels(blip, tmp_path) == 0
    monkeypatch.setattr(Image, "open", refuse)
    cached = outcome("cached", cache_pixels="uint8", feature_cache_dir=str(tmp_path / "cache"))
    assert cached[0] == plain[0]
    assert all(torch.equal(value, plain[1][name]) for name, value in cached[1].items())
    with pytest.raises(Exception, match="an image was opened"):
        outcome("again")


def test_unreadable_image_is_listed_and_other_settings_are_refused(scenes, blip, tmp_path, capsys):
    images = undecoded(scenes)["image"][:]
    images[2] = {"bytes": b"no image", "path": None}
    broken = replace_column(scenes.select_columns(["image_id", "captions"]), "image", images, datasets.Image())
    broken.to_parquet(tmp_path / "images.parquet")
    source = ["--dataset", str(tmp_path / "images.parquet"), "--max_bad_fraction", "0.2"]
    assert pixels(blip, tmp_path, *source, "--no-fill_cache") == 0
    assert "pixels of 9 of 10 images in 3 shards; 1 cannot be read" in capsys.readouterr().out
    rows = list(read_shards(tmp_path / "out"))
    assert [row["pixels"] is None for row in rows] == [number == 2 for number in range(IMAGES)]
    assert [row["key"] is None for row in rows] == [number == 2 for number in range(IMAGES)]
    assert rows[2]["reason"] == "image_unreadable"
    assert not (tmp_path / "cache").exists()
    assert pixels(blip, tmp_path, *source, "--form", "jpeg") == 2
    assert "written with form 'uint8', but form is now 'jpeg'" in capsys.readouterr().err
    (tmp_path / "out" / "part-00001-of-00003.parquet").unlink()
    other = tmp_path / "blip"
    shutil.copytree(blip, other)
    path = next(other.glob("*processor_config.json"))
    path.write_text(path.read_text().replace('"resample": 3', '"resample": 0'))
    shutil.move(blip, tmp_path / "before")
    shutil.move(other, blip)
    try:
        assert pixels(blip, tmp_path, *source) == 2
    finally:
        shutil.move(blip, other)
        shutil.move(tmp_path / "before", blip)
    assert "written with processor" in capsys.readouterr().err


def test_family_whose_processor_cannot_be_split_is_refused(tmp_path, capsys):
    model, processor = tiny_family("pix2struct")
    load_captioner(model, processor=processor).save_pretrained(tmp_path / "model")
    assert pixels(tmp_path / "model", tmp_path) == 2
    assert "normalised by the mean of their image. Leave out cache_pixels" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("part-*"))


def test_images_of_one_process_are_prepared_in_several_threads(scenes, blip, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(IMAGES)), raising=False)
    together = threading.Barrier(IMAGES)

    def waiting(value):
        together.wait(timeout=20)  # raises unless a thread per image arrives, whatever the batch size
        return decode_image(value)

    monkeypatch.setattr(pixel_cache, "decode_image", waiting)
    assert pixels(blip, tmp_path, "--rows_per_shard", str(IMAGES)) == 0
    monkeypatch.undo()
    parts = load_captioner(blip).prepared_pixels
    rows = read_shards(tmp_path / "out")
    for row, scene in zip(rows, undecoded(scenes)["image"][:], strict=True):
        assert row["pixels"] == parts.prepare(decode_image(scene)).numpy().tobytes()
