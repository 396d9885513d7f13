"""`scripts/benchmark.py loader`: paths with other pixels are not timed, and the page has the committed numbers."""

import json
from pathlib import Path

import pytest
import torch

from scripts import benchmark
from scripts.benchmarks import loader

ROOT = Path(__file__).parents[1]


def test_runs_and_writes_its_section(tmp_path):
    page, output = tmp_path / "benchmarks.md", tmp_path / "loader.json"
    threads = torch.get_num_threads()
    assert (
        benchmark.main(
            ["--write", "--page", str(page), "loader", "--sides", "32", "--rounds", "2", "--output", str(output)]
        )
        == 0
    )
    assert torch.get_num_threads() == threads
    found = json.loads(output.read_text())["sides"]["32"]
    assert set(found["milliseconds"]) == set(loader.PATHS)
    assert found["bytes"]["cache"] == 32 * 32 * 3
    for name in ("default", "torchvision", "cache"):
        assert found["differences"][name] == {"largest": 0.0, "mean": 0.0}
    assert 0 < found["differences"]["pillow"]["mean"] < found["differences"]["jpeg"]["mean"]
    assert len(found["over_pillow"]["cache"]["values"]) == 2
    assert all(title in page.read_text() for title in loader.PATHS.values())


def test_a_path_with_other_pixels_is_not_timed(monkeypatch):
    whole = loader.paths

    def wrong(folder, side):
        calls, size = whole(folder, side)
        return {**calls, "cache": lambda: calls["default"]() + 1e-6}, size

    monkeypatch.setattr(loader, "paths", wrong)
    with pytest.raises(RuntimeError, match="pixels of 'cache' are not those of the image processor"):
        loader.measure(32, rounds=1)


def test_the_page_has_the_committed_numbers_and_the_bars_hold():
    result = json.loads((ROOT / "docs" / "results" / "benchmark_loader.json").read_text())
    assert loader.markdown(result) in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert set(result["sides"]) == {"224", "384"}
    for found in result["sides"].values():
        for name, target in loader.TARGETS.items():
            assert found["over_pillow"][name]["quartiles"][0] >= target
        assert found["differences"]["pillow"]["largest"] < 2.5
        assert found["bytes"]["jpeg"] / found["bytes"]["cache"] < 0.11
