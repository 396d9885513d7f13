"""The benchmark of a GPU, run on the CPU at tiny shapes: what it measures, compares, refuses and leaves out."""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scripts import benchmark
from scripts.benchmarks import gpu, gpu_data, gpu_timing
from scripts.benchmarks.gpu_heads import HEADS, measure_heads, optional_paths
from scripts.benchmarks.gpu_timing import Budget, OverBudgetError, measure, ready
from tests.tolerances import close, resolution, within

PAGE = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
OPTIONAL = ["Liger-Kernel", "cut-cross-entropy", "TRL, chunked"]


@pytest.fixture
def tiny():
    return {"rounds": 2, "warm_up": 1, "seed": 0, "budget": Budget.of(600)}


@pytest.fixture
def run_gpu(tmp_path):
    """Run the command on the CPU at tiny shapes; its exit code, its JSON, and the section that it writes."""

    def run(*words):
        page, output = tmp_path / "page.md", tmp_path / "gpu.json"
        line = ["--page", str(page), "gpu", "--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--warm_up", "1"]
        code = benchmark.main([*line, "--output", str(output), *words])
        return code, json.loads(output.read_text()), page.read_text()

    return run


def without_libraries(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers", "cut_cross_entropy", "trl.kernels"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises ImportError


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins of both libraries that are not installed, with their signatures; what they were called with."""
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
        benchmark.main(["gpu"])
    said = str(end.value)
    assert "no CUDA device" in said
    assert "\n" not in said
    assert said.endswith("tiny.")
    assert capsys.readouterr().out == ""
    assert ready("cpu") is None


def test_every_section_at_tiny_shapes(run_gpu, compiled_eagerly, monkeypatch):
    without_libraries(monkeypatch)
    code, result, page = run_gpu()
    assert [found for shapes in result["sections"].values() for found in shapes.values() if "steps" not in found] == []
    assert code == result["failed"] == 0
    assert result["dtype"] == "bf16"
    steps = {section: shapes["tiny"]["steps"] for section, shapes in result["sections"].items()}
    assert steps.keys() == gpu.SECTIONS.keys()
    for measured in [one for section in steps.values() for one in section.values()]:
        assert 0 <= measured["seconds"]["low"] <= measured["seconds"]["median"] <= measured["seconds"]["high"]
        assert measured["peak_bytes"] is None
        assert measured["rounds"] == 1
    assert steps["rl_step"].keys() == {"ours", "ours-cached", "naive"}
    assert steps["smile_step"].keys() == {"smile", "mle", "mle-tapped"}
    kinds = ("COCO", "20 tokens")
    assert steps["generation"].keys() == {f"{loop}, {kind}" for loop in ("ours", "transformers") for kind in kinds}
    assert steps["compiled_generation"].keys() == {"ours", "ours, compile_decoding", "transformers, static cache"}
    decoders = ["decode, processor and copy to the device", "image_decoder=torchvision and copy"]
    caches = [f"cache_pixels={form} and copy" for form in ("uint8", "jpeg")]
    assert steps["loader"].keys() == {"decode", "decode and processor", *decoders, *caches}
    assert compiled_eagerly  # something was compiled
    assert {"frozen, smile", "trainable, cross-entropy, supervised rows"} <= steps["smile_head"].keys()
    assert "`gpu`: a test of its code on a CPU" in page
    assert f"Not installed, and so not compared: {', '.join(OPTIONAL)}." in page
    assert all(f"### `{section}`" in page for section in steps)
    rows = [line for line in page.splitlines() if line.startswith("| tiny")]
    assert len(rows) == sum(len(section) for section in steps.values())
    assert {row.count("|") for row in rows} == {6}


@pytest.fixture
def compiled_eagerly(monkeypatch):
    """Trace without a compiler, which takes seconds; the functions that were compiled."""
    compile_, functions = torch.compile, []

    def compiled(function, **kwargs):
        functions.append(function)
        return compile_(function, **{**kwargs, "backend": "eager", "mode": None})

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compiled)
    yield functions
    torch.compiler.reset()


def test_libraries_are_compared_where_they_are_installed(libraries, tiny):
    called, _ = libraries
    found = measure_heads("tiny", "cpu", torch.float32, **tiny)
    assert found["not_installed"] == []
    assert found["refused"] == {}
    assert {f"{head}, {name}" for head in ("trainable", "frozen") for name in OPTIONAL} <= found["steps"].keys()
    assert {name for name, *_ in called} == {"liger", "cut"}
    ((rows, width),) = {shape for _, shape, _ in called}
    assert rows % HEADS["tiny"].B == 0
    assert width == HEADS["tiny"].D
    assert all(labels == (rows,) for *_, labels in called)
    assert max(found["largest_difference"].values()) < resolution(10)


def test_wrong_and_incompatible_libraries_are_not_timed_and_named(libraries, tiny):
    _, cut = libraries
    right = cut.linear_cross_entropy
    cut.linear_cross_entropy = lambda *arguments, **keywords: 1.1 * right(*arguments, **keywords)

    def changed(*arguments, **keywords):
        raise TypeError("unexpected keyword argument")

    sys.modules["liger_kernel.transformers"].LigerFusedLinearCrossEntropyLoss.forward = changed
    found = measure_heads("tiny", "cpu", torch.float32, **tiny)
    assert "differs from plain logits" in found["refused"]["cut-cross-entropy"]
    assert found["refused"]["Liger-Kernel"] == "TypeError: unexpected keyword argument"
    assert not any("cut" in name or "Liger" in name for name in found["steps"])
    lines = gpu._lines("tiny", found)
    assert [line for line in lines if "not timed: TypeError" in line]
    assert {line.count("|") for line in lines} == {6}


def test_a_wrong_loss_of_ours_fails_the_run(run_gpu, monkeypatch, capsys):
    from scripts.benchmarks import gpu_heads

    right = gpu_heads.fused_smile_loss
    monkeypatch.setattr(gpu_heads, "fused_smile_loss", lambda *args, **kwargs: 1.1 * right(*args, **kwargs))
    code, result, page = run_gpu("--sections", "smile_head", "loader")
    assert code == result["failed"] == 1
    assert "smile differs from plain logits" in result["sections"]["smile_head"]["tiny"]["failed"]
    assert "steps" in result["sections"]["loader"]["tiny"]  # the other sections are measured
    assert "failed: RuntimeError: smile differs" in page
    assert "smile_head, tiny: failed" in capsys.readouterr().err


def test_missing_libraries_are_named(monkeypatch):
    without_libraries(monkeypatch)
    assert optional_paths() == ({}, OPTIONAL)


def test_other_pixels_than_those_of_the_processor_fail_the_loader(run_gpu, monkeypatch):
    before = gpu_data.DecodedPixels.__getitem__
    monkeypatch.setattr(gpu_data.DecodedPixels, "__getitem__", lambda self, row: before(self, row) ^ 1)
    code, result, _ = run_gpu("--sections", "loader")
    assert code == result["failed"] == 1
    expected = "RuntimeError: The pixels of image_decoder=torchvision are not those of the image processor."
    assert result["sections"]["loader"]["tiny"]["failed"] == expected


# Budgets


def test_a_section_over_its_budget_is_reported(run_gpu, monkeypatch, capsys):
    slow = gpu.Section(lambda *args, **kwargs: time.sleep(60), {"tiny": None}, 1.0)
    monkeypatch.setattr(gpu, "SECTIONS", {"slow": slow, "loader": gpu.SECTIONS["loader"]})
    start = time.monotonic()
    code, result, page = run_gpu("--sections", "slow", "loader", "--minutes", "0.05")
    assert time.monotonic() - start < 30
    assert code == 0
    assert result["sections"]["slow"]["tiny"] == {"left_out": "it was interrupted after its 3 s"}
    assert "| tiny | left out: it was interrupted after its 3 s |" in page
    assert "slow, tiny: left out: it was interrupted" in capsys.readouterr().err


def test_shares_add_up_and_stay_below_eight_minutes():
    assert sum(section.share for section in gpu.SECTIONS.values()) == close(1.0)
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    settings = parser.parse_args([])
    assert settings.minutes < 8
    assert settings.write
    assert "tiny" not in settings.shapes
    assert settings.sections == list(gpu.SECTIONS)


def test_rounds_shrink_to_the_budget_and_too_few_are_refused(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def work():
        now[0] += 2.0

    found = measure({"work": work}, "cpu", rounds=20, warm_up=1, budget=Budget(20.0))
    assert found["work"]["rounds"] == 8  # 9 rounds of 2 s fit into 18 s, and one is for memory
    with pytest.raises(OverBudgetError, match=r"one round takes 2\.0 s, so 3 of them do not fit into the 5\.0 s"):
        measure({"work": work}, "cpu", rounds=20, warm_up=1, budget=Budget.of(7.0))


def test_a_part_leaves_its_time_to_those_after_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    whole = Budget.of(30)
    assert whole.part(3).left == close(10)
    now[0] = 4
    assert whole.part(2).left == close(13)
    now[0] = 31
    with pytest.raises(OverBudgetError, match="no time was left"), whole.part(1).enforced():
        pytest.fail("it ran")


def test_the_timer_of_a_test_survives_a_budget():
    with Budget.of(100).enforced():
        inner = signal.getitimer(signal.ITIMER_REAL)[0]
        handler = signal.getsignal(signal.SIGALRM)
        with Budget.of(5).enforced():
            assert signal.getitimer(signal.ITIMER_REAL)[0] == within(5, 1)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= inner


def test_work_is_done_in_turn_and_only_timed_rounds_count():
    done = []
    works = {name: functools.partial(done.append, name) for name in "ab"}
    found = measure(works, "cpu", rounds=3, warm_up=2, seed=1)
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
    lines = gpu._lines("shape", {"steps": found})
    assert any("out of memory" in line for line in lines)
    assert {line.count("|") for line in lines} == {6}


def test_work_that_fails_does_not_lose_the_others(run_gpu, monkeypatch):
    def broken():
        raise RuntimeError("no kernel\nimage")

    def two(*args, rounds, warm_up, budget, **kwargs):
        works = {"good": lambda: None, "bad": broken}
        return {"steps": measure(works, "cpu", rounds=rounds, warm_up=warm_up, budget=budget)}

    monkeypatch.setattr(gpu, "SECTIONS", {"two": gpu.Section(two, {"tiny": None}, 1.0)})
    code, result, page = run_gpu("--sections", "two")
    assert code == result["failed"] == 1
    assert result["sections"]["two"]["tiny"]["steps"]["bad"] == {"failed": "RuntimeError: no kernel image"}
    assert result["sections"]["two"]["tiny"]["steps"]["good"]["rounds"] == 1
    assert "| tiny | bad | failed: RuntimeError: no kernel image | | |" in page


def test_a_shape_that_does_not_fit_is_said(run_gpu, monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(gpu, "SECTIONS", {"mining": gpu.Section(too_large, {"tiny": None}, 1.0)})
    code, result, page = run_gpu("--sections", "mining")
    assert (code, result["sections"]["mining"]["tiny"]) == (0, {"left_out": "out of memory"})
    assert "| tiny | left out: out of memory |" in page


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
    found = gpu_timing.measure({"work": lambda: log.append("work")}, "cuda", rounds=1, warm_up=0)
    assert found["work"] == {"seconds": {"median": 2.5, "low": 2.5, "high": 2.5}, "rounds": 1, "peak_bytes": 64}
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
    for section in gpu.SECTIONS.values():
        assert "tiny" in section.shapes
        assert len(section.shapes) > 1


def test_the_page_says_what_was_not_run():
    section = PAGE.split("<!-- begin gpu -->")[1].split("<!-- end gpu -->")[0]
    if not gpu.OUTPUT.exists():
        assert "`gpu`: not run" in section
    assert "python scripts/benchmark.py gpu" in section
    assert set(gpu.SECTIONS) <= set(section.replace("`", " ").split())
