"""The first hour of a person who only measures: two files of captions and references, in a new folder, without images."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hf_captionrl.cli import main
from hf_captionrl.evaluation import evaluator as tables
from hf_captionrl.metrics import cider_d, paired_test
from hf_captionrl.scenes import load_scenes

KINDS = ["dog", "cat", "bird", "horse", "cow"]
REFERENCES = {str(i): [f"a {kind} on a hill", f"one {kind} near {i} trees"] for i, kind in enumerate(KINDS * 4)}
GOOD = {i: texts[0] for i, texts in list(REFERENCES.items())[:12]}
BAD = {i: f"a picture of {'a thing' if int(i) % 2 else 'something'}" for i in GOOD}


def no_java(captions, references):
    raise RuntimeError("not run: there is no Java")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A new folder with results and annotations as COCO has them."""
    monkeypatch.setattr(tables, "meteor", no_java)
    monkeypatch.setattr(tables, "spice", no_java)
    monkeypatch.chdir(tmp_path)
    for name, captions in (("a.json", BAD), ("b.json", GOOD)):
        rows = [{"image_id": int(i), "caption": text} for i, text in captions.items()]
        Path(name).write_text(json.dumps(rows))
    rows = [{"image_id": int(i), "id": n, "caption": text} for i, c in REFERENCES.items() for n, text in enumerate(c)]
    images = [{"id": int(i), "file_name": f"{i}.jpg"} for i in REFERENCES]
    Path("refs.json").write_text(json.dumps({"images": images, "annotations": rows}))
    return tmp_path


COMMAND = ["evaluate", "--captions", "a.json", "b.json", "--references", "refs.json"]


def rows_of(table="text", folder="outputs/evaluate"):
    return {
        row["name"]: row for row in json.loads(Path(folder, "comparison.json").read_text())["tables"][table]["rows"]
    }


def test_the_whole_command_in_a_new_folder(folder, capsys):
    assert main(COMMAND) == 0
    said = capsys.readouterr()
    assert "12 images have captions; the other 8 of the 20 images of refs.json are left out" in said.err
    assert said.err.count("\n") == 1
    written = ["comparison.csv", "comparison.json", "comparison.md", "comparison.tex", "lengths.png"]
    assert sorted(path.name for path in Path("outputs/evaluate").iterdir()) == written
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "outputs", "refs.json"]
    assert "CIDEr-D ↑" in said.out
    rows = rows_of()
    assert list(rows) == ["a", "b", "references"]
    references = [REFERENCES[i] for i in GOOD]
    scores = {name: cider_d(list(texts.values()), references) for name, texts in (("a", BAD), ("b", GOOD))}
    for name, found in scores.items():
        assert rows[name]["cider_d"] == pytest.approx(found["cider_d"], rel=1e-12)
    tested = paired_test(scores["b"]["per_sample"], scores["a"]["per_sample"])
    assert rows["b"]["cider_d_p_value"] == tested["p_value"] < 0.01
    assert rows["b"]["cider_d_mark"] == "**"
    # Tables for papers and spreadsheets.
    with Path("outputs/evaluate/comparison.csv").open(newline="") as file:
        lines = {(line["captioner"], line["key"]): line for line in csv.DictReader(file)}
    for name in ("a", "b"):
        for key in ("length", "lexical_diversity", "bleu_4", "rouge_l", "cider_d"):
            line, row = lines[name, key], rows[name]
            assert float(line["value"]) == row[key]
            assert [float(line["low"]), float(line["high"])] == row[f"{key}_ci"]
            assert (line["p_value"] == "") == (name == "a")
    assert lines["a", "meteor"]["reason"] == "there is no Java"
    markdown = Path("outputs/evaluate/comparison.md").read_text()
    assert markdown.startswith("# 12 images of refs.json\n")
    assert markdown.count("there is no Java") == 1
    assert r"CIDEr-D $\uparrow$ & " in Path("outputs/evaluate/comparison.tex").read_text()


def test_other_layouts_give_the_same_numbers(folder, capsys):
    assert main([*COMMAND, "--no_references"]) == 0
    expected = rows_of()
    Path("a.csv").write_text("file_name,caption\n" + "".join(f"{i},{text}\n" for i, text in reversed(BAD.items())))
    Path("b.tsv").write_text("image_id\tcaption\n" + "".join(f"{i}\t{text}\n" for i, text in GOOD.items()))
    images = [{"cocoid": int(i), "split": "test", "sentences": [{"raw": t} for t in c]} for i, c in REFERENCES.items()]
    Path("dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    command = ["evaluate", "--captions", "a.csv", "b.tsv", "--references", "dataset_coco.json", "--no_references"]
    assert main([*command, "--output_dir", "other"]) == 0
    assert rows_of(folder="other") == expected


def test_without_references_captions_alone_are_measured(folder, capsys):
    assert main(["evaluate", "--captions", "b.json", "--dataset", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["tables"]["text"]["rows"]
    assert row["cider_d_reason"] == "no references (use --references)"
    assert row["length"] == np.mean([len(text.split()) for text in GOOD.values()])
    assert found["num_images"] == 12


def test_images_are_read_if_a_metric_needs_them(folder, capsys):
    scenes = load_scenes(num_train=0, num_validation=0)["test"].select(range(4))
    Path("photos").mkdir()
    for number, row in enumerate(scenes):
        row["image"].save(f"photos/{number}.png")
    names = [f"{number}.png" for number in range(4)]
    Path("c.json").write_text(json.dumps(dict(zip(names, scenes["full_caption"], strict=True))))
    Path("r.json").write_text(json.dumps(dict(zip(names, scenes["captions"], strict=True))))
    command = ["evaluate", "--captions", "c.json", "--references", "r.json", "--dataset", "imagefolder"]
    command += ["--data_dir", "photos", "--scorer", "scenes:clip-reward", "--language_model", "none"]
    assert main([*command, "--cache_dir", "cache"]) == 0, capsys.readouterr().err
    rows = rows_of("smile")
    assert rows["c"]["pool_recall_at_1"] is not None
    assert rows["c"]["cider_d"] > 0
    assert rows["references"]["pool_recall_at_1"] is not None
    Path("r.json").write_text(json.dumps({"0.png": ["a pig"]}))
    assert main([*command, "--cache_dir", "cache"]) == 2
    assert "no references of 3 of the 4 images" in capsys.readouterr().err


def changed(name, change):
    Path(name).write_text(json.dumps(change(json.loads(Path(name).read_text()))))


def with_other_ids(rows):
    return [{**row, "image_id": row["image_id"] + 15} for row in rows]


@pytest.mark.parametrize(
    ("break_it", "more", "named"),
    [
        (lambda: changed("b.json", with_other_ids), [], "only one of them"),
        (lambda: [changed(name, with_other_ids) for name in ("a.json", "b.json")], [], "refs.json"),
        (lambda: changed("refs.json", lambda _: dict.fromkeys(REFERENCES, "")), [], "reference of image '0'"),
        (lambda: Path("refs.json").unlink(), [], "refs.json"),
        (lambda: None, ["--scorer", "scenes:clip-reward"], "--scorer"),
        (lambda: None, ["--split", "test"], "--split"),
        (lambda: None, ["--dataset", "imagefolder", "--data_dir", "photos"], "photos"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, break_it, more, named):
    break_it()
    assert main([*COMMAND, *more]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not Path("outputs").exists()
