"""`captionrl truematch evaluate`: metrics equal plain loops, with and without dropped bags."""

import json

import pytest
from datasets import load_dataset

from hf_captionrl.apps.truematch.build import bag_id
from hf_captionrl.data import open_image
from hf_captionrl.retrieval import load_bags, load_scorer
from hf_captionrl.utils.model_files import model_path
from tests.apps.truematch.conftest import IMAGES, build, truematch
from tests.tiny import write_captions


@pytest.fixture(scope="module")
def measured(built, scenes, cache, tmp_path_factory):
    """Captions with every fact, captions without facts, and the references."""
    out = tmp_path_factory.mktemp("measured")
    for name, captions in (("full", scenes["full_caption"]), ("same", ["a picture"] * IMAGES)):
        write_captions(out / f"{name}.jsonl", scenes["image_id"], captions)
    options = ["--captions", out / "full.jsonl", out / "same.jsonl", "--references", "--cache_dir", cache]
    assert truematch("evaluate", built, *options, "--output_dir", out) == 0
    return out


def test_recall_equals_a_plain_loop(measured, built, scenes):
    result = json.loads((measured / "results.json").read_text())
    scorer = load_scorer(model_path("scenes:siglip-held-out"))
    images = scorer.image_features([open_image(image) for image in scenes["image"]]).float().tolist()
    texts = scorer.text_features(scenes["full_caption"][:]).float().tolist()
    row_of = {image_id: row for row, image_id in enumerate(scenes["image_id"][:])}
    rows = {row["name"]: row for row in result["rows"]}
    for size in (3, 5, 7):
        hits = []
        for bag in load_bags(built / "bags.json").bags:
            if len(bag) == size:
                members = [row_of[i] for i in bag]
                for own in members:
                    scores = {r: sum(a * b for a, b in zip(texts[own], images[r], strict=True)) for r in members}
                    hits.append(all(scores[own] > scores[r] for r in members if r != own))
        key = f"bag_{size}_recall_at_1"
        assert rows["full"][key] == pytest.approx(sum(hits) / len(hits))
        assert result["hits"]["full"][key]["values"] == hits
        low, high = rows["full"][f"{key}_ci"]
        assert low <= rows["full"][key] <= high
        assert rows["full"][key] > rows["references"][key]
    assert rows["full"]["hallucination"] == 0.0
    assert rows["full"]["fact_recall"] == 1.0
    assert rows["full"]["cider_d"] >= 0
    assert 0 < rows["full"]["rd100_recall_at_1"] <= 1
    # Negative control: the same caption for every image can rank first for only one image of a bag.
    assert rows["same"]["bag_3_recall_at_1"] == pytest.approx(1 / 3)


def test_dropped_bags_are_excluded(folder, measured, cache, tmp_path, capsys):
    dropped = next(bag for bag in load_bags(folder / "bags.json").bags if len(bag) == 3)
    (folder / "decisions.jsonl").write_text(json.dumps({"bag": bag_id(dropped), "decision": "drop"}) + "\n")
    options = ["--captions", measured / "full.jsonl", "--cache_dir", cache, "--output_dir", tmp_path / "out", "--json"]
    assert truematch("evaluate", folder, *options) == 0
    less = json.loads(capsys.readouterr().out)
    before = json.loads((measured / "results.json").read_text())
    assert less["bags"]["3"] == before["bags"]["3"] - 1
    key = "bag_3_recall_at_1"
    groups = before["hits"]["full"][key]["groups"]
    left = [v for v, g in zip(before["hits"]["full"][key]["values"], groups, strict=True) if g != bag_id(dropped)]
    assert less["hits"]["full"][key]["values"] == left
    assert less["fingerprint"] != before["fingerprint"]


def test_all_bags_of_a_size_can_be_dropped(folder, measured, cache, tmp_path):
    dropped = [bag for bag in load_bags(folder / "bags.json").bags if len(bag) == 5]
    lines = [json.dumps({"bag": bag_id(bag), "decision": "drop"}) + "\n" for bag in dropped]
    (folder / "decisions.jsonl").write_text("".join(lines))
    options = ["--captions", measured / "full.jsonl", "--cache_dir", cache, "--output_dir", tmp_path]
    assert truematch("evaluate", folder, *options) == 0
    header = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "bags of 3" in header
    assert "bags of 5" not in header


def test_benchmark_without_images_needs_a_data_set(cache, scenes, measured, tmp_path, capsys):
    folder = tmp_path / "bare"
    assert build(folder, cache, "--no_images", "--bag_sizes", 3) == 0
    rows = load_dataset(str(folder), split="test", cache_dir=str(tmp_path / "c"))
    assert "image" not in rows.column_names
    assert "are not part of this data set" in (folder / "README.md").read_text(encoding="utf-8")
    options = ["--captions", measured / "full.jsonl", "--cache_dir", cache, "--output_dir", tmp_path / "out"]
    assert truematch("evaluate", folder, *options) == 2
    assert truematch("review", folder, "--output", tmp_path / "r.html") == 2
    assert capsys.readouterr().err.count("--dataset scenes") == 2
    assert truematch("evaluate", folder, *options, "--dataset", "scenes", "--max_images", IMAGES) == 0
    own = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    other = json.loads((measured / "results.json").read_text())["rows"][0]
    assert own["bag_3_recall_at_1"] == other["bag_3_recall_at_1"]


def test_invalid_evaluations_are_refused(built, measured, cache, tmp_path, capsys):
    options = ["--cache_dir", cache, "--output_dir", tmp_path]
    some = measured / "full.jsonl"
    for more, message in [
        ([], "--captions"),
        (["--captions", some, some], "--names"),
        (["--captions", some, "--names", "references"], "'references'"),
        (["--captions", some, "--names", "a", "b"], "--names"),
        (["--captions", tmp_path / "none.jsonl"], "none.jsonl"),
        (["--captions", some, "--scorer", "none"], "--scorer"),
    ]:
        assert truematch("evaluate", built, *options, *more) == 2
        assert message in capsys.readouterr().err
