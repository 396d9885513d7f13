"""Every command that looks at images looks at all of a folder that names no splits, and takes `all` and `a+b`."""

import json

import pytest
from PIL import Image

from hf_captionrl.cli import main
from hf_captionrl.data import load_captions
from hf_captionrl.data.options import DatasetOptions, load_split


def folder_of(path, number=12, names=None):
    path.mkdir(exist_ok=True)
    rows = []
    for n in range(number):
        Image.new("RGB", (32, 24), (n * 20 % 256, 90, 255 - n * 15 % 256)).save(path / f"{n}.png")
        row = {"file_name": f"{n}.png", "captions": [f"a plain square number {n}", "a square"]}
        rows.append({**row, **({"split": names[n % len(names)]} if names else {})})
    (path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("split", "names", "wanted"),
    [
        (None, None, range(12)),
        (None, ["train", "val", "test"], range(2, 12, 3)),
        ("train+test", ["train", "val", "test"], [n for n in range(12) if n % 3 != 1]),
    ],
)
def test_load_split_returns_the_named_split(tmp_path, capsys, split, names, wanted):
    arguments = DatasetOptions(dataset=str(folder_of(tmp_path / "photos", names=names)), split=split)
    found = load_split(arguments, quarantine_path=tmp_path / "q.jsonl")
    assert {int(image_id[:-4]) for image_id in found.dataset["image_id"]} == set(wanted)
    assert found.all_ids == set(found.dataset["image_id"])
    assert arguments.split == found.split == (split or ("test" if names else "all"))
    assert f"{len(found.dataset)} images" in capsys.readouterr().err


def test_missing_split_is_divided_as_in_training(tmp_path, capsys):
    photos = folder_of(tmp_path / "photos", 20)
    arguments = DatasetOptions(dataset=str(photos), split="test", test_share=0.25)
    found = load_split(arguments, quarantine_path=None)
    trained = load_captions(str(photos), split="train", split_fractions=(0.65, 0.1, 0.25))
    assert len(found.dataset) == 5
    assert not found.all_ids & set(trained["image_id"])
    assert "5 images, split 'test' of 20" in capsys.readouterr().err


def test_bags_of_a_whole_folder_without_captions(tmp_path, capsys):
    photos = folder_of(tmp_path / "photos")
    options = ["--scorer", "scenes:siglip-held-out", "--bag_sizes", "3", "--cache_dir", str(tmp_path / "c"), "--json"]
    options += ["--output", str(tmp_path / "b.parquet"), "--dataset", str(photos)]
    assert main(["bags", *options]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12
    (photos / "metadata.jsonl").unlink()
    assert main(["bags", *options]) == 2
    assert "have no captions" in capsys.readouterr().err
    assert main(["bags", *options, "--features", "image"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12


def test_captions_of_split_all_are_evaluated_on_all_images(tmp_path, capsys):
    photos = folder_of(tmp_path / "photos")
    lines = [json.dumps({"image_id": f"{n}.png", "caption": f"a square {n}"}) for n in range(12)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    options = ["--captions", str(tmp_path / "x.jsonl"), "--dataset", str(photos), "--scorer", "scenes:siglip-held-out"]
    options += ["--language_model", "none", "--suite", "smile", "--output_dir", str(tmp_path / "out"), "--json"]
    assert main(["evaluate", *options, "--cache_dir", str(tmp_path / "c")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_images"], found["config"]["split"]) == (12, "all")
