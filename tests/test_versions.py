"""The environments of `make test-versions` are those that pyproject.toml and constraints.txt promise."""

import json
import re
import tomllib

import pytest

from scripts import test_versions as versions
from tests.planted_faults import ROOT


def ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.match(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", line) for line in project["dependencies"]]
    return {match[1].lower().replace("_", "-"): (match[2], match[3]) for match in found}


def release(text):
    return tuple(int(part) for part in text.split("+")[0].split("."))


def test_lowest_environment_holds_the_lower_bounds():
    lowest = versions.pins("lowest")
    assert {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy"} <= set(lowest)
    assert all(ranges()[name][0] == version for name, version in lowest.items())


@pytest.mark.parametrize("name", ["middle", "newest"])
def test_environments_lie_within_the_ranges(name):
    pins = versions.pins(name)
    for package, (low, high) in ranges().items():
        if package in pins:
            assert release(pins[package]) >= release(low)
            assert high is None or release(pins[package]) < release(high)


def test_middle_environment_lies_between_the_others():
    lowest, newest = versions.pins("lowest"), versions.pins("newest")
    for package, version in versions.pins("middle").items():
        assert release(lowest[package]) < release(version) < release(newest[package])


def test_tested_files_exist():
    assert all((ROOT / name).is_file() for name in versions.TESTS)


def test_table_has_a_column_per_environment():
    row = {"passed": 3, "failed": 0, "skipped": 1, "revision": "a" * 40}
    results = {name: {**row, "versions": dict.fromkeys(versions.LIBRARIES, "1.2")} for name in ("lowest", "newest")}
    table = versions.section(results)
    assert table.splitlines()[0] == "| | lowest | newest |"
    assert "| tests skipped | 1 | 1 |" in table
    assert "`aaaaaaaaaaaa`" in table


def test_results_of_interrupted_runs_are_left_out(tmp_path):
    for name, result in (("lowest", {"passed": 1, "versions": {"torch": "2.7"}}), ("middle", {"ended": False})):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert list(versions.finished(tmp_path)) == ["lowest"]
