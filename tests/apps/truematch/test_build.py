"""`captionrl truematch build` and `apply`, and the commands of docs/truematch.md."""

import json
import os
import re
import signal

import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard

from hf_captionrl.apps.truematch import build as truematch_build
from hf_captionrl.apps.truematch.build import (
    bag_id,
    load_truematch,
    read_decisions,
    write_data,
)
from hf_captionrl.data import open_image
from hf_captionrl.hub import folder_contents
from hf_captionrl.retrieval import load_bags, load_scorer
from hf_captionrl.retrieval.bags import candidate_bags, curate_bags
from hf_captionrl.retrieval.neighbours import multimodal_features
from hf_captionrl.scenes import check
from hf_captionrl.utils.io import write_json, write_jsonl
from hf_captionrl.utils.model_files import model_path
from reproduction.truematch_scenes import truth
from tests.apps.truematch.conftest import build, truematch
from tests.processes import Forked
from tests.tolerances import close


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- build --------------------------------------------------------------------------------------------------------


def test_bags_are_those_of_the_joined_features(built, scenes):
    """Joined features, candidates and curation equal plain loops in tests/retrieval."""
    scorer = load_scorer(model_path("scenes:clip-reward"))
    images = scorer.image_features([open_image(image) for image in scenes["image"]])
    features = multimodal_features(images, [scorer.text_features(captions) for captions in scenes["captions"]])
    ids = scenes["image_id"][:]
    file = load_bags(built / "bags.json", image_ids=ids)
    for size in (3, 5, 7):
        rows, similarities = curate_bags(*candidate_bags(features, size))
        found = [(s, bag) for s, bag in zip(file.similarities, file.bags, strict=True) if len(bag) == size]
        assert [bag for _, bag in found] == [[ids[row] for row in bag] for bag in rows.tolist()]
        assert [s for s, _ in found] == close(similarities.tolist(), ulps=32, dtype="float32")


def test_benchmark_folder_loads_as_data_set_with_card(built, scenes, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    rows = load_dataset(str(built), split="test", cache_dir=str(tmp_path))
    assert set(rows.column_names) == {"image", "image_id", "captions", "facts"}
    assert rows["captions"][:] == scenes["captions"][:]
    assert open_image(rows[7]["image"]).tobytes() == open_image(scenes[7]["image"]).tobytes()
    card = DatasetCard.load(built / "README.md")
    assert card.data.license == "other"
    assert "No one has reviewed the bags yet" in card.text
    assert re.search(r"\| 3 \| \d+ \| 0 \| 0 \| \d+ \|", card.text)
    published = folder_contents(built, "dataset").published
    assert set(published) == {
        *("README.md", "bags.json", "kept.json", "decisions.jsonl", "truematch.json"),
        "data/test-00000-of-00001.parquet",
    }
    for name in published:
        assert str(built.parent).encode() not in (built / name).read_bytes()


def test_rebuild_is_identical_and_other_settings_are_refused(folder, built, cache, capsys):
    assert build(folder, cache) == 0
    assert content(folder) == content(built)
    assert build(folder, cache, "--bag_sizes", 3) == 2
    assert "sizes [3, 5, 7], but sizes is now [3]" in capsys.readouterr().err
    assert content(folder) == content(built)
    some = load_bags(folder / "bags.json").bags[0]
    (folder / "decisions.jsonl").write_text(json.dumps({"bag": bag_id(some), "decision": "drop"}) + "\n")
    write_data(folder, load_dataset(str(folder), split="test", cache_dir=str(folder.parent / "c")).select(range(4)))
    assert build(folder, cache, "--bag_sizes", 3, "--overwrite", "--seed", 9) == 0
    assert content(folder / "data") == content(built / "data")  # files of another data set are replaced
    found = load_truematch(folder)
    assert set(found.status()) == {"3"}
    assert found.status()["3"]["dropped"] == 1
    assert some not in load_bags(folder / "kept.json").bags


def test_killed_build_resumes(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(truematch_build, "_ROWS_PER_FILE", 20)
    whole, folder, write, written = tmp_path / "whole", tmp_path / "killed", truematch_build.atomic_file, []
    assert build(whole, cache, "--repo_id", "t") == 0

    def killed_at_the_fifth(path):
        if len(written) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(path)
        return write(path)

    with monkeypatch.context() as patch:
        patch.setattr(truematch_build, "atomic_file", killed_at_the_fifth)
        with Forked(build, folder, cache, "--repo_id", "t") as process:
            assert process.wait() == -signal.SIGKILL
    assert len(list((folder / "data").glob("*.parquet"))) == 4
    assert truematch("evaluate", folder, "--references") == 2
    assert "finished by the same command" in capsys.readouterr().err
    assert build(folder, cache, "--repo_id", "t") == 0
    assert content(folder) == content(whole)


def test_build_from_published_bags(scenes, cache, tmp_path, capsys):
    image_folder = tmp_path / "coco"
    image_folder.mkdir()
    lines = []
    for number, row in enumerate(scenes.select(range(12)), start=1):
        open_image(row["image"]).save(image_folder / f"COCO_val2014_{number:012d}.png")
        split = "test" if number > 6 else "val"
        lines.append({"file_name": f"COCO_val2014_{number:012d}.png", "captions": row["captions"], "split": split})
    write_jsonl(image_folder / "metadata.jsonl", lines)
    write_json(tmp_path / "release" / "benchmark" / "3.json", [[3, 1, 2], [7, 8, 9]])
    options = ["--dataset", "imagefolder", "--data_dir", image_folder, "--split", "validation+test"]
    options += ["--cache_dir", cache, "--published_bags", tmp_path / "release", "--bag_sizes", 3]
    options += ["--scorer", "scenes:clip-reward"]
    folder = tmp_path / "published"
    assert truematch("build", "--output", folder, *options) == 0, capsys.readouterr().err
    found = load_truematch(folder)
    assert [[int(i[-8:-4]) for i in bag] for bag in found.bags.bags] == [[3, 1, 2], [7, 8, 9]]
    assert "paper's release" in (folder / "README.md").read_text(encoding="utf-8")
    assert all(-1 <= s <= 1 for s in found.bags.similarities)
    assert found.manifest["images"] == 12
    write_json(tmp_path / "release" / "benchmark" / "3.json", [[3, 1, 99]])
    assert truematch("build", "--output", tmp_path / "b", *options) == 2
    assert "such as COCO image 99" in capsys.readouterr().err


# --- decisions ----------------------------------------------------------------------------------------------------


def test_decisions_are_applied_once_and_shown_on_the_card(folder, tmp_path, capsys):
    bags = load_bags(folder / "bags.json").bags
    given = [{"bag": bag_id(bag), "decision": "keep"} for bag in bags[2:]]
    given += [{"bag": bag_id(bags[0]), "decision": "drop", "reason": "duplicates"}]
    write_jsonl(tmp_path / "d.jsonl", given)
    assert truematch("apply", folder, "--decisions", tmp_path / "d.jsonl", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["added"] == len(given)
    assert load_bags(folder / "kept.json").bags == bags[1:]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{len(bags) - 1} of {len(bags)} bags were reviewed; dropped: 1" in card
    before = content(folder)
    assert truematch("apply", folder, "--decisions", tmp_path / "d.jsonl") == 0
    assert content(folder) == before
    assert list(read_decisions(folder / "decisions.jsonl")) == [line["bag"] for line in given]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"bag": "3-000000000000", "decision": "keep"}], "is not in"),
        ("all", "bags are dropped"),
    ],
)
def test_invalid_decisions_change_nothing(folder, tmp_path, capsys, lines, message):
    if lines == "all":
        lines = [{"bag": bag_id(bag), "decision": "drop"} for bag in load_bags(folder / "bags.json").bags]
    write_jsonl(tmp_path / "d.jsonl", lines)
    before = content(folder)
    assert truematch("apply", folder, "--decisions", tmp_path / "d.jsonl") == 2
    assert message in capsys.readouterr().err
    assert content(folder) == before


def test_script_asks_the_facts_whether_a_caption_fits_its_image_alone(scenes):
    facts, captions = scenes["facts"][:6], [references[0] for references in scenes["captions"][:6]]
    bags = {3: [[0, 1, 2], [5, 4, 3]]}
    expected = [
        not check(captions[row], facts[row]).wrong
        and all(check(captions[row], facts[other]).wrong for other in bag if other != row)
        for bag in bags[3]
        for row in bag
    ]
    found = truth(captions, facts, bags)["bag_3_truth_recall_at_1"]
    assert list(found["values"]) == expected
    assert len(set(expected)) == 2
    assert list(found["groups"]) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"bag": ""},
        {"bag": ["3-a"]},
        {"decision": "maybe"},
        {"decision": ["keep"]},
        {"reason": "ugly"},
        {"decision": "keep"},
        {"x": 1},
    ],
)
def test_invalid_decisions_are_refused(change, tmp_path):
    good = {"bag": "3-a", "decision": "drop", "reason": "other"}
    write_jsonl(tmp_path / "d.jsonl", [good])
    assert read_decisions(tmp_path / "d.jsonl")["3-a"]["reason"] == "other"
    write_jsonl(tmp_path / "d.jsonl", [good, good | change])
    with pytest.raises(ValueError, match="line 2, is not a decision"):
        read_decisions(tmp_path / "d.jsonl")
