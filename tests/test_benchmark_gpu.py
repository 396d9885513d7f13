"""The benchmark of a GPU, run on the CPU at tiny shapes: what it measures, compares, refuses and leaves out."""

from __future__ import annotations

import functools
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scripts import benchmark
from scripts.benchmarks import device, device_heads, device_timing
from scripts.benchmarks.device_heads import HEADS, measure_heads, optional_paths
from scripts.benchmarks.device_steps import MINES, RL_SHAPES, SCORERS
from scripts.benchmarks.device_timing import measure, ready
from tests.closeness import resolution

PAGE = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
TINY = {"rounds": 2, "warm_up": 1, "seed": 0}


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins of both libraries with their signatures; what they were called with."""
    called = []

    class Liger(torch.nn.Module):
        def __init__(self, ignore_index):
            super().__init__()
            self.ignore_index = ignore_index

        def forward(self, lin_weight, _input, target, bias=None):
            called.append(("liger", _input.shape, target.shape))
            return F.cross_entropy(_input @ lin_weight.T, target, ignore_index=self.ignore_index)

    def linear_cross_entropy(e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0):
        called.append(("cut", e.shape, targets.shape))
        return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)

    liger = types.ModuleType("liger_kernel.transformers")
    liger.LigerFusedLinearCrossEntropyLoss = Liger
    cut = types.ModuleType("cut_cross_entropy")
    cut.linear_cross_entropy = linear_cross_entropy
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", cut)
    return called, cut


def test_without_a_gpu_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        benchmark.main(["--device", "cuda"])
    said = str(end.value)
    assert "no CUDA device" in said
    assert "\n" not in said
    assert said.endswith("tiny.")
    assert capsys.readouterr().out == ""
    assert ready("cpu") is None


def test_every_part_at_tiny_shapes(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    output, page = tmp_path / "device.json", tmp_path / "page.md"
    words = ["--write", "--page", str(page), "--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--warm_up", "1"]
    assert benchmark.main([*words, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["parts"].keys() == device.PARTS.keys()
    assert result["parts"]["rl_step"]["tiny"]["steps"].keys() == {"ours", "ours-cached", "naive"}
    assert result["dtype"] == "bf16"
    for part, shapes in result["parts"].items():
        for measured in (
            [*shapes["tiny"]["steps"].values()] if part != "smile_head" else [shapes["tiny"]["frozen"]["smile"]]
        ):
            assert measured["seconds"]["low"] <= measured["seconds"]["median"] <= measured["seconds"]["high"]
            assert measured["peak_bytes"] is None
    text = page.read_text()
    assert "## On a GPU" in text
    assert "Not installed, and so not compared: Liger-Kernel, cut-cross-entropy." in text
    assert "<!-- begin device -->" in text


def test_libraries_are_compared_where_they_are_installed(libraries):
    called, _ = libraries
    found = measure_heads("tiny", "cpu", torch.float32, **TINY)
    assert found["not_installed"] == []
    assert {"Liger-Kernel", "cut-cross-entropy"} <= found["trainable"].keys()
    rows = HEADS["tiny"].B * found["T"]
    assert {name for name, *_ in called} == {"liger", "cut"}
    assert all(shape == (rows, HEADS["tiny"].D) and labels == (rows,) for _, shape, labels in called)
    assert max(found["largest_difference"].values()) < resolution(10)


def test_a_wrong_library_is_not_timed(libraries):
    _, cut = libraries
    right = cut.linear_cross_entropy
    cut.linear_cross_entropy = lambda *arguments, **keywords: 1.1 * right(*arguments, **keywords)
    with pytest.raises(RuntimeError, match="cut-cross-entropy differs from plain logits"):
        measure_heads("tiny", "cpu", torch.float32, **TINY)


def test_missing_libraries_are_named(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises ImportError
    assert optional_paths() == ({}, ["Liger-Kernel", "cut-cross-entropy"])


def test_work_is_done_in_turn_and_only_timed_rounds_count():
    done = []
    found = measure({name: functools.partial(done.append, name) for name in "ab"}, "cpu", rounds=3, warm_up=2, seed=1)
    assert sorted(done) == ["a"] * 5 + ["b"] * 5
    assert all(set(done[2 * i : 2 * i + 2]) == {"a", "b"} for i in range(5))
    assert found.keys() == {"a", "b"}


def test_what_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def too_large():
        raise torch.OutOfMemoryError("too large")

    found = measure({"small": lambda: None, "large": too_large}, "cpu", rounds=2, warm_up=0)
    assert found["large"] == {"out_of_memory": True}
    assert found["small"]["seconds"]["median"] >= 0
    assert any("out of memory" in line for line in device._lines("shape", found))


def test_a_gpu_is_timed_by_its_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 2500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 164)
    found = device_timing.measure({"work": lambda: log.append("work")}, "cuda", rounds=1, warm_up=0)
    assert found["work"] == {"seconds": {"median": 2.5, "low": 2.5, "high": 2.5}, "peak_bytes": 64}
    timed, peak = log[: log.index("wait") + 1], log[log.index("wait") + 1 :]
    assert timed == ["synchronize", "record", "work", "record", "wait"]
    assert peak.index("reset_peak_memory_stats") < peak.index("work")


def test_shapes_are_those_published():
    vocabulary_and_width = {name: (shape.V, shape.D) for name, shape in HEADS.items() if name != "tiny"}
    assert vocabulary_and_width == {
        "blip-base": (30_524, 768),
        "gpt2-clipcap": (50_257, 768),
        "llama-3-8b": (128_256, 4096),
        "llama-13b": (32_000, 5120),
    }
    parser_shapes = {*HEADS, *RL_SHAPES, *SCORERS, *MINES}
    assert "tiny" in parser_shapes
    assert device_heads.HEADS is HEADS


def test_the_page_says_what_was_not_run():
    section = PAGE.split("<!-- begin device -->")[1].split("<!-- end device -->")[0]
    if not (Path(__file__).parents[1] / "docs/results/benchmark_device.json").exists():
        assert "On a GPU: not run" in section
    assert "--device cuda" in section
