"""`captionrl features`: rows of the shards, and the filled cache."""

import json
import os
import threading

import datasets
import pytest
import torch

from hf_captionrl.captioners import pipeline as caption_generation
from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.data.columns import replace_column, undecoded
from hf_captionrl.data.features import source_keys
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from hf_captionrl.utils.parts import read_shards
from tests.tolerances import close

SCORER = ["--scorer", "scenes:clip-reward", "--batch_size", "4", "--rows_per_shard", "4"]


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(10))


@pytest.fixture(scope="module")
def scorer():
    return load_scorer(model_path("scenes:clip-reward"))


def features(output, *more):
    cache = ["--cache_dir", str(output.parent / "cache")]
    return main(["features", "--max_images", "10", "--output", str(output), *SCORER, *cache, *more])


def test_features_of_images_and_captions_and_filled_cache(scenes, scorer, tmp_path, capsys, monkeypatch):
    assert features(tmp_path / "out", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["shards"], summary["cached"]) == (10, 3, 10)
    rows = list(read_shards(tmp_path / "out"))
    assert [row["image_id"] for row in rows] == scenes["image_id"][:]
    assert [row["key"] for row in rows] == source_keys(scenes, tmp_path / "keys")
    for row, scene in zip(rows, scenes, strict=True):
        image = open_image(scene["image"])
        assert row["image"] == close(scorer.image_features([image])[0].tolist(), dtype="float32", magnitude=1)
        total = torch.zeros(len(row["text"]))
        for caption in scene["captions"]:
            total += scorer.text_features([caption])[0]
        assert row["text"] == close((total / len(scene["captions"])).tolist(), dtype="float32", magnitude=1)
    # Training, evaluation and `captionrl bags` find them.
    monkeypatch.setattr(scorer, "image_features", None)
    cached = caption_generation.scorer_features(scorer, scenes, cache_dir=tmp_path / "cache")
    assert cached.tolist() == [row["image"] for row in rows]
    monkeypatch.undo()
    # Nothing is left to do, and the manifest remembers the scorer.
    assert features(tmp_path / "out", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["resumed"], again["cached"]) == (10, 0)
    made_by = json.loads((tmp_path / "out/manifest.json").read_text())["made_by"]
    assert made_by == {"scorer": scorer.signature}
    assert features(tmp_path / "out", "--features", "image") == 2
    assert "written with features 'multimodal', but features is now 'image'" in capsys.readouterr().err


def test_cached_images_are_neither_opened_nor_encoded(scenes, tmp_path, capsys, monkeypatch):
    assert features(tmp_path / "first", "--max_images", "6") == 0
    opened = []

    def counted(value):
        opened.append(value)
        return open_image(value)

    monkeypatch.setattr("hf_captionrl.data.quarantine.open_image", lambda value, **limits: counted(value))
    capsys.readouterr()
    assert features(tmp_path / "second", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cached"] == 4
    assert len(opened) == 4
    first, second = (list(read_shards(tmp_path / name)) for name in ("first", "second"))
    assert [row["image"] for row in second[:6]] == [row["image"] for row in first]
    assert features(tmp_path / "third") == 0
    assert len(opened) == 4
    assert list(read_shards(tmp_path / "third")) == second


def test_unreadable_image_has_a_row_without_features(scenes, tmp_path, capsys):
    images = undecoded(scenes)["image"][:]
    images[2] = {"bytes": b"no image", "path": None}
    broken = replace_column(scenes.select_columns(["image_id", "captions"]), "image", images, datasets.Image())
    broken.to_parquet(tmp_path / "images.parquet")
    source = ["--dataset", str(tmp_path / "images.parquet"), "--max_bad_fraction", "0.2", "--features", "image"]
    assert features(tmp_path / "out", *source, "--no-fill_cache") == 0
    assert "features of 9 of 10 images in 3 shards; 1 cannot be read" in capsys.readouterr().out
    rows = list(read_shards(tmp_path / "out"))
    assert [row["image"] is None for row in rows] == [number == 2 for number in range(10)]
    assert rows[2]["reason"] == "image_unreadable"
    assert all(row["text"] is None for row in rows)
    assert not (tmp_path / "cache").exists()


def test_images_of_one_process_are_opened_in_several_threads(tmp_path, monkeypatch):
    assert features(tmp_path / "one", "--max_images", "8") == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    together = threading.Barrier(4)

    def waiting(value, **limits):
        together.wait(timeout=20)  # raises unless the four images of a batch arrive
        return open_image(value, **limits)

    monkeypatch.setattr("hf_captionrl.data.quarantine.open_image", waiting)
    cache = ["--cache_dir", str(tmp_path / "empty")]
    assert features(tmp_path / "several", "--max_images", "8", *cache) == 0
    assert list(read_shards(tmp_path / "several")) == list(read_shards(tmp_path / "one"))
