"""`captionrl bags` on the embedded world: bags, output files and refused input."""

import json

import pytest

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
    path = tmp_path / "bags.parquet"
    assert bags(cache, path, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    test = load_scenes(num_train=0, num_validation=0)["test"].select(range(120))
    ids = list(test["image_id"])
    file = load_bags(path, image_ids=ids, signature=summary["scorer"])
    assert (file.kind, file.features, file.model) == ("truematch", "multimodal", "clip-reward")
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


def test_image_features_give_other_similarities(cache, tmp_path, capsys):
    assert bags(cache, tmp_path / "a.json", "--features", "image", "--bag-size", "3") == 0
    assert "bags of 3, mean similarity" in capsys.readouterr().out
    assert bags(cache, tmp_path / "b.json", "--bag-sizes", "3") == 0
    image, both = load_bags(tmp_path / "a.json"), load_bags(tmp_path / "b.json")
    assert image.features == "image"
    assert {len(bag) for bag in image.bags} == {3}
    assert image.similarities != both.similarities


def test_training_bags_contain_every_image_once(cache, tmp_path):
    path = tmp_path / "bags.parquet"
    assert bags(cache, path, "--mode", "training", "--bag_sizes", "2", "7", "--seed", "3") == 0
    rows = load_bags(path).rows([f"test-{i:05d}" for i in range(120)])
    assert {size: len(found) for size, found in rows.items()} == {2: 60, 7: 17}
    assert sorted(i for bag in rows[2] for i in bag) == list(range(120))


def test_neighbours_are_read_by_the_sampler(cache, tmp_path, capsys):
    path = tmp_path / "n.safetensors"
    assert bags(cache, path, "--mode", "neighbours", "--top", "40") == 0
    assert "40 ranked neighbours per image" in capsys.readouterr().out
    file = load_neighbours(path, image_ids=[f"test-{i:05d}" for i in range(120)])
    assert file.indices.shape == (120, 40)
    assert len(next(iter(BagCurriculumSampler(file.indices, 40)))) == 40
    # IVF-PQ needs more images.
    assert bags(cache, path, "--mode", "neighbours", "--top", "40", "--approximate") == 2
    assert "There are 120 rows, but IVF-PQ needs 640" in capsys.readouterr().err
    assert load_neighbours(path).indices.equal(file.indices)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "bags.csv"], "must name a file that ends in .parquet or .json"),
        (["--mode", "neighbours", "--output", "n.json"], "ends in .safetensors"),
        (["--mode", "neighbours", "--bag_sizes", "3"], "has no effect"),
        (["--bag_sizes", "1"], "bag_sizes is 1"),
        (["--bag_sizes", "5", "--max_images", "4"], "has 4 images, but a bag needs 5"),
        (["--mode", "training", "--bag_sizes", "20", "--top", "10"], "Raise --top"),
        (["--approximate"], "Leave it out"),
        (["--mode", "training", "--seed", "-1"], "at least 0"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["bags", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_launched_processes_are_refused_where_neighbours_are_searched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for mode in ("neighbours", "training"):
        assert main(["bags", "--mode", mode]) == 2
        assert "starts several processes, but one writes the file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
