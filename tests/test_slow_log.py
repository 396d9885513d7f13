"""The log of `make test-slow`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.slow_tests import Recorder, main, table

ROOT = Path(__file__).parents[1]


def reported(recorder, name, *phases):
    for when, outcome in zip(("setup", "call", "teardown"), phases, strict=False):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when=when, outcome=outcome, duration=1.5))


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "log.json")
    reported(recorder, "tests/a.py::test_one", "passed", "passed", "passed")
    reported(recorder, "tests/a.py::test_two[x::y]", "passed", "failed", "passed")
    reported(recorder, "tests/b.py::test_three", "passed", "passed", "failed")
    recorder.pytest_runtest_logreport(
        SimpleNamespace(nodeid="tests/b.py::test_four", when="setup", outcome="skipped", duration=0.0)
    )
    reported(recorder, "tests/b.py::test_five", "failed")
    return recorder


def test_every_phase_counts(recorder):
    recorder.pytest_sessionfinish(1)
    log = json.loads(recorder.path.read_text())
    assert {name.partition("::")[2]: test["outcome"] for name, test in log["tests"].items()} == {
        "test_one": "passed",
        "test_two[x::y]": "failed",
        "test_three": "failed",
        "test_four": "skipped",
        "test_five": "failed",
    }
    assert log["ended"] is True
    assert log["tests"]["tests/a.py::test_one"]["seconds"] == 4.5
    assert table(log).splitlines()[2:] == [
        "| `tests/a.py` | 2 | 1 | 1 | 0 | 9 |",
        "| `tests/b.py` | 3 | 0 | 2 | 1 | 6 |",
        "| **all** | 5 | 1 | 3 | 1 | 15 |",
    ]


def test_the_log_is_there_before_the_end(recorder):
    log = json.loads(recorder.path.read_text())
    assert log["ended"] is False
    assert "tests/a.py::test_two[x::y]" in log["tests"]


def test_a_part_of_the_tests_is_not_taken_over(tmp_path):
    recorder = Recorder(tmp_path / "log.json", ["tests/faults"])
    reported(recorder, "tests/faults/a.py::test_one", "passed", "passed", "passed")
    recorder.pytest_sessionfinish(0)
    with pytest.raises(ValueError, match=r"log\.json is of tests/faults only"):
        main(["--page", "--log", str(recorder.path)])


@pytest.mark.parametrize(
    ("status", "message"), [(2, "incomplete"), (1, "3 tests failed, the first is tests/a.py::test_two")]
)
def test_only_a_whole_run_without_failures_is_taken_over(recorder, status, message):
    recorder.pytest_sessionfinish(status)
    with pytest.raises(ValueError, match=message):
        main(["--page", "--log", str(recorder.path)])


def test_the_page_holds_the_last_whole_run():
    log = json.loads((ROOT / "docs" / "results" / "slow_tests.json").read_text())
    assert log["ended"]
    assert not any(test["outcome"] == "failed" for test in log["tests"].values())
    assert table(log) in (ROOT / "docs" / "reliability.md").read_text()
