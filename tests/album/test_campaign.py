"""scripts/album_campaign.py at a tiny size: rows, resuming, numbers against hand-made captions, page and plot."""

import json
from types import SimpleNamespace

import pytest

from hf_captionrl.scenes import check
from scripts import album_campaign as campaign


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
        "MLE, RSA 1",
        "MLE, RSA 3",
        "MLE, adapted 0.01 s",
    ]
    for row in rows:
        assert all(
            0 <= row[name] <= 1 for name in ("distinct", "held_out", "reward", "varying", "leaked", "hallucination")
        )
        assert row["cpu_s"] > 0
        assert row["words"] > 1
    by_name = {row["setting"]: row for row in rows}
    # The reward scorer's own opinion of its choice cannot fall with more samples.
    assert by_name["MLE, best of 2"]["reward"] >= by_name["MLE, best of 1"]["reward"]
    assert by_name["MLE, assignment of 2"]["distinct"] >= by_name["MLE, best of 2"]["distinct"]


def test_finished_rows_are_not_measured_again(tiny, monkeypatch):
    folder, samples = tiny
    before = (folder / "rows.jsonl").read_text()
    with open(folder / "rows.jsonl", "a") as file:
        file.write('{"setting": "MLE, o')  # a killed run
    monkeypatch.setattr(campaign, "evaluate", None)
    campaign.main([*samples, "--output", str(folder)])
    assert (folder / "rows.jsonl").read_text() == before


def test_page_and_plot(tiny):
    folder, _ = tiny
    page = (folder / "page.md").read_text()
    assert "| MLE, adapted 0.01 s |" in page
    assert "Albums of 14 images, 1 seeds" in page
    assert (folder / "compute.png").stat().st_size > 5000
    one = {"setting": "a", **dict.fromkeys(campaign.COLUMNS, 0.0)}
    found = campaign.aggregated([one, {**one, "distinct": 1.0}])
    assert found["a"]["distinct"] == (0.5, 0.5)
    assert [campaign._kind(n) for n in ("MLE, best of 16", "MLE, RSA 1", "MLE, adapted 60 s", "SR, one beam")] == [
        "MLE, best",
        "MLE, RSA",
        "MLE, adapted",
        "SR, one beam",
    ]


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
