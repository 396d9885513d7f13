"""scripts/album_campaign.py at a tiny size: rows, resuming, numbers against hand-made captions, page and plot."""

import json
from types import SimpleNamespace

import pytest

from hf_captionrl.scenes import check
from scripts import album_campaign as campaign
from scripts import album_numbers
from tests.tolerances import close


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A campaign of one seed with 14 images, and its arguments."""
    folder = tmp_path_factory.mktemp("campaign")
    samples = ["--images", "14", "--seeds", "0", "--samples", "1", "2", "--adapt", "0.01", "--only", "MLE"]
    campaign.main([*samples, "--output", str(folder)])
    return folder, samples


def test_every_setting_has_a_row(tiny):
    folder, _ = tiny
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["setting"] for row in rows] == [
        "MLE, one beam",
        "MLE, best of 1",
        "MLE, best of 2",
        "MLE, assignment of 2",
        "MLE, assignment of 4 beams",
        "MLE, assignment of 8 beams",
        "MLE, assignment of 16 beams",
        "MLE, assignment of 4 beams and 12 samples",
        "MLE, assignment of 8 RSA beams",
        "MLE, RSA 1",
        "MLE, RSA 3",
        "MLE, adapted 0.01 s",
    ]
    for row in rows:
        assert all(
            0 <= row[name] <= 1
            for name in ("distinct", "held_out", "reward", "truth", "varying", "leaked", "hallucination")
        )
        assert row["cpu_s"] > 0
        assert row["words"] > 1
    by_name = {row["setting"]: row for row in rows}
    # The reward scorer's own opinion of its choice cannot fall with more samples.
    assert by_name["MLE, best of 2"]["reward"] >= by_name["MLE, best of 1"]["reward"]
    assert by_name["MLE, assignment of 2"]["distinct"] >= by_name["MLE, best of 2"]["distinct"]
    assert by_name["MLE, best of 2"]["cpu_s"] > by_name["MLE, best of 1"]["cpu_s"]
    assert set(by_name["MLE, adapted 0.01 s"]["adapter"]) == {"kept", "steps", "before", "after"}


def test_finished_rows_are_not_measured_again(tiny, monkeypatch):
    folder, samples = tiny
    before = (folder / "rows.jsonl").read_text()
    with open(folder / "rows.jsonl", "a") as file:
        file.write('{"setting": "MLE, o')  # a killed run
    monkeypatch.setattr(campaign, "evaluate", None)
    campaign.main([*samples, "--output", str(folder)])
    assert (folder / "rows.jsonl").read_text() == before


def test_result_and_page(tiny):
    folder, _ = tiny
    page = (folder / "page.md").read_text()
    assert "| MLE, adapted 0.01 s |" in page
    assert "Albums of 14 images, seeds 0:" in page
    result = json.loads((folder / "result.json").read_text())
    assert [row["name"] for row in result["rows"]][-1] == "MLE, adapted 0.01 s"
    assert "| MLE, assignment of 16 beams | MLE, one beam | hallucination |" in page
    assert "| MLE, RSA 3 |" not in page, "only in the result"
    assert "MLE, RSA 3" in [row["name"] for row in result["rows"]]
    one = {"setting": "MLE, a", "adapter": {}, **dict.fromkeys(album_numbers.COLUMNS, 0.0)}
    (found,) = album_numbers.aggregated([one, {**one, "distinct": 1.0}])
    # Student's t with one degree of freedom: 12.706 standard errors, each 0.5.
    assert found["distinct"]["interval"] == close([0.5 - 12.706205 / 2, 0.5 + 12.706205 / 2])


def row_of(setting, seed, *, bags, **each):
    return {"setting": setting, "seed": seed, "bags": bags, "each": each}


def test_differences_are_paired_by_image():
    bags = ["x", "x", "y", "y"]
    more = [row_of("a", s, bags=bags, held_out=[1, 1, 1, 0], wrong=[1, 0, 0, 0], claims=[4, 4, 1, 1]) for s in (0, 1)]
    less = [row_of("b", s, bags=bags, held_out=[1, 0, 0, 0], wrong=[2, 1, 0, 0], claims=[4, 4, 1, 1]) for s in (1, 0)]
    alone = row_of("b", 2, bags=bags, held_out=[1, 1, 1, 1], wrong=[0] * 4, claims=[1] * 4)
    found = album_numbers.compared([*more, *less, alone], "held_out", "a", "b")
    assert (found["difference"], found["num_samples"]) == (0.5, 8)
    # Every bag gains one of two, so no resample of whole bags differs.
    assert found["interval"] == pytest.approx((0.5, 0.5))
    # Ratios of sums: 1/10 minus 3/10.
    assert album_numbers.compared([*more, *less], "hallucination", "a", "b")["difference"] == pytest.approx(-0.2)
    assert album_numbers.compared(more, "held_out", "a", "c") is None


def test_overstatement_is_a_difference_of_rises():
    few = row_of("MLE, best of 1", 0, bags=["x", "y"], reward=[0, 0], held_out=[0, 0])
    many = row_of("MLE, best of 4", 0, bags=["x", "y"], reward=[1, 1], held_out=[1, 0])
    assert album_numbers.overstated([few, many], "MLE", 1, 4)["difference"] == 0.5
    assert album_numbers.overstated([few, many], "SR", 1, 4) is None


def test_the_exact_checker_judges_inside_the_bag():
    scene = dict(campaign.load_scenes(num_train=0, num_validation=0, num_test=8)["test"][0]["facts"])
    scene["count"] = 1
    facts = [{**scene, "colour": colour} for colour in ("golden", "red", "golden")]
    album = SimpleNamespace(bags=["x", "x", "y"], facts=facts)
    caption = f"a golden {scene['kind']}"
    assert [campaign.fits_only(album, row, caption) for row in range(3)] == [True, False, True]
    assert not campaign.fits_only(album, 0, f"a {scene['kind']}"), "true of both images of the bag"


def test_numbers_of_hand_made_captions():
    album = SimpleNamespace(bags=["x", "x", "x", "y"], facts=[], scorers={})
    scenes = campaign.load_scenes(num_train=0, num_validation=0, num_test=8)["test"]
    base = dict(scenes[0]["facts"])
    album.facts = [{**base, "colour": colour} for colour in ("golden", "red", "blue", "green")]
    shared = campaign.shared_facts(album)
    assert "colour" not in shared[0]
    assert "kind" in shared[0]
    assert shared[3] == set(base), "a bag of one shares everything"
    kind = base["kind"]
    captions = [f"two {facts['colour']} {kind}s" for facts in album.facts]
    results = [check(caption, facts) for caption, facts in zip(captions, album.facts, strict=True)]
    named = [set(r.recalled) & same for r, same in zip(results, shared, strict=True)]
    assert all("kind" in names for names in named[:3]), results
    # The kind is shared by the three captions of bag x and is dropped there; the colours stay.
    left = campaign.leakage(album, captions, results, shared)
    assert 0 < left < 1
    found = campaign.evaluate(album, captions)
    assert found["distinct"] == 1
    assert found["words"] == 3
