"""The order of Tables 3 to 5 over seeds: put together, subtracted, and shown on the page as it was measured."""

import json
import math
from pathlib import Path

import pytest

from scripts.ndlb_order import COMMANDS, SR_L, SR_LV, collect, differences, main, to_markdown

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
    assert found["interval"] == pytest.approx([mean - half, mean + half], abs=1e-4)
    assert [row["name"] for row in record["rows"]][1::2] == [SR_L, SR_LV]
    assert record["commands"] == list(COMMANDS)
    assert "| R@1 bags of 7 ↑ | .333 | [.046, .620] | more |" in to_markdown(record)
    wide = differences([{"name": "a", **row(0.9, 0.5)}, {"name": "b", **row(0.3, 0.6)}], "a", "b")
    assert wide["cider_d"]["interval"][0] < 0 < wide["cider_d"]["mean"]
    assert "| CIDEr-D ↑ | .250 | [-4.197, 4.697] | nothing |" in to_markdown({"rows": [], "sr_lv_minus_sr_l": wide})


def row(*values):
    return {key: {"values": list(values)} for key in KEYS}


def test_a_missing_run_is_no_shorter_table(tmp_path):
    sr_l, sr_lv = runs(tmp_path / "l", (0.5, 0.6)), runs(tmp_path / "lv", (0.7,))
    with pytest.raises(FileNotFoundError, match="seed-1"):
        collect(sr_l, sr_lv, [0, 1])


def test_the_page_shows_the_committed_numbers():
    record = json.loads((DOCS / "results/ndlb_order_seeds.json").read_text())
    page = (DOCS / "boosting.md").read_text()
    assert to_markdown(record) in page
    # What the text says is shown is what the intervals show.
    shown = {key for key, found in record["sr_lv_minus_sr_l"].items() if found["interval"][0] > 0}
    assert shown == {"rd100_recall_at_1", "bag_3_recall_at_1", "bag_7_recall_at_1", "fact_recall"}
    assert "among 100 and in bags of 3 and of 7, and tells more of the facts" in page
    assert min(record["sr_lv_minus_sr_l"]["bag_5_recall_at_1"]["values"]) > 0


def test_tables_of_smile_are_what_was_measured():
    """Tables 4 and 5 and Figure 4(a) of docs/smile.md, whose rows stand in several results."""
    page = (DOCS / "smile.md").read_text()
    rows = {}
    for name in ("smile_blip", "smile_first_token", "smile_lambda", "smile_subset"):
        for row in json.loads((DOCS / f"results/{name}_seeds.json").read_text())["rows"]:
            rows.setdefault(row["name"], row)
    digits = {
        "length": 2,
        "pool_recall_at_1": 3,
        "rd100_recall_at_1": 3,
        "cider_d": 3,
        "fact_recall": 3,
        "hallucination": 3,
    }
    sections = {
        "Table 4": ["none", "shifting", "SMILE"],
        "Table 5": ["MLE+MLE", *(f"SMILE (lambda={x})" for x in (0.5, 0.1, 0.05, 0.01)), "SMILE"],
        "Figure 4(a)": ["MLE", "MLE+MLE", "SMILE", "random", "reverse"],
    }
    for title, names in sections.items():
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        shown = [line.split(" | ", 1)[1] for line in section.splitlines() if line.startswith("| ") and "±" in line]
        cells = [
            [f"{rows[n][k]['mean']:.{d}f} ±{rows[n][k]['standard_error']:.{d}f}" for k, d in digits.items()]
            for n in names
        ]
        assert shown == [" | ".join(row) + " |" for row in cells], title


def test_the_table_of_videos_is_what_was_measured():
    page = (DOCS / "video.md").read_text()
    digits = {"length": 2, "pool_recall_at_1": 3, "rd100_recall_at_1": 3, "cider_d": 3, "hallucination": 3}
    digits |= {"fact_recall": 3, "emscore": 3, "emscore_references": 3}
    for row in json.loads((DOCS / "results/smile_video_seeds.json").read_text())["rows"]:
        cells = [f"{row[k]['mean']:.{d}f} ±{row[k]['standard_error']:.{d}f}" for k, d in digits.items()]
        assert f"| {row['name']} | " + " | ".join(cells) + " |" in page


def test_figure_4b_of_the_page_is_what_was_measured():
    page = (DOCS / "smile.md").read_text().split("## Figure 4(b)")[1].split("##")[0]
    length = {}
    for level in ("simplest", "simpler"):
        result = json.loads((DOCS / f"results/smile_blip_{level}_seeds.json").read_text())
        for row in result["rows"]:
            digits = {"length": 2, "rd100_recall_at_1": 3, "fact_recall": 3, "hallucination": 3}
            cells = [f"{row[k]['mean']:.{d}f} ±{row[k]['standard_error']:.{d}f}" for k, d in digits.items()]
            assert f"| {row['name']} | " + " | ".join(cells) + " |" in page
            length[level, row["name"]] = row["length"]["mean"]
    # The paper's finding.
    assert length["simplest", "SMILE"] <= 1.01 * length["simplest", "references"]
    assert length["simpler", "SMILE"] > 1.5 * length["simpler", "references"]
