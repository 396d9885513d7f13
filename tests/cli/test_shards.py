"""`captionrl caption --processes N` and `--engine`: Parquet parts with the captions of one process."""

import json
import pickle
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from datasets.table import MemoryMappedTable
from PIL import Image

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.apps.experiments.data import load_data
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import pipeline
from hf_captionrl.cli import main
from hf_captionrl.cli.caption import CaptionOptions, CaptionParts
from hf_captionrl.data import open_image
from hf_captionrl.data.columns import replace_column, undecoded
from hf_captionrl.data.options import ids_digest, load_split
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.parts import part_files, read_parts
from tests.tiny import tiny_captioner
from tests.trainers.one_step import PLAIN_SGD, weights

SAMPLES = ["--do_sample", "--num_return_sequences", "2", "--batch_size", "2", "--max_new_tokens", "10"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Parquet file of 9 images, of which the sixth cannot be read."""
    rows = undecoded(load_scenes(num_train=0, num_validation=0)["test"].select(range(9)))
    images = rows["image"][:]
    images[5] = {"bytes": b"no image", "path": None}
    path = tmp_path_factory.mktemp("data") / "images.parquet"
    replace_column(rows.select_columns(["image_id", "captions"]), "image", images, datasets.Image()).to_parquet(path)
    return ["--dataset", str(path), "--max_bad_fraction", "0.5"]


def caption(output, *more):
    return main(["caption", "scenes:blip-mle", "--output", str(output), *SAMPLES, *more])


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])  # each imports everything
def test_shards_equal_the_file_of_one_process_row_by_row(source, tmp_path, capsys, processes):
    engine = ["--processes", processes, "--rows_per_shard", "4"]
    assert caption(tmp_path / "one.jsonl", *source) == 0
    assert caption(tmp_path / "two", *source, *engine, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["images"], summary["of"], summary["written"], summary["shards"]) == (8, 9, 8, 3)
    one, two = read_caption_file(tmp_path / "one.jsonl"), read_caption_file(tmp_path / "two")
    assert list(two.captions.items()) == list(one.captions.items())
    assert len(one.captions) == 8
    rows = list(read_parts(tmp_path / "two"))
    assert [row["image_id"] for row in rows] == [f"test-{number:05d}" for number in range(9)]
    assert [row["reason"] is None for row in rows] == [number != 5 for number in range(9)]
    listed = (tmp_path / "one.quarantine.jsonl").read_text()
    assert (tmp_path / "two/quarantine.jsonl").read_text() == listed
    # The same command has nothing to do, and other settings are refused.
    assert caption(tmp_path / "two", *source, *engine) == 0
    assert "9 of them from an earlier run" in capsys.readouterr().out
    assert caption(tmp_path / "two", *source, *engine, "--top_k", "3") == 2
    assert "written with top_k 0, but top_k is now 3" in capsys.readouterr().err


def test_other_commands_read_shards_that_are_finished(tmp_path, capsys):
    few = ["--dataset", "scenes", "--max_images", "6"]
    assert caption(tmp_path / "shards", *few, "--processes", "1", "--rows_per_shard", "4") == 0
    capsys.readouterr()
    command = ["evaluate", "--captions", str(tmp_path / "shards"), *few, *"--scorer none --suite sle --json".split()]
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["num_images"] == 6
    part_files(tmp_path / "shards")[1].unlink()
    assert main(command) == 2
    assert "is unfinished" in capsys.readouterr().err


def test_parts_can_be_sent_to_another_process(source):
    options = CaptionOptions(model="scenes:blip-mle", dataset=source[1], batch_size=2, max_new_tokens=10, max_images=3)
    options = replace(options, num_beams=1)
    split = load_split(options, quarantine_path=None)
    make_part = pickle.loads(pickle.dumps(CaptionParts(options, ids_digest(split.dataset))))
    make_part.load()
    texts = [row["captions"][0] for row in make_part(range(1, 3)).to_pylist()]
    images = [open_image(row["image"]) for row in split.dataset.select(range(1, 3))]
    assert texts == pipeline("scenes:blip-mle")(images, **options.decoding)
    other = CaptionParts(replace(options, max_images=2), ids_digest(split.dataset))
    with pytest.raises(ValueError, match="has other images in this process"):
        other.load()


def refuse(*args, **kwargs):
    raise AssertionError("an image was opened")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Images in Parquet files, a captioner, and shards of captions."""
    folder = tmp_path_factory.mktemp("work")
    scenes = load_scenes(num_train=0, num_validation=0, num_test=14)["test"]
    (folder / "images").mkdir()
    parts = {"train-00000-of-00002": (0, 5), "train-00001-of-00002": (5, 10), "validation": (10, 12), "test": (12, 14)}
    for name, rows in parts.items():
        scenes.select(range(*rows)).to_parquet(str(folder / "images" / f"{name}.parquet"))
    tiny_captioner("blip").save_pretrained(folder / "model")
    data = ["--dataset", str(folder / "images"), "--batch_size", "2", "--rows_per_shard", "4", "--processes", "1"]
    few = ["--num_beams", "1", "--max_new_tokens", "6", "--split", "train", "--output", str(folder / "captions")]
    assert main(["caption", "scenes:blip-mle", *data, *few]) == 0
    return folder


def data_of(work):
    arguments = DataArguments(dataset_name=str(work / "images"), train_captions=str(work / "captions"))
    return load_data(arguments, output_dir=work)


def trained(work, folder, splits=None, **settings):
    """Loss and weights after two steps on the captions of the shards, and the trainer."""
    splits = splits or data_of(work)
    settings = {**PLAIN_SGD, "freeze_vision_tower": False, "max_steps": 2, "report_to": "none", **settings}
    config = SmileConfig(str(folder), per_device_train_batch_size=4, feature_cache_dir=str(work / "cache"), **settings)
    trainer = SmileTrainer(load_captioner(work / "model"), config, train_dataset=splits["train"])
    return trainer.train().training_loss, weights(trainer), trainer


def test_no_image_is_decoded_and_everything_is_mapped(work, tmp_path, monkeypatch):
    plain = trained(work, tmp_path / "plain")
    trained(work, tmp_path / "first", cache_pixels=True)
    splits = data_of(work)
    monkeypatch.setattr(Image, "open", refuse)
    found = trained(work, tmp_path / "cached", splits, cache_pixels=True, dataloader_num_workers=1)
    assert found[0] == plain[0]
    assert all(torch.equal(value, plain[1][name]) for name, value in found[1].items())
    rows = found[2].train_dataset
    assert isinstance(rows._pixels.mapped, np.memmap)
    tables = [table for row in rows._rows.data.blocks for table in row]
    images = [table for table in tables if "image" in table.column_names]
    assert all(isinstance(table, MemoryMappedTable) for table in images)
    written = {row["image_id"]: row["captions"] for row in read_parts(work / "captions")}
    assert {row["image_id"]: row["captions"] for row in rows._rows} == written
    assert len(written) == 10
    # The negative control: without the cache, images are opened.
    with pytest.raises(Exception, match="an image was opened"):
        trained(work, tmp_path / "again")
