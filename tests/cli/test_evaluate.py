"""`captionrl evaluate` on the embedded world, where detailed captions must score above generic ones."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import sem, t

from hf_captionrl.cli import main
from hf_captionrl.evaluation import evaluator as suites
from hf_captionrl.metrics import cider_d, paired_test
from hf_captionrl.retrieval.bags import BagFile, save_bags
from hf_captionrl.scenes import check, load_scenes
from hf_captionrl.utils.model_files import model_path

IMAGES = 105


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture(scope="module")
def files(scenes, tmp_path_factory):
    """Detailed captions, generic captions, and five captions per image."""
    folder = tmp_path_factory.mktemp("captions")
    texts = {
        "generic": [[["an animal", "a thing"][i % 2]] for i in range(IMAGES)],
        "full": [[caption] for caption in scenes["full_caption"]],
        "five": [list(captions) for captions in scenes["captions"]],
    }
    paths = {}
    for name, captions in texts.items():
        rows = zip(scenes["image_id"], captions, strict=True)
        # In another order than the data set's: ids count, not lines.
        lines = [json.dumps({"image_id": i, "caption": c[0], "captions": c}) + "\n" for i, c in rows][::-1]
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(lines))
    return paths


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def no_java(captions, references):
    raise RuntimeError("not run: there is no Java")


@pytest.fixture(scope="module")
def everything(files, cache, tmp_path_factory):
    """All suites over three files: printed output, and the folder."""
    folder = tmp_path_factory.mktemp("all")
    paths = [str(files[name]) for name in ("generic", "full", "five")]
    command = ["evaluate", "--captions", *paths, "--max_images", str(IMAGES), "--suite", "all"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "meteor", no_java)
        patch.setattr(suites, "spice", no_java)
        assert main([*command, "--output_dir", str(folder), "--cache_dir", str(cache)]) == 0
    return folder


def rows_of(folder, table):
    result = json.loads(Path(folder, "comparison.json").read_text())
    return {row["name"]: row for row in result["tables"][table]["rows"]}


def test_comparison_has_every_table_and_column(everything):
    result = json.loads((everything / "comparison.json").read_text())
    assert list(result["tables"]) == [*suites.TABLES]
    for name, (_, columns) in suites.TABLES.items():
        rows = rows_of(everything, name)
        assert list(rows) == ["generic", "full", "five", "references"]
        for row in rows.values():
            for column in columns:
                assert row[column.key] is not None or row[f"{column.key}_reason"], (name, column.key)
                without = ("hallucination", "max_words")  # perhaps no claims; a maximum
                if row[column.key] is not None and not column.key.endswith(without):
                    assert row[f"{column.key}_ci"], (name, column.key)
            assert not {"per_sample", "groups", "ranks"} & set(row)
    assert result["signatures"]["smile"]["pool_recall_at_1"].startswith(
        "metric:self_retrieval|scorer:siglip-held-out@"
    )
    assert (everything / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_scenes_with_and_against_the_preferences_are_reported_apart(everything, files, scenes):
    captions = {row["image_id"]: row["captions"] for row in map(json.loads, files["five"].read_text().splitlines())}
    claims = np.zeros((2, 5, 2))  # against the preferences, first to fifth captions: wrong, all
    for row in scenes:
        for k, caption in enumerate(captions[row["image_id"]]):
            found = check(caption, row["facts"])
            claims[int(row["against_preferences"]), k] += len(found.wrong), len(found.wrong) + len(found.right)
    rows = rows_of(everything, "preferences")
    for against, part in enumerate(("with_preferences", "against_preferences")):
        wrong, number = claims[against].T
        assert 0 < wrong.sum() < number.sum()
        assert rows["five"][f"{part}_hallucination"] == pytest.approx((wrong / number).mean())
    share = sum(scenes["against_preferences"]) / IMAGES
    assert 0.1 < share < 0.5
    whole = rows_of(everything, "smile")
    for name, row in rows.items():
        with_, against = (row[f"{part}_rd100_recall_at_1"] for part in ("with_preferences", "against_preferences"))
        assert with_ != against
        assert (1 - share) * with_ + share * against == pytest.approx(whole[name]["rd100_recall_at_1"])
    assert rows["full"]["against_preferences_rd100_recall_at_1_mark"] == "**"


def test_full_captions_score_above_generic_ones(everything):
    smile, ndlb = rows_of(everything, "smile"), rows_of(everything, "ndlb")
    for rows, key in ((smile, "pool_recall_at_1"), (smile, "rd100_recall_at_1"), (ndlb, "bag_3_recall_at_1")):
        assert rows["full"][key] > rows["generic"][key]
        assert key.startswith("bag") or rows["full"][f"{key}_mark"] == "**"  # there are few bags
        assert rows["full"][f"{key}_difference"] == pytest.approx(rows["full"][key] - rows["generic"][key])
        assert f"{key}_mark" not in rows["generic"]
    assert smile["generic"]["pool_recall_at_1"] <= 2 / IMAGES  # two captions find at most one image each
    assert smile["full"]["hallucination"] == 0
    assert smile["full"]["fact_recall"] > smile["five"]["fact_recall"] > smile["generic"]["fact_recall"]
    low, high = smile["full"]["perplexity_ci"]
    assert low < smile["full"]["perplexity"] < high


def test_all_captions_of_an_image_are_scored(files, cache, tmp_path, scenes, monkeypatch):
    """A plain loop: the numbers of three captions per image are the means of those of three files of one caption each."""
    monkeypatch.setattr(suites, "meteor", no_java)
    monkeypatch.setattr(suites, "spice", no_java)
    groups = {row["image_id"]: row["captions"][:3] for row in map(json.loads, files["five"].read_text().splitlines())}
    parts = {"three": groups} | {str(k): {i: [g[k]] for i, g in groups.items()} for k in range(3)}
    for name, captions in parts.items():
        lines = [json.dumps({"image_id": i, "captions": group}) + "\n" for i, group in captions.items()]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    options = ["--max_images", str(IMAGES), "--suite", "all", "--cache_dir", str(cache), "--no_references"]

    def evaluated(*names):
        paths = [str(tmp_path / f"{name}.jsonl") for name in names]
        folder = tmp_path / names[0]
        assert main(["evaluate", "--captions", *paths, *options, "--output_dir", str(folder)]) == 0
        return json.loads((folder / "comparison.json").read_text())["tables"]

    together, singles = evaluated("three", "0"), evaluated("0", "1", "2")
    compared = 0
    for table in {*together} - {"sle"}:
        row, first = together[table]["rows"]
        for key, value in singles[table]["rows"][0].items():
            if isinstance(value, float) and not key.endswith(("_p_value", "_difference")):
                each = [single[key] for single in singles[table]["rows"]]
                assert row[key] == pytest.approx(np.mean(each), rel=1e-6), (table, key)
                assert first[key] == pytest.approx(value), (table, key)
                compared += len(set(each)) > 1  # else the first caption alone would pass
    assert compared > 20
    assert max(row["max_words"] for row in singles["captions"]["rows"]) == together["captions"]["rows"][0]["max_words"]
    # CIDEr-D: mean, best of an image, interval by image, and the paired test of three captions against one.
    ids, references = list(scenes["image_id"]), list(scenes["captions"])
    scores = np.array([cider_d([groups[i][k] for i in ids], references)["per_sample"] for k in range(3)])
    row, first = together["smile"]["rows"]
    assert row["cider_d"] == pytest.approx(scores.mean())
    assert row["best_cider_d"] == pytest.approx(scores.max(0).mean()) == together["sle"]["rows"][0]["best_cider_d"]
    assert row["best_cider_d"] > row["cider_d"]
    reach = t.ppf(0.975, IMAGES - 1) * sem(scores.mean(0))
    assert row["cider_d_ci"] == pytest.approx([scores.mean() - reach, scores.mean() + reach])
    assert (row["cider_d_ci_method"], row["lexical_diversity_ci_method"]) == ("student_t", "bootstrap")
    assert first["cider_d_p_value"] == paired_test(scores[0], scores.mean(0))["p_value"]
    assert row["best_rd100_recall_at_1"] > row["rd100_recall_at_1"]
    assert 0 < together["sle"]["rows"][0]["mbleu_4_per_image"] < 1
    text = (tmp_path / "three" / "comparison.md").read_text()
    assert text.count("| CIDEr-D") == 2  # with that of the best caption
    assert "mean over an image's captions" in text


def test_images_may_have_different_numbers_of_captions(folder):
    groups = {i: [GOOD[i], BAD[i], f"two of {i}"][: 1 + int(i) % 3] for i in GOOD}
    Path("groups.json").write_text(json.dumps(groups))
    assert main(["evaluate", "--captions", "groups.json", "--references", "refs.json"]) == 0
    scores = iter(cider_d(list(groups.values()), [REFERENCES[i] for i in groups])["per_sample"])
    cider = [[next(scores) for _ in group] for group in groups.values()]
    row = rows_of("outputs/evaluate", "text")["groups"]
    length = np.mean([np.mean([len(text.split()) for text in group]) for group in groups.values()])
    assert row["length"] == pytest.approx(length)
    assert row["cider_d"] == pytest.approx(np.mean([np.mean(group) for group in cider]))
    assert row["best_cider_d"] == pytest.approx(np.mean([max(group) for group in cider]))


def test_typical_words_of_all_sources(files, tmp_path, monkeypatch, capsys):
    def tagger(captions):
        return [[(word, "ADJ" if word in ("small", "large") else "NOUN") for word in c.split()] for c in captions]

    monkeypatch.setattr("hf_captionrl.cli.evaluate.spacy_tagger", lambda: tagger)
    monkeypatch.setattr(suites, "meteor", no_java)
    monkeypatch.setattr(suites, "spice", no_java)
    command = ["evaluate", "--captions", str(files["generic"]), "--max_images", "12", "--suite", "discritune"]
    assert main([*command, "--scorer", "none", "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "comparison.json").read_text())
    assert set(result["words"]["nouns"]) == {"generic", "references"}
    assert "thing" in result["words"]["nouns"]["generic"]
    printed = capsys.readouterr().out
    assert "nouns, generic: " in printed
    assert "not run: no scorer" in printed
    assert "- nouns, generic:" in (tmp_path / "comparison.md").read_text()


def test_models_that_cannot_be_loaded(files, tmp_path, capsys, monkeypatch):
    command = ["evaluate", "--captions", str(files["full"]), "--max_images", "12"]
    command += ["--output_dir", str(tmp_path / "out")]
    for option, name in (("scorer", "siglip-held-out"), ("language_model", "gpt2-perplexity")):
        (folder := tmp_path / name).mkdir()  # a configuration without weights
        (folder / "config.json").write_bytes((Path(model_path(f"scenes:{name}")) / "config.json").read_bytes())
        with monkeypatch.context() as patch:  # one that is named must load, before the data are read
            patch.setattr("hf_captionrl.cli.evaluate.load_split", None)
            assert main([*command, "--scorer", "none", f"--{option}", str(folder)]) == 2
        assert "no weights in safetensors" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # a default is not run, and its cells say why
        patch.setattr("hf_captionrl.evaluation.options._CLIP", "missing/clip")
        patch.setattr("hf_captionrl.evaluation.options.EMBEDDED", ())
        assert main([*command, "--language_model", "none"]) == 0
    assert "missing/clip cannot be loaded" in rows_of(tmp_path / "out", "smile")["full"]["pool_recall_at_1_reason"]
    # A folder with another kind of model is bad input, not a missing part.
    assert main([*command, "--scorer", "scenes:gpt2-perplexity"]) == 2
    assert main([*command, "--scorer", "none", "--perplexity_model", "scenes:siglip-held-out"]) == 2
    assert "is not a causal language model" in capsys.readouterr().err


def test_clip_score_prefix_is_used_and_reported(files, cache, tmp_path):
    command = ["evaluate", "--captions", str(files["full"]), "--max_images", "12", "--no_references"]
    command += ["--language_model", "none", "--cache_dir", str(cache), "--output_dir", str(tmp_path)]
    found = {}
    for prefix in ("", "two small pigs "):
        assert main([*command, "--clip_prefix", prefix]) == 0
        result = json.loads((tmp_path / "comparison.json").read_text())
        found[prefix] = rows_of(tmp_path, "smile")["full"]
        assert f"|prefix:{prefix.strip() or 'none'}|" in result["signatures"]["smile"]["clip_score"]
    assert found[""]["clip_score"] != found["two small pigs "]["clip_score"]
    assert found[""]["pool_recall_at_1"] == found["two small pigs "]["pool_recall_at_1"]  # of the captions as they are


def test_given_bags_are_used_and_invalid_ones_refused(files, cache, tmp_path, capsys, monkeypatch):
    ids = [f"test-{i:05d}" for i in range(6)]
    bags = tmp_path / "bags.json"
    command = ["evaluate", "--captions", str(files["full"]), "--max_images", "12", "--suite", "ndlb"]
    command += ["--no_references", "--bags", str(bags), "--cache_dir", str(cache), "--output_dir", str(tmp_path)]
    bags.write_text(json.dumps({"3": [[ids[0], ids[0], ids[1]]]}))
    assert main(command) == 2
    assert "bag 0 of size 3 holds 3 images, 2 different" in capsys.readouterr().err
    bags.write_text(json.dumps({"3": [ids[:3], ids[3:]]}))
    loader = "hf_captionrl.metrics.evaluate_modules.inputs.load_language_model"
    monkeypatch.delattr(loader)  # so that no model can be loaded for it
    assert main(command) == 0
    row = rows_of(tmp_path, "ndlb")["full"]
    save_bags(bags, BagFile([ids[:3], ids[3:]], [0.9, 0.8], "clip@1|float32", "image", "truematch"))
    assert main(command) == 0
    assert rows_of(tmp_path, "ndlb")["full"]["bag_3_recall_at_1"] == row["bag_3_recall_at_1"]
    assert row["bag_3_recall_at_1"] * 6 == pytest.approx(round(row["bag_3_recall_at_1"] * 6))
    reasons = [row[f"bag_5_{by}recall_at_1_reason"] for by in ("", "truth_")]
    assert [row["bag_3_truth_recall_at_1"], *reasons] == [1, *["no bags of 5 in the data"] * 2]


def test_files_of_equal_names_get_the_names_of_their_folders(files, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        os.link(files["full"], tmp_path / name / "x.jsonl")
    paths = [str(tmp_path / name / "x.jsonl") for name in ("a", "b")]
    short = ["--max_images", "12", "--scorer", "none", "--language_model", "none"]
    short += ["--output_dir", str(tmp_path / "out")]
    assert main(["evaluate", "--captions", *paths, *short]) == 0
    assert list(rows_of(tmp_path / "out", "smile")) == ["a/x", "b/x", "references"]
    assert main(["evaluate", "--captions", paths[0], paths[0], *short]) == 2
    assert "Two sources of captions are called 'a/x'" in capsys.readouterr().err


# --- The first hour of a person who only measures: two files of captions and references, without images ----------------

KINDS = ["dog", "cat", "bird", "horse", "cow"]
REFERENCES = {str(i): [f"a {kind} on a hill", f"one {kind} near {i} trees"] for i, kind in enumerate(KINDS * 4)}
GOOD = {i: texts[0] for i, texts in list(REFERENCES.items())[:12]}
BAD = {i: f"a picture of {'a thing' if int(i) % 2 else 'something'}" for i in GOOD}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A new folder with results and annotations as COCO has them."""
    monkeypatch.setattr(suites, "meteor", no_java)
    monkeypatch.setattr(suites, "spice", no_java)
    monkeypatch.chdir(tmp_path)
    for name, captions in (("a.json", BAD), ("b.json", GOOD)):
        rows = [{"image_id": int(i), "caption": text} for i, text in captions.items()]
        Path(name).write_text(json.dumps(rows))
    rows = [{"image_id": int(i), "id": n, "caption": text} for i, c in REFERENCES.items() for n, text in enumerate(c)]
    images = [{"id": int(i), "file_name": f"{i}.jpg"} for i in REFERENCES]
    Path("refs.json").write_text(json.dumps({"images": images, "annotations": rows}))
    return tmp_path


COMMAND = ["evaluate", "--captions", "a.json", "b.json", "--references", "refs.json"]


def test_the_whole_command_in_a_new_folder(folder, capsys):
    assert main(COMMAND) == 0
    said = capsys.readouterr()
    lines = said.err.replace("\n  ", " ").splitlines()  # where they are folded
    assert "captions of 12 images; the other 8 of the 20 images of refs.json are left out" in lines[0]
    signs = [line.split(": ")[1:3] for line in lines[1:]]
    same = "captions all begin or end with the same words"
    assert signs == [["a", same], ["b", same], ["b", "captions are references"]]
    written = ["comparison.csv", "comparison.json", "comparison.md", "comparison.tex", "lengths.png"]
    assert sorted(path.name for path in Path("outputs/evaluate").iterdir()) == written
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "outputs", "refs.json"]
    assert "CIDEr-D ↑" in said.out
    rows = rows_of("outputs/evaluate", "text")
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


def test_without_references_captions_alone_are_measured(folder, capsys):
    assert main(["evaluate", "--captions", "b.json", "--dataset", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["tables"]["text"]["rows"]
    assert row["cider_d_reason"] == "no references (use --references)"
    assert row["length"] == np.mean([len(text.split()) for text in GOOD.values()])
    assert found["num_images"] == 12


def test_images_are_read_if_a_metric_needs_them(folder, capsys):
    """The fourth photograph is a copy of the first."""
    rows = [load_scenes(num_train=0, num_validation=0)["test"][n] for n in (0, 1, 2, 0)]
    Path("photos").mkdir()
    for number, row in enumerate(rows):
        row["image"].save(f"photos/{number}.png")
    for name, column in (("c.json", "full_caption"), ("r.json", "captions")):
        Path(name).write_text(json.dumps({f"{number}.png": row[column] for number, row in enumerate(rows)}))
    command = ["evaluate", "--captions", "c.json", "--dataset", "imagefolder", "--data_dir", "photos"]
    command += ["--scorer", "scenes:siglip-held-out", "--language_model", "none", "--cache_dir", "cache"]
    assert main([*command, "--references", "r.json"]) == 0
    assert "copies of other images: 1 of 4" in capsys.readouterr().err
    found = rows_of("outputs/evaluate", "smile")
    # Both captions of the copied image tie with its copy, and a tie does not count as found.
    assert found["c"]["pool_recall_at_1"] == 0.5
    assert found["c"]["cider_d"] > 0
    assert found["references"]["pool_recall_at_1"] is not None
    Path("r.json").write_text(json.dumps({"0.png": ["a pig"]}))
    assert main([*command, "--references", "r.json"]) == 2
    assert "no references of 3 of the 4 images" in capsys.readouterr().err
    assert main([*command, "--suite", "all", "--no_references", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert tables["smile"]["rows"][0]["cider_d_reason"] == "no references (use --references)"
    assert "preferences" not in tables  # photographs have none
    assert "not run: no references, and one file of captions" in Path("outputs/evaluate/comparison.md").read_text()
    # In a subfolder they show one thing, and do not compete with each other.
    Path("photos/pig").mkdir()
    texts = json.loads(Path("c.json").read_text())
    for name in ("0.png", "3.png"):
        Path("photos", name).rename(Path("photos/pig", name))
        texts[f"pig/{name}"] = texts.pop(name)
    Path("c.json").write_text(json.dumps(texts))
    assert main([*command, "--no_references", "--concept_column", "folder"]) == 0
    assert rows_of("outputs/evaluate", "smile")["c"]["pool_recall_at_1"] == 1.0


def write_coco(folder, scenes, name):
    """Scenes as COCO publishes its images and captions."""
    (folder / name).mkdir()
    images, notes = [], []
    for number, row in enumerate(scenes):
        row["image"].save(folder / name / f"{number:012d}.png")
        images.append({"id": number, "file_name": f"{number:012d}.png"})
        notes += [{"image_id": number, "id": len(notes) + n, "caption": c} for n, c in enumerate(row["captions"])]
    (folder / f"captions_{name}.json").write_text(json.dumps({"images": images, "annotations": notes}))


def test_annotations_of_coco_are_evaluated_and_mined(tmp_path, scenes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = scenes.select(range(12))
    write_coco(tmp_path, few, "val2017")
    data = ["--dataset", "captions_val2017.json", "--image_root", "val2017", "--split", "all", "--cache_dir", "cache"]
    results = [{"image_id": n, "caption": text} for n, text in enumerate(few["full_caption"])]
    Path("results.json").write_text(json.dumps(results))
    scored = ["--scorer", model_path("scenes:siglip-held-out"), "--language_model", "none"]
    assert main(["evaluate", "--captions", "results.json", *data, *scored]) == 0
    row = rows_of("outputs/evaluate", "smile")["results"]
    assert row["cider_d"] == pytest.approx(cider_d(few["full_caption"][:], few["captions"][:])["cider_d"])
    assert row["pool_recall_at_1"] > 0.5
    mined = ["bags", *data, "--scorer", model_path("scenes:clip-reward"), "--output", "bags.json"]
    assert main([*mined, "--bag_size", "3"]) == 0


def test_a_scorer_needs_images_but_no_references(tmp_path, scenes, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = scenes.select(range(12))
    write_coco(tmp_path, few, "val2017")
    lines = [{"image_id": f"{n:012d}.png", "captions": group[:2]} for n, group in enumerate(few["captions"])]
    Path("x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scored = ["--scorer", model_path("scenes:siglip-held-out"), "--language_model", "none", "--cache_dir", "cache"]
    command = ["evaluate", "--captions", "x.jsonl", *scored]
    assert main([*command, "--dataset", "val2017"]) == 0  # a folder of images alone
    assert "references" not in capsys.readouterr().err
    row = rows_of("outputs/evaluate", "smile")["x"]
    assert row["pool_recall_at_1"] > 0.2
    assert (row["cider_d"], row["cider_d_reason"]) == (None, "no references (use --references)")
    assert 0 < rows_of("outputs/evaluate", "sle")["x"]["div_2"] < 1
    assert main([*command, "--dataset", "none"]) == 2  # the images are needed
    assert "--dataset" in capsys.readouterr().err


def test_characters_count_as_words_on_request(folder, capsys):
    captions = ["一只狗在草地上跑。", "一只猫在桌子上", "一只狗" * 12, "..."]
    references = ["一只狗在草地上奔跑", "桌子上有一只猫", "一只狗", "一只鸟在飞"]
    for name, texts in (("c.json", captions), ("d.json", references)):
        Path(name).write_text(json.dumps({str(i): [text] for i, text in enumerate(texts)}))
    command = ["evaluate", "--captions", "c.json", "--references", "d.json", "--output_dir"]
    assert main([*command, "words"]) == 0
    assert capsys.readouterr().err.count("--tokenize char") == 1
    assert main([*command, "characters", "--tokenize", "char"]) == 0
    assert "--tokenize" not in capsys.readouterr().err
    words, characters = (rows_of(name, "text")["c"] for name in ("words", "characters"))
    assert (words["length"], characters["length"]) == (1, (8 + 7 + 36 + 1) / 4)
    assert [words["bleu_4"], words["cider_d"]] == pytest.approx([0, 0], abs=1e-9)
    spaced = [[" ".join(text.strip("。"))] for text in captions[:3]] + [["..."]]
    expected = cider_d(spaced, [[" ".join(text)] for text in references])
    assert characters["cider_d"] == pytest.approx(expected["cider_d"])
    assert characters["bleu_4"] > 0.1
    for folder_name in ("words", "characters"):
        row = rows_of(folder_name, "captions")["c"]
        assert (row["empty"], row["degenerate"]) == (0.25, 0.5)
    signatures = json.loads(Path("characters/comparison.json").read_text())["signatures"]["text"]
    assert all("tok:char" in signatures[key] for key in ("cider_d", "length", "bleu_4"))
