"""`captionrl bags` on the embedded world: bags, output files and refused input."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hf_captionrl.cli import main
from hf_captionrl.data import BagCurriculumSampler
from hf_captionrl.retrieval import load_bags, load_neighbours
from hf_captionrl.scenes import load_scenes


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def bags(cache, output, *more, images=120):
    return main(["bags", "--output", str(output), "--max_images", str(images), "--cache_dir", str(cache), *more])


def test_truematch_finds_the_bags_of_the_embedded_world(cache, tmp_path, capsys):
    path = tmp_path / "bags.json"
    assert bags(cache, path, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    test = load_scenes(num_train=0, num_validation=0)["test"].select(range(120))
    ids = list(test["image_id"])
    file = load_bags(path, image_ids=ids, signature=summary["scorer"])
    assert (file.kind, file.features, file.signature.split("@")[0]) == ("truematch", "multimodal", "clip-reward")
    found = file.rows(ids)
    assert {size: len(rows) for size, rows in found.items()} == {
        int(size): bag["number"] for size, bag in summary["bags"].items()
    }
    assert sorted(found) == [3, 5, 7]
    # Images of one bag_id differ in one attribute; the most similar pairs must mostly be such.
    made = list(test["bag_id"])
    same = [made[a] == made[b] != "" for a, b, _ in found[3]]
    assert sum(same) / len(same) > 0.5
    scores = [s for bag, s in zip(file.bags, file.similarities, strict=True) if len(bag) == 3]
    assert scores == sorted(scores, reverse=True)


def test_neighbours_are_read_by_the_sampler(cache, tmp_path, capsys):
    path = tmp_path / "n.safetensors"
    assert bags(cache, path, "--mode", "neighbours", "--top", "40") == 0
    assert "40 ranked neighbours per image" in capsys.readouterr().out
    file = load_neighbours(path, image_ids=[f"test-{i:05d}" for i in range(120)])
    assert file.indices.shape == (120, 40)
    assert len(next(iter(BagCurriculumSampler(file.indices, 40)))) == 40
    assert list(tmp_path.iterdir()) == [path]


def test_a_whole_folder_without_captions(tmp_path, capsys):
    for number in range(12):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.new("RGB", (32, 24), (number * 20, 90, 255 - number * 15)).save(tmp_path / "photos" / f"{number}.png")
    options = ["--scorer", "scenes:siglip-held-out", "--bag_size", "3", "--cache_dir", str(tmp_path / "c")]
    options += ["--output", str(tmp_path / "b.json"), "--dataset", str(tmp_path / "photos")]
    assert main(["bags", *options]) == 2
    assert "no captions of its images" in capsys.readouterr().err
    assert main(["bags", *options, "--features", "image"]) == 0
    said = capsys.readouterr()
    assert "12 images" in said.out
    assert "bags of 3, mean similarity" in said.out
    assert load_bags(tmp_path / "b.json").features == "image"


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("truematch", "captions.json"),
        ("neighbours", "model.safetensors"),
    ],
)
def test_a_file_of_something_else_is_not_replaced(cache, tmp_path, capsys, monkeypatch, mode, name):
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file({"weight": torch.ones(3)}, path)
    else:
        path.write_text('[{"image_id": "test-00000", "caption": "a pig"}]')
    before = path.read_bytes()
    monkeypatch.setattr("hf_captionrl.cli.bags.load_split", None)  # nothing is read
    assert bags(cache, path, "--mode", mode) == 2
    assert "--output" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_replaces_its_own_files(cache, tmp_path):
    for mode, name in (("truematch", "bags.json"), ("neighbours", "n.safetensors")):
        for size in (["--top", "5"], ["--top", "6"]) if mode == "neighbours" else (["--bag_sizes", "3"],) * 2:
            assert bags(cache, tmp_path / name, "--mode", mode, *size, images=40) == 0
    assert load_bags(tmp_path / "bags.json").kind == "truematch"
    assert load_neighbours(tmp_path / "n.safetensors").indices.shape == (40, 6)


def test_bags_hold_one_image_of_a_concept(cache, tmp_path):
    """The embedded look-alikes as one thing: every bag then has images of other bags."""
    file = tmp_path / "bags.json"
    bags(cache, file, "--bag_sizes", "3", "--concept_column", "bag_id")
    rows = load_scenes()["test"].select(range(120))
    thing = dict(zip(rows["image_id"], rows["bag_id"], strict=True))
    found = load_bags(file).bags
    assert found
    assert all(len({thing[image] or image for image in bag}) == 3 for bag in found)
