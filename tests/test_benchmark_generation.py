"""The benchmark of generation at a tiny shape: what it times, writes and refuses."""

import dataclasses
import json

import pytest
import torch

from hf_captionrl.captioners import decoding
from scripts import benchmark
from scripts.benchmarks import generation
from scripts.benchmarks.gpu_steps import TINY
from scripts.benchmarks.rl_models import build

SHAPE = dataclasses.replace(TINY, kind="clipcap", num_tokens=8)


def test_both_loops_are_timed_and_the_section_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "SHAPES", {"clipcap": SHAPE})
    page, output = tmp_path / "page.md", tmp_path / "generation.json"
    line = ["--write", "--page", str(page), "generation", "--shapes", "clipcap", "--rounds", "2"]
    assert benchmark.main([*line, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["shapes"]["clipcap"]
    for kind in generation.LENGTHS:
        assert found[kind]["seconds"].keys() == {"ours", "transformers"}
        assert len(found[kind]["speedup"]["values"]) == 2
        assert min(found[kind]["speedup"]["values"]) > 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| clipcap")]
    assert [row.split(" | ")[2] for row in rows] == ["COCO", "20 tokens"]


def test_captions_of_other_lengths_are_not_timed(tmp_path, monkeypatch):
    world = build(SHAPE, 0, tmp_path)
    monkeypatch.setattr(decoding, "draw_tokens", lambda scores, numbers: torch.full(numbers.shape, 7))
    lengths = torch.tensor([2, 3, 4, 5])
    assert generation.write(world, "ours", lengths).ids.eq(7).sum(1).tolist() == [1, 2, 3, 4]
    ending_at = generation.ending_at
    monkeypatch.setattr(generation, "ending_at", lambda planned: ending_at(planned + 1))
    with pytest.raises(AssertionError, match=r"ours wrote captions of \[3, 4, 5, 6\] tokens, not \[2, 3, 4, 5\]"):
        generation.write(world, "ours", lengths)
