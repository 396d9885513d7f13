"""Replacing the captions of a data set."""

import json

import datasets
import pytest

from hf_captionrl.data import exchange_captions
from hf_captionrl.scenes import load_scenes


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=6, num_validation=0, num_test=0)["train"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_captions_follow_their_images(tmp_path, scenes, caplog):
    ids = list(scenes["image_id"])
    rows = [{"image_id": ids[i], "captions": [f"caption of {ids[i]}"]} for i in (4, 0, 3)]
    found = exchange_captions(
        scenes, write(tmp_path / "c.jsonl", [*rows, {"image_id": "elsewhere", "captions": ["x"]}])
    )
    assert list(found["image_id"]) == [ids[0], ids[3], ids[4]]
    assert [list(c) for c in found["captions"]] == [[f"caption of {i}"] for i in found["image_id"]]
    assert found["image"][1] == scenes["image"][3]
    assert "captions for 3 of 6 images" in caplog.text
    assert found.features["captions"] == scenes.features["captions"]


def test_parquet_and_another_column(tmp_path, scenes):
    ids = list(scenes["image_id"])
    table = datasets.Dataset.from_dict(
        {"image_id": ids, "captions": [["a"]] * 6, "blend_caption": [f"b{i}" for i in ids]}
    )
    table.to_parquet(str(tmp_path / "captions.parquet"))
    found = exchange_captions(scenes.select([5, 2]), tmp_path / "captions.parquet", column="blend_caption")
    assert [list(c) for c in found["captions"]] == [[f"b{ids[5]}"], [f"b{ids[2]}"]]


def test_invalid_files_are_refused(tmp_path, scenes):
    ids = list(scenes["image_id"])
    good = [{"image_id": i, "captions": ["a"]} for i in ids]
    with pytest.raises(ValueError, match=r"lacks the column.*blend_caption"):
        exchange_captions(scenes, write(tmp_path / "c.jsonl", good), column="blend_caption")
    with pytest.raises(ValueError, match="7 rows for 6 images"):
        exchange_captions(scenes, write(tmp_path / "c.jsonl", [*good, good[0]]))
    with pytest.raises(ValueError, match="has none of the 6 images"):
        exchange_captions(scenes, write(tmp_path / "c.jsonl", [{"image_id": "x", "captions": ["a"]}]))
    with pytest.raises(FileNotFoundError, match="no file"):
        exchange_captions(scenes, tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="neither Parquet nor JSON"):
        exchange_captions(scenes, tmp_path / "c.csv")
