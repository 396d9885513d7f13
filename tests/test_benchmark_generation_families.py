"""`scripts/benchmark.py generation_families`: every family is timed, and the page has the committed numbers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin

from scripts import benchmark
from scripts.benchmarks import generation_families

ROOT = Path(__file__).parents[1]


def test_both_loops_are_timed_and_the_section_is_written(tmp_path):
    page, output = tmp_path / "page.md", tmp_path / "families.json"
    line = ["--write", "--page", str(page), "generation_families", "--families", "blip", "llava", "--rounds", "2"]
    assert benchmark.main([*line, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["families"]
    assert set(found) == {"blip", "llava"}
    for family in found.values():
        for kind in generation_families.KINDS:
            assert family[kind]["milliseconds"].keys() == {"ours", "transformers"}
            assert len(family[kind]["speedup"]["values"]) == 2
    assert "| blip | " in page.read_text()


def test_captions_that_end_early_are_not_timed(monkeypatch):
    def short(self, input_ids, **kwargs):
        return torch.cat([input_ids, torch.full_like(input_ids[:, :1], 7)], 1)

    monkeypatch.setattr(GenerationMixin, "_sample", short)
    with pytest.raises(AssertionError, match=r"wrote captions of \[1, 1, .*\] tokens, not"):
        generation_families.measure("blip", rounds=1)


def test_the_page_has_the_committed_numbers():
    result = json.loads((ROOT / "docs" / "results" / "benchmark_generation_families.json").read_text())
    assert generation_families.markdown(result) in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert set(result["families"]) == set(generation_families.ALL)
