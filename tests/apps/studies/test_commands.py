"""`captionrl study` on the embedded world: building, scoring, bad arguments, and the commands of docs/studies.md."""

import json
import os
import random
from pathlib import Path

import pytest

from hf_captionrl.apps.studies.build import read_key, study_fingerprint
from hf_captionrl.cli import main
from hf_captionrl.scenes import load_scenes
from tests.apps.studies.test_build import answers_of, written
from tests.tiny import write_captions

PAGE = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
IMAGES = 250


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture(scope="module")
def files(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    for name, captions in (("mle", [c[0] for c in scenes["captions"]]), ("smile", list(scenes["full_caption"]))):
        write_captions(folder / f"{name}.jsonl", scenes["image_id"], captions)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def build(kind, files, output, *more):
    captions = [str(files / "mle.jsonl"), str(files / "smile.jsonl")]
    command = ["study", "build", kind, "--captions", *captions, "--max_images", str(IMAGES), "--output", str(output)]
    return main([*command, *map(str, more)])


@pytest.fixture(scope="module")
def retrieval(files, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    assert build("retrieval", files, folder, "--references", "--num_sets", 8, "--cache_dir", cache) == 0
    return folder


def answer(folder, part, participant, choose, path):
    """A file of answers as the page downloads it."""
    path.parent.mkdir(exist_ok=True)
    return written(path, answers_of(read_key(folder), part, participant, choose=choose))


def test_retrieval_study(retrieval, scenes):
    key = read_key(retrieval)
    assert key["systems"] == ["mle", "smile", "references"]
    assert {name: len(questions) for name, questions in key["parts"].items()} == {f"block-{n}": 13 for n in (1, 2, 3)}
    assert sorted(page.name for page in (retrieval / "pages").iterdir()) == [f"block-{n}.html" for n in (1, 2, 3)]
    row = {image_id: n for n, image_id in enumerate(scenes["image_id"])}
    full, references = list(scenes["full_caption"]), list(scenes["captions"])
    for q in (q for questions in key["parts"].values() for q in questions):
        target = row[q["images"][q["right"] - 1]]
        assert q["caption"] == full[target] or q["system"] != "smile"
        assert q["caption"] in references[target] or q["system"] not in ("references", None)


def test_rebuild_is_identical_and_another_study_is_refused(files, cache, retrieval, tmp_path, capsys):
    same = ["--references", "--num_sets", 8, "--cache_dir", cache]
    before = {path.name: path.read_bytes() for path in retrieval.rglob("*.*")}
    assert build("retrieval", files, tmp_path / "b", *same, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").rglob("*.*")} == before
    assert (said["study"], said["sets"], said["questions"]) == (read_key(retrieval)["fingerprint"], 8, 39)
    # Another seed is another study, which replaces nothing without --overwrite.
    assert build("retrieval", files, tmp_path / "b", *same, "--seed", 1) == 2
    assert "holds another study" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").rglob("*.*")} == before
    (tmp_path / "b" / "pages" / "mine.html").write_text("not ours")
    assert build("rating", files, tmp_path / "b", "--num_images", 3, "--num_raters", 2, "--overwrite") == 0
    left = sorted(path.name for path in (tmp_path / "b").rglob("*.*"))
    assert left == ["key.json", "mine.html", "rater-1.html", "rater-2.html"]
    # Nothing outside the folder is deleted, whatever the key of a study from elsewhere names.
    key = read_key(tmp_path / "b")
    key["parts"] = {"../../other": next(iter(key["parts"].values()))}
    (tmp_path / "b" / "key.json").write_text(json.dumps(key | {"fingerprint": study_fingerprint(key)}))
    (tmp_path / "other.html").write_text("not ours")
    assert build("rating", files, tmp_path / "b", "--num_images", 3, "--overwrite") == 2
    assert "'../../other'" in capsys.readouterr().err
    assert (tmp_path / "other.html").is_file()
    # A file that is not a key is never overwritten.
    (tmp_path / "b" / "key.json").write_text("my house key")
    assert build("rating", files, tmp_path / "b", "--num_images", 3, "--overwrite") == 2
    assert "is not JSON" in capsys.readouterr().err


def test_scores_of_a_study_leave_out_broken_answers(retrieval, tmp_path, capsys):
    rng = random.Random(0)
    folder = tmp_path / "answers"

    def able(q):
        return [q["right"] if q["system"] != "mle" else rng.randint(1, 10)]

    for part in ("block-1", "block-2", "block-3"):
        for number in range(2):
            answer(retrieval, part, f"p{number}", able, folder / f"{part}-{number}.json")
    answer(retrieval, "block-1", "asleep", lambda q: [1], folder / "asleep.json")
    (folder / "torn.json").write_text('{"format": ')
    os.mkfifo(folder / "endless.json")  # opening it would wait for a writer
    out = tmp_path / "out"
    assert main(["study", "score", str(retrieval), str(folder), "--output_dir", str(out), "--json"]) == 0
    said = capsys.readouterr()
    for name, reason in (("torn", "not JSON"), ("endless", "not a regular file")):
        assert f"{name}.json does not count: {reason}" in said.err
    result = json.loads(said.out)
    assert json.loads((out / "results.json").read_text()) == result
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["smile"]["accuracy"] == rows["references"]["accuracy"] == 1.0
    assert rows["mle"]["accuracy"] < 0.5
    assert rows["smile"]["answers"] == 16
    assert [d["participant"] for d in result["dropped"]] == ["asleep"]
    assert {p["seconds_per_question"] for p in result["participants"]} == {2.5}
    for name in ("results.md", "results.html"):
        text = (out / name).read_text()
        for word in ("smile", "asleep", "torn.json", "Krippendorff", "controls wrong", "1.000"):
            assert word in text
    # As text.
    assert main(["study", "score", str(retrieval), str(folder), "--output_dir", str(out)]) == 0
    assert "## Systems" in capsys.readouterr().out


def test_score_fails_without_valid_answers(retrieval, files, tmp_path, capsys):
    path = answer(retrieval, "block-1", "asleep", lambda q: [q["right"] % 10 + 1], tmp_path / "a" / "asleep.json")
    assert main(["study", "score", str(retrieval), str(path)]) == 2
    assert "5 of 5 controls wrong" in capsys.readouterr().err
    other = tmp_path / "other"
    assert build("rating", files, other, "--num_images", 3) == 0
    assert main(["study", "score", str(other), str(path)]) == 2
    assert "answers of another study" in capsys.readouterr().err
    assert not (other / "results.json").exists()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("retrieval", ["--set_size", "11"]),
        ("retrieval", ["--num_sets", "200"]),
        ("retrieval", ["--max_similarity", "80"]),
        ("retrieval", ["--controls", "40"]),
        ("rating", ["--num_images", "1000"]),
        ("rating", ["--consent", "nowhere.txt"]),
    ],
)
def test_bad_arguments(kind, more, files, cache, tmp_path, capsys):
    cached = ["--cache_dir", cache] if kind == "retrieval" else []
    assert build(kind, files, tmp_path / "s", *more, *cached) == 2
    assert more[0].strip("-") in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_page_asks_for_consent(files, tmp_path):
    text = tmp_path / "consent.txt"
    text.write_text("Images may <upset>.\n\nNo names are kept.")
    assert build("rating", files, tmp_path / "s", "--num_images", 2, "--num_raters", 1, "--consent", text) == 0
    html = (tmp_path / "s" / "pages" / "rater-1.html").read_text()
    assert "<p>Images may &lt;upset&gt;.</p>" in html
    assert 'id="agree" required' in html
