"""Training from what commands wrote into shards: pixels and captions are mapped from disk, and no image is decoded."""

import numpy as np
import pytest
import torch
from datasets.table import MemoryMappedTable
from PIL import Image

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.apps.experiments.data import load_data
from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli import main
from hf_captionrl.data import features as pixel_cache
from hf_captionrl.data import images as decoding
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.parts import read_shards, shard_files
from tests.tiny import tiny_captioner
from tests.trainers.one_step import PLAIN_SGD, weights


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Images in Parquet files, a captioner, and shards of its pixels and of captions."""
    folder = tmp_path_factory.mktemp("work")
    scenes = load_scenes(num_train=0, num_validation=0, num_test=14)["test"]
    (folder / "images").mkdir()
    parts = {"train-00000-of-00002": (0, 5), "train-00001-of-00002": (5, 10), "validation": (10, 12), "test": (12, 14)}
    for name, rows in parts.items():
        scenes.select(range(*rows)).to_parquet(str(folder / "images" / f"{name}.parquet"))
    tiny_captioner("blip").save_pretrained(folder / "model")
    data = ["--dataset", str(folder / "images"), "--batch_size", "2", "--rows_per_shard", "4", "--processes", "2"]
    places = ["--output", str(folder / "pixels"), "--cache_dir", str(folder / "cache")]
    assert main(["pixels", "--model", str(folder / "model"), "--split", "all", *data, *places]) == 0
    few = ["--num_beams", "1", "--max_new_tokens", "6", "--split", "train", "--output", str(folder / "captions")]
    assert main(["caption", "scenes:blip-mle", *data, *few]) == 0
    return folder


def trained(work, folder, **settings):
    """Loss and weights after two steps on the captions of the shards, and the trainer."""
    arguments = DataArguments(dataset_name=str(work / "images"), train_captions=str(work / "captions"))
    splits = load_data(arguments, output_dir=folder, cache_dir=work / "cache")
    settings = {**PLAIN_SGD, "freeze_vision_tower": False, "max_steps": 2, "report_to": "none", **settings}
    config = SmileConfig(str(folder), per_device_train_batch_size=4, feature_cache_dir=str(work / "cache"), **settings)
    trainer = SmileTrainer(load_captioner(work / "model"), config, train_dataset=splits["train"])
    return trainer.train().training_loss, weights(trainer), trainer


def test_no_image_is_decoded_and_everything_is_mapped(work, tmp_path, monkeypatch):
    plain = trained(work, tmp_path / "plain")

    def refuse(*args, **kwargs):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image, "open", refuse)
    monkeypatch.setattr(decoding, "decode_jpeg", refuse)
    monkeypatch.setattr(pixel_cache, "decode_image", refuse)
    found = trained(work, tmp_path / "cached", cache_pixels="uint8", dataloader_num_workers=1)
    assert found[0] == plain[0]
    assert all(torch.equal(value, plain[1][name]) for name, value in found[1].items())
    rows = found[2].train_dataset
    assert isinstance(rows._pixels.rows.mapped, np.memmap)
    tables = [table for row in rows._rows.data.blocks for table in row]
    images = [table for table in tables if "image" in table.column_names]
    assert all(isinstance(table, MemoryMappedTable) for table in images)
    written = {row["image_id"]: row["captions"] for row in read_shards(work / "captions")}
    assert {row["image_id"]: row["captions"] for row in rows._rows} == written
    assert len(written) == 10


def test_the_check_opens_what_was_never_prepared(work, tmp_path, monkeypatch):
    opened, before = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: opened.append(args) or before(*args, **kwargs))
    arguments = DataArguments(dataset_name=str(work / "images"))
    load_data(arguments, output_dir=tmp_path, cache_dir=work / "cache")
    assert not opened
    load_data(arguments, output_dir=tmp_path, cache_dir=tmp_path / "empty")
    assert len(opened) == 14


def test_shards_of_an_unfinished_folder_are_refused(work, tmp_path):
    assert [path.name for path in shard_files(work / "captions")] == [
        f"part-0000{n}-of-00003.parquet" for n in range(3)
    ]
    (tmp_path / "captions").mkdir()
    for path in (work / "captions").iterdir():
        (tmp_path / "captions" / path.name).write_bytes(path.read_bytes())
    other = tmp_path / "captions" / "part-00002-of-00003.parquet"
    other.write_bytes((tmp_path / "captions" / "part-00000-of-00003.parquet").read_bytes())
    arguments = DataArguments(dataset_name=str(work / "images"), train_captions=str(tmp_path / "captions"))
    with pytest.raises(ValueError, match=r"part-00002.* has 4 rows, but manifest.json says 2"):
        load_data(arguments, output_dir=tmp_path)
    arguments.train_captions = str(work / "images")
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json. Use a folder that --processes"):
        load_data(arguments, output_dir=tmp_path)
