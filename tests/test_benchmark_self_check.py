"""The benchmark of the check before the first step, at a tiny shape."""

import dataclasses
import json
from pathlib import Path

import pytest

from hf_captionrl.captioners import head_tap as head_tap_check
from scripts import benchmark
from scripts.benchmarks import self_check
from scripts.benchmarks.step_models import SHAPES

ROOT = Path(__file__).parents[1]
TINY = {"vocab_size": 60, "width": 32, "layers": 1, "heads": 2, "intermediate": 64, "image_size": 32}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "blip-base", dataclasses.replace(SHAPES["blip-base"], **TINY))


def test_both_checks_are_timed_in_turn_and_read_what_they_are_named_after(tiny, monkeypatch, tmp_path):
    rows, before = [], head_tap_check.mean_cross_entropy

    def counted(head):
        rows.append(len(head.labels))
        return before(head)

    monkeypatch.setattr(head_tap_check, "mean_cross_entropy", counted)
    output, page = tmp_path / "found.json", tmp_path / "page.md"
    words = ["self_check", "--batch-sizes", "5", "--rounds", "2", "--output", str(output)]
    assert benchmark.main(["--write", "--page", str(page), *words]) == 0
    found = json.loads(output.read_text())["batch_sizes"]["5"]
    assert sorted(rows) == [2, 2, 2, 5, 5, 5]  # with the round that is not counted
    seconds = {name: each["values"] for name, each in found["seconds"].items()}
    assert {name: len(values) for name, values in seconds.items()} == {"whole batch": 2, "two rows": 2, "step": 2}
    expected = [a / b for a, b in zip(seconds["whole batch"], seconds["two rows"], strict=True)]
    assert found["speedup"]["values"] == expected
    assert "| 5 | " in page.read_text()


def test_a_check_that_fails_is_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(self_check.head_tap_check, "check_tap", lambda captioner, batch: 1.0)
    with pytest.raises(RuntimeError, match="also computed full logits"):
        self_check.measure(SHAPES["blip-base"], rounds=1)


def test_the_page_shows_the_measured_numbers():
    result = json.loads((ROOT / "docs/results/benchmark_self_check.json").read_text())
    assert self_check.markdown(result) in (ROOT / "docs/benchmarks.md").read_text()
    (found,) = result["batch_sizes"].values()
    assert {name: found["shape"][name] for name in ("width", "layers")} == {"width": 768, "layers": 12}
    assert found["speedup"]["median"] > 2
