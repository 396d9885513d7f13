"""`scripts/benchmark.py`: finds its benchmarks, keeps its sections, and refuses to time what is wrong."""

import argparse
import json
import math

import pytest
import torch

from scripts import benchmark
from scripts.benchmarks import smile_head
from scripts.page_sections import replace_section
from tests.tolerances import close

TINY = smile_head.Shape(B=4, V=300, D=16, prompt=2, mean=5, std=1, shortest=3, longest=8)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(smile_head, "SHAPES", {"tiny": TINY})


def test_finds_the_benchmarks_by_their_functions():
    found = benchmark.benchmarks()
    assert "smile_head" in found
    assert all(summary for summary in found.values())
    assert "step_models" not in found  # a helper, not a benchmark


def test_runs_one_and_renews_its_section(tiny, tmp_path, capfd):
    page, output = tmp_path / "benchmarks.md", tmp_path / "results" / "smile_head.json"
    page.write_text("# Benchmarks\n\n<!-- begin smile_head -->\nold\n<!-- end smile_head -->\n\nkept\n")
    arguments = ["--write", "--page", str(page), "smile_head", "--rounds", "2", "--output", str(output)]
    threads = torch.get_num_threads()
    assert benchmark.main(arguments) == 0
    assert torch.get_num_threads() == threads
    shape = json.loads(output.read_text())["shapes"]["tiny"]
    for head in ("trainable", "frozen"):
        assert set(shape[head]["seconds"]) == set(smile_head.METHODS)
        assert shape[head]["transient_share_of_algorithm_1"]["smile"] < 1
        assert "cross-entropy of supervised rows / SMILE" in shape[head]["ratios"]
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("kept\n")
    assert "Algorithm 1 / SMILE" in text
    assert "Algorithm 1 / SMILE" in capfd.readouterr().out


def test_a_new_section_goes_to_the_end():
    page = replace_section("# Benchmarks\n", "a", "one")
    page = replace_section(page, "b", "two")
    assert replace_section(page, "a", "three").count("begin a") == 1
    assert page.index("one") < page.index("two")


def test_a_wrong_loss_is_not_timed(tiny, monkeypatch):
    wrong = {**smile_head.METHODS, "smile": smile_head.cross_entropy}
    monkeypatch.setattr(smile_head, "METHODS", wrong)
    with pytest.raises(RuntimeError, match="gradients are wrong"):
        smile_head.run(argparse.Namespace(shapes=["tiny"], rounds=1, seed=0, output=None))


@pytest.mark.parametrize("name", sorted(benchmark.benchmarks()))
def test_every_benchmark_has_one_set_of_options(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([name, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.count(" --output OUTPUT") == 1


def test_an_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err


def test_cross_entropy_of_supervised_rows_by_a_plain_loop():
    hidden, weight, labels = smile_head._batch(TINY, 3)
    losses = []
    for states, row in zip(hidden.double(), labels.tolist(), strict=True):
        for state, label in zip(states, row, strict=True):
            if label != -100:
                scores = (weight.double() @ state).tolist()
                losses.append(math.log(sum(map(math.exp, scores))) - scores[label])
    found = float(smile_head.supervised_cross_entropy(hidden, weight, labels))
    assert found == close(sum(losses) / len(losses), dtype="float32", magnitude=10)
