"""The order of Tables 3 to 5 over seeds: put together, subtracted, and shown on the page as it was measured."""

import json
import math
from pathlib import Path

import pytest

from scripts.ndlb_order import COMMANDS, SR_L, SR_LV, collect, differences, main, to_markdown
from tests.closeness import close

DOCS = Path(__file__).parents[1] / "docs"
KEYS = ("length", "rd100_recall_at_1", "bag_3_recall_at_1", "bag_5_recall_at_1", "bag_7_recall_at_1", "cider_d")
KEYS += ("hallucination", "fact_recall", "degenerate")


def runs(folder, trained):
    """A run a seed: a start that is always alike, and what was trained."""
    for seed, value in enumerate(trained):
        rows = [
            {"name": name, **dict.fromkeys(KEYS, number), "length_ci": [0, 1]}
            for name, number in (("MLE", 0.1), ("SR", value), ("references", 1.0))
        ]
        path = folder / f"seed-{seed}" / "results.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"rows": rows, "versions": {"hf_captionrl": "0"}}))
    return folder


def test_differences_are_of_pairs_of_one_seed(tmp_path):
    more, less = (0.9, 0.8, 0.7), (0.5, 0.6, 0.3)
    sr_l, sr_lv = runs(tmp_path / "l", less), runs(tmp_path / "lv", more)
    path = main(
        ["--sr_l", str(sr_l), "--sr_lv", str(sr_lv), "--seeds", "0", "1", "2", "--output", str(tmp_path / "o.json")]
    )
    record = json.loads(path.read_text())
    gaps = [a - b for a, b in zip(more, less, strict=True)]
    mean = sum(gaps) / 3
    half = 4.302653 * math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 2 / 3)
    found = record["sr_lv_minus_sr_l"]["bag_7_recall_at_1"]
    assert found["values"] == pytest.approx(gaps)
    assert found["interval"] == close([mean - half, mean + half], dtype="float32")
    assert [row["name"] for row in record["rows"]][1::2] == [SR_L, SR_LV]
    assert record["commands"] == list(COMMANDS)
    assert "| R@1 bags of 7 ↑ | 0.333 | [0.046, 0.620] | more |" in to_markdown(record)
    wide = differences([{"name": "a", **row(0.9, 0.5)}, {"name": "b", **row(0.3, 0.6)}], "a", "b")
    assert wide["cider_d"]["interval"][0] < 0 < wide["cider_d"]["mean"]
    assert "| CIDEr-D ↑ | 0.250 | [-4.197, 4.697] | nothing |" in to_markdown({"rows": [], "sr_lv_minus_sr_l": wide})


def row(*values):
    return {key: {"values": list(values)} for key in KEYS}


def test_a_missing_run_is_no_shorter_table(tmp_path):
    sr_l, sr_lv = runs(tmp_path / "l", (0.5, 0.6)), runs(tmp_path / "lv", (0.7,))
    with pytest.raises(FileNotFoundError, match="seed-1"):
        collect(sr_l, sr_lv, [0, 1])


def test_the_page_shows_the_committed_numbers():
    record = json.loads((DOCS / "results/ndlb_order_seeds.json").read_text())
    page = (DOCS / "boosting.md").read_text()
    rows, gaps = to_markdown(record).split("\n\n")
    assert rows in (DOCS / "full_tables.md").read_text()
    assert gaps in page
    # What the text says is shown is what the intervals show.
    shown = {key for key, found in record["sr_lv_minus_sr_l"].items() if found["interval"][0] > 0}
    assert shown == {"rd100_recall_at_1", "bag_3_recall_at_1", "bag_7_recall_at_1", "fact_recall"}
    assert "among 100 and in bags of 3 and of 7, and tells more of the facts" in page
    assert min(record["sr_lv_minus_sr_l"]["bag_5_recall_at_1"]["values"]) > 0
