"""The runs of `make test-machines`, and their table."""

import json

import pytest

from scripts import test_machines as machines
from tests.planted_faults import ROOT, plant

RESULT = {"revision": "a" * 40, "passed": 3, "failed": 0, "skipped": 1, "failures": [], "seconds": 61}


def results(**changes):
    made = {name: {**RESULT, "torch_capability": "AVX2", "threads": 1} for name in machines.CONFIGURATIONS}
    return {**made, **changes}


def test_every_test_file_is_run_or_left_out_with_a_reason():
    chosen = machines.chosen_files()
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    left_out = every - set(chosen)
    assert len(chosen) == len(set(chosen))
    assert set(chosen) <= every
    for name, why in machines.LEFT_OUT.items():
        assert (ROOT / name).exists(), name
        assert why.endswith("."), name
        assert any(file == name or file.startswith(f"{name}/") for file in left_out), name
    for folder in ("losses", "rewards", "metrics", "captioners", "trainers", "numerics"):
        assert any(file.startswith(f"tests/{folder}/") for file in chosen), folder


def test_a_seed_shuffles_the_files_and_loses_none():
    plain, one, again, other = (machines.chosen_files(seed=seed) for seed in (None, 1, 1, 2))
    assert plain == sorted(plain)
    assert one == again
    assert len({tuple(order) for order in (plain, one, other)}) == 3
    assert sorted(one) == sorted(other) == plain


def test_a_new_test_file_is_run(tmp_path):
    root = plant(tmp_path, {"tests/new/test_a.py": "", "tests/new/helper.py": "", "tests/test_b.py": ""})
    assert machines.chosen_files(root) == ["tests/new/test_a.py", "tests/test_b.py"]


@pytest.mark.slow  # a fresh process per configuration
def test_a_configuration_computes_as_it_says(tmp_path):
    """One real run: the variables arrive, and what passes, fails and is skipped is counted."""
    code = """
import pytest, torch
def test_capability(): assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
def test_that_fails(): assert False
@pytest.mark.skip(reason="no need")
def test_that_is_skipped(): ...
@pytest.mark.slow
def test_slow(): assert False
"""
    planted = plant(tmp_path, {"test_a.py": code}) / "test_a.py"
    found = machines.run("aten-default", tmp_path, [str(planted)])
    assert {key: found[key] for key in ("passed", "failed", "skipped", "status")} == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "status": 1,
    }
    assert [name.partition("::")[2] for name in found["failures"]] == ["test_that_fails"]
    assert found["torch_capability"] == "DEFAULT"
    assert not (tmp_path / "aten-default.json").exists()  # a part is not a result


def test_configurations_run_the_files_in_different_orders():
    configurations = machines.CONFIGURATIONS.values()
    assert len({configuration.seed for configuration in configurations}) == len(configurations) == 6


def test_configurations_without_their_cpu_flag_are_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "has_cpu_flag", lambda flag: flag != "avx512bw")
    monkeypatch.setattr(machines, "revision", lambda: RESULT["revision"])
    monkeypatch.setattr(machines.subprocess, "run", None)
    found = machines.run("aten-avx512", tmp_path)
    assert found["reason"] == "this processor has no avx512bw"
    row = next(
        line
        for line in machines.section(machines.merge(results(**{"aten-avx512": found}))).splitlines()
        if "aten-avx512" in line
    )
    assert "not run: this processor has no avx512bw" in row


def test_stopped_run_continues_with_the_missing_configurations(tmp_path, monkeypatch):
    ran = []

    def run(name, output, tests):
        ran.append(name)
        result = results()[name]
        (output / f"{name}.json").write_text(json.dumps(result))
        return result

    page = plant(tmp_path, {"page.md": "<!-- begin machines -->\n<!-- end machines -->\n"}) / "page.md"
    monkeypatch.setattr(machines, "run", run)
    monkeypatch.setattr(machines, "revision", lambda: RESULT["revision"])
    monkeypatch.setattr(machines, "PAGE", page)
    monkeypatch.setattr(machines, "RESULTS", tmp_path / "results.json")
    here, first = ["--output", str(tmp_path)], ["aten-avx512", "two-threads"]
    assert machines.main([*here, "--only", *first]) == 0
    assert ran == first
    assert not machines.RESULTS.exists()
    (tmp_path / "aten-avx2.json").write_text(json.dumps({**RESULT, "revision": "b" * 40}))  # of another revision
    with pytest.raises(ValueError, match=r"aten-default, aten-avx2, .*has no result"):
        machines.main([*here, "--page"])
    assert machines.main(here) == 0
    assert ran == [*first, *(name for name in machines.CONFIGURATIONS if name not in first)]
    assert machines.main(["--check"]) == 0
    assert (
        "| aten-avx2: torch with AVX2 | `ATEN_CPU_CAPABILITY=avx2` | 2 | AVX2 | 3 | 0 | 1 | 61 | `aaaaaaaa` |"
        in page.read_text()
    )
    page.write_text(page.read_text().replace("| 3 |", "| 4 |", 1))
    assert machines.main(["--check"]) == 1


def test_results_of_earlier_revisions_are_kept_on_demand(monkeypatch, tmp_path):
    monkeypatch.setattr(machines, "revision", lambda: RESULT["revision"])
    earlier = {**RESULT, "revision": "b" * 40}
    found = {
        "aten-avx2": earlier,
        "two-threads": {**earlier, "failures": ["tests/a.py::test_b"]},
        "aten-default": RESULT,
    }
    plant(tmp_path, {f"{name}.json": json.dumps(result) for name, result in found.items()})
    assert list(machines.finished(tmp_path)) == ["aten-default"]
    assert list(machines.finished(tmp_path, keep=True)) == ["aten-default", "aten-avx2"]
    assert "`bbbbbbbb`" in machines.section(
        machines.merge(results(**{"aten-avx2": {**results()["aten-avx2"], **earlier}}))
    )


def test_changed_files_are_not_a_revision(monkeypatch, tmp_path):
    monkeypatch.setattr(machines, "installed_versions", lambda: {"git_revision": "abc+changes"})
    assert machines.revision() is None
    plant(tmp_path, {"two-threads.json": json.dumps({**RESULT, "revision": None})})
    assert machines.finished(tmp_path) == {}


def test_failures_and_gaps_make_no_page():
    with pytest.raises(ValueError, match=r"two-threads: 1 tests failed, the first is tests/a.py::test_b"):
        machines.merge(results(**{"two-threads": {**RESULT, "failures": ["tests/a.py::test_b"]}}))
    with pytest.raises(ValueError, match="two-threads has no result"):
        machines.merge({name: result for name, result in results().items() if name != "two-threads"})
