"""Errors of captions, counted and ordered, by hand."""

import json
import re

import pytest

import hf_captionrl.scenes
from hf_captionrl.apps.gallery.gallery import (
    CiderFailure,
    cider_failures,
    gallery_marks,
    most_wrong,
    unrewarded,
)
from hf_captionrl.cli import main
from hf_captionrl.evaluation.pages import Mark
from hf_captionrl.metrics import cider_d
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import Facts, check
from hf_captionrl.utils.model_files import model_path
from tests.tiny import write_captions

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
RIGHT, WRONG, BOUND = Mark("a", "right", 0, 1), Mark("b", "wrong", 0, 1), Mark("c", "misbound", 0, 1, "pig")


def test_marks_of_a_caption():
    marks = gallery_marks("two large pigs left of two mushrooms", PIGS)
    assert [(m.text, m.verdict, m.start, m.owner) for m in marks if m.verdict != "right"] == [
        ("large", "wrong", 4, ""),
        ("two", "misbound", 23, "pig"),
    ]
    assert gallery_marks("", PIGS) == []


def test_images_are_sorted_by_errors_and_right_ones_excluded():
    marks = {"A": [[RIGHT], [WRONG], [WRONG], [RIGHT], [BOUND]], "B": [[], [RIGHT], [WRONG], [WRONG], [RIGHT]]}
    assert most_wrong(marks, 9) == [4, 2, 1, 3]
    assert most_wrong(marks, 2) == [4, 2]
    with pytest.raises(ValueError, match="shorter"):
        most_wrong({"A": [[RIGHT]], "B": []}, 1)


HOSTILE = "<script>alert(1)</script> a 'large' \"pig\" </style>"


@pytest.fixture(scope="module")
def rows():
    """A bag of 3, one of 5 and one of 7."""
    return hf_captionrl.scenes.load_scenes(num_train=0, num_validation=0, num_test=15)["test"]


@pytest.fixture(scope="module", autouse=True)
def small_world(rows, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_captionrl.scenes, "load_scenes", lambda **settings: {"test": rows})
        patch.setenv("CAPTIONRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    """Short references; full captions, those of the next scene for every third image."""
    folder = tmp_path_factory.mktemp("files")
    full = list(rows["full_caption"])
    captions = {
        "mle": [group[0] for group in rows["captions"]],
        "sr": [full[(n + 1) % len(full)] if n % 3 == 0 else caption for n, caption in enumerate(full)],
    }
    captions["sr"][4] = HOSTILE
    for name, mine in captions.items():
        write_captions(folder / f"{name}.jsonl", rows["image_id"], mine)
    return folder, captions


def run(files, folder, *more):
    sources = [str(files[0] / f"{name}.jsonl") for name in files[1]]
    return main(["gallery", "--captions", *sources, "--output_dir", str(folder), *more])


@pytest.fixture(scope="module")
def pages(files, tmp_path_factory):
    """The folder of a run with all pages, and the numbers that it wrote."""
    folder = tmp_path_factory.mktemp("pages")
    assert run(files, folder, "--max_cider", "1.5") == 0
    return folder, json.loads((folder / "gallery.json").read_text())


@pytest.fixture(scope="module")
def expected(files, rows):
    """CIDEr-D and the claims of each source, row by row."""
    scores = {name: cider_d(mine, list(rows["captions"]))["per_sample"] for name, mine in files[1].items()}
    checks = {
        name: [check(caption, facts) for caption, facts in zip(mine, rows["facts"], strict=True)]
        for name, mine in files[1].items()
    }
    return scores, checks


def plain_ranks(captions, rows, members):
    """Rank of each image of a bag when its caption searches for it; a tie counts against the caption."""
    scorer = load_scorer(model_path("scenes:siglip-held-out"))
    images = scorer.image_features([rows[n]["image"] for n in members])
    texts = scorer.text_features([captions[n] for n in members])
    found = []
    for own, text in enumerate(texts):
        scores = [float((text * image).sum()) for image in images]
        found.append(sum(score >= scores[own] for score in scores))
    return found


def texts(path):
    html = path.read_text(encoding="utf-8")
    return [re.sub(r"\s+", " ", re.sub("<[^>]+>", "", card)) for card in html.split("<article")[1:]]


def test_bags_side_by_side_with_their_ranks(files, rows, tmp_path):
    assert run(files, tmp_path, "--bag_size", "3", "--names", "MLE", "SR") == 0
    found = json.loads((tmp_path / "gallery.json").read_text())
    members = [0, 1, 2], [7, 8, 9]  # the first images of the bags of 7
    assert found["bags"] == [[f"test-{row:05d}" for row in bag] for bag in members]
    html = (tmp_path / "bags.html").read_text()
    cards = texts(tmp_path / "bags.html")
    assert len(cards) == 6
    for number, bag in enumerate(members):
        mle, sr = (plain_ranks(mine, rows, bag) for mine in files[1].values())
        assert f"Bag {number + 1}: 3 look-alikes. MLE finds {mle.count(1)}, SR finds {sr.count(1)}</h2>" in html
        for at, card in enumerate(cards[3 * number : 3 * number + 3]):
            assert f"MLE {mle[at]} of 3" in card
            assert f"SR {sr[at]} of 3" in card
            assert files[1]["mle"][bag[at]] in card


def test_every_wrong_claim_is_counted_and_marked(pages, expected):
    folder, found = pages
    wrong_rows = []
    for name, results in expected[1].items():
        counts = found["errors"][name]
        assert counts["hallucinated"] + counts["misbound"] == sum(len(result.wrong) for result in results)
        assert counts["claims"] == sum(len(result.wrong) + len(result.right) for result in results)
        assert counts["wrong_captions"] == sum(bool(result.wrong) for result in results)
        wrong_rows += [number for number, result in enumerate(results) if result.wrong]
    html = (folder / "errors.html").read_text()
    assert html.count("<article") == len(set(wrong_rows)) > 2
    marked = len(re.findall('<span class="(?:wrong|misbound)" title', html))
    assert marked == sum(counts["hallucinated"] + counts["misbound"] for counts in found["errors"].values())
    assert "<script>alert" not in html
    assert html.count("</style>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_cider_cases_follow_the_rule(pages, expected, files, rows):
    folder, found = pages[0], pages[1]["cider"]
    scores, checks = expected
    ranks = {name: plain_ranks(mine, rows, range(15)) for name, mine in files[1].items()}
    cases = []
    for row in range(15):
        high, low = ("mle", "sr") if scores["mle"][row] > scores["sr"][row] else ("sr", "mle")
        more = len(checks[low][row].recalled) - len(checks[high][row].recalled)
        fewer = len(checks[high][row].wrong) - len(checks[low][row].wrong)
        gap = scores[high][row] - scores[low][row]
        if gap > 0 and more >= 0 and fewer >= 0 and more + fewer > 0 and ranks[low][row] < ranks[high][row]:
            cases.append((f"test-{row:05d}", high, low))
    assert {(case["image_id"], case["preferred"], case["better"]) for case in found["cases"]} == set(cases)
    assert found["failures"] == len(cases) > 0
    gaps = [case["gap"] for case in found["cases"]]
    assert gaps == sorted(gaps, reverse=True)
    card = texts(folder / "cider.html")[0]
    number = int(found["cases"][0]["image_id"][-5:])
    assert f"CIDEr-D {scores[found['cases'][0]['preferred']][number]:.2f}" in card


def test_right_captions_with_a_cider_d_near_0(pages, expected):
    """By hand: no wrong claim, a right one, and a score below the bound."""
    folder, found = pages[0], pages[1]["unrewarded"]
    scores, checks = expected
    good = [(name, row) for name in checks for row, c in enumerate(checks[name]) if c.right and not c.wrong]
    poor = {(f"test-{row:05d}", name) for name, row in good if scores[name][row] < 1.5}
    assert {(case["image_id"], case["source"]) for case in found["cases"]} == poor
    assert (found["right_captions"], found["unrewarded"]) == (len(good), len(poor))
    assert 0 < len(poor) < len(good)
    assert f"{len(poor)} of {len(good)} captions" in (folder / "unrewarded.html").read_text()


def test_captioner_as_source_and_removal_of_old_pages(files, tmp_path, capsys):
    assert run(files, tmp_path) == 0
    assert (tmp_path / "cider.html").is_file()
    only = ["gallery", "--captions", "scenes:blip-mle", "--scorer", "none", "--max_images", "7", "--bag_size", "3"]
    assert main([*only, "--output_dir", str(tmp_path)]) == 0, capsys.readouterr().err
    assert not (tmp_path / "cider.html").exists()
    found = json.loads((tmp_path / "gallery.json").read_text())
    assert found["cider"] is None
    assert found["scorer"] is None
    assert " of 3<" not in (tmp_path / "bags.html").read_text()
    # Two images are no bag.
    assert main([*only[:5], "--max_images", "2", "--output_dir", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "gallery.json").read_text())["bags"] == []
    assert not (tmp_path / "bags.html").exists()


@pytest.mark.parametrize(
    ("more", "name"),
    [("--names A A", "'A'"), ("--bag_size 4", "--bag_size"), ("--captions gone.jsonl", "'gone.jsonl'")],
)
def test_bad_input_exits_with_2_and_the_reason(more, name, files, tmp_path, capsys):
    assert run(files, tmp_path / "out", *more.split()) == 2
    assert name in capsys.readouterr().err


SCORES = {"A": [2.0, 0.5, 1.0, 1.0], "B": [0.5, 2.0, 1.0, 0.2]}
# Image 0: B is right and A is wrong. 1: B has one more wrong claim and more facts: neither is more faithful.
# 2: equal CIDEr-D, no pair. 3: A is the more faithful, as CIDEr-D says.
ERRORS = {"A": [1, 0, 3, 0], "B": [0, 1, 0, 2]}
RECALLED = {"A": [2, 1, 0, 3], "B": [2, 3, 5, 3]}
RANKS = {"A": [3, 1, 1, 2], "B": [1, 1, 9, 1]}


def test_hand_made_pairs():
    found = cider_failures(SCORES, wrong=ERRORS, recalled=RECALLED, ranks=RANKS)
    assert found["pairs"] == 3
    assert (found["faithful_pairs"], found["faithful_failures"]) == (2, 0.5)
    # Images 0 and 3 each have one better rank, and CIDEr-D fails on both.
    assert (found["retrieval_pairs"], found["retrieval_failures"]) == (2, 1.0)
    assert found["failures"] == 1
    assert found["cases"] == [CiderFailure(0, "A", "B", 1.5)]
    assert "rules:faithful+retrieval" in found["signature"]


def test_right_captions_with_a_score_near_0():
    scores = {"A": [0.0, 0.05, 0.0, 0.1, 0.02], "B": [3.0, 0.0, 0.0, 0.0, 0.0]}
    right = {"A": [2, 5, 3, 1, 1], "B": [1, 0, 4, 2, 2]}
    wrong = {"A": [0, 0, 1, 0, 0], "B": [0, 0, 0, 2, 1]}
    found = unrewarded(scores, right=right, wrong=wrong)
    # A: image 2 is wrong, image 3 scores the bound. B: image 1 has no claims, 3 and 4 are wrong, 0 is rewarded.
    assert found["cases"] == [(1, "A", 0.05), (2, "B", 0.0), (0, "A", 0.0), (4, "A", 0.02)]
    assert (found["right_captions"], found["unrewarded"]) == (6, 4)
    assert found["share"] == pytest.approx(4 / 6)
    assert unrewarded({"A": [1.0]}, right={"A": [0]}, wrong={"A": [0]})["share"] == 0
