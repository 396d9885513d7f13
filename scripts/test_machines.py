"""Runs the tests with the instruction sets of other machines: `make test-machines`.

    python scripts/test_machines.py                        # configurations without a result of this revision; updates the page
    python scripts/test_machines.py --only aten-default    # one configuration; the others keep their results
    python scripts/test_machines.py --only two-threads --tests tests/losses    # a part, to debug; stores no result
    python scripts/test_machines.py --page                 # writes the existing results to docs/
    python scripts/test_machines.py --check                # verifies that docs/reproducibility.md shows the results

A processor with another vector width adds the same numbers in another order. Environment variables make torch, oneDNN and
MKL do the same on this machine. The result of each configuration is written to outputs/machines/, so a stopped run continues
with the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.utils.io import atomic_write_text, write_json
from scripts.fault_campaign import LIBRARIES
from scripts.machine_facts import has_cpu_flag, library_versions, processor_name
from scripts.omitted_machine_tests import LEFT_OUT
from scripts.page_sections import replace_section
from scripts.slow_tests import Recorder

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "outputs" / "machines"
RESULTS = ROOT / "docs" / "results" / "test_machines.json"
PAGE = ROOT / "docs" / "reproducibility.md"
COMMAND = "make test-machines"
WORKERS = 2


@dataclass(frozen=True)
class Configuration:
    """One configuration of the math libraries."""

    what: str  # description in the table
    # Variables that the libraries read when they are loaded.
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0  # seed of the order of the test files
    needs: str = ""  # flag of the processor that it requires


CONFIGURATIONS: dict[str, Configuration] = {
    "aten-default": Configuration("torch without AVX", {"ATEN_CPU_CAPABILITY": "default"}, seed=1),
    "aten-avx2": Configuration("torch with AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}, seed=2, needs="avx2"),
    "aten-avx512": Configuration("torch with AVX-512", {"ATEN_CPU_CAPABILITY": "avx512"}, seed=3, needs="avx512bw"),
    "libraries-avx2": Configuration(
        "oneDNN and MKL with AVX2",
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_CBWR": "AVX2"},
        seed=4,
        needs="avx2",
    ),
    "libraries-sse4": Configuration(
        "oneDNN with SSE4.1, MKL with SSE4.2",
        {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "SSE4_2"},
        seed=5,
    ),
    "two-threads": Configuration("2 threads each", {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, seed=6),
}
"""Each configuration has a different order of files. This reveals tests that fail occasionally or only after another
test."""


def chosen_files(root: Path = ROOT, seed: int | None = None) -> list[str]:
    """Test files that depend on how numbers are computed."""
    found = sorted(path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py"))
    found = [name for name in found if not any(name == out or name.startswith(f"{out}/") for out in LEFT_OUT)]
    if seed is not None:
        random.Random(seed).shuffle(found)
    return found


class _Log(Recorder):
    """Writes once, at the end, because a configuration is always repeated completely."""

    def write(self) -> None:
        if self.ended:
            super().write()


def run_here(name: str, log: Path, tests: Sequence[str]) -> int:
    """Run a configuration in this process, whose variables are set."""
    import torch

    asked = list(tests) or chosen_files(seed=CONFIGURATIONS[name].seed)
    recorder = _Log(log, asked)
    options = ["-m", "not slow", "-n", str(WORKERS), "--dist", "loadfile", "-p", "no:cacheprovider"]
    options += ["--no-loadscope-reorder"]  # otherwise xdist starts with the largest files
    status = int(pytest.main([*options, *asked], plugins=[recorder]))
    if recorder.ended:
        result = summary(json.loads(log.read_text(encoding="utf-8")))
        result |= {"status": status, "torch_capability": torch.backends.cpu.get_cpu_capability()}
        write_json(log, result | {"threads": torch.get_num_threads()})
    return status


def summary(log: Mapping[str, Any]) -> dict[str, Any]:
    """A log of the recorder without the tests that passed."""
    outcomes = [test["outcome"] for test in log["tests"].values()]
    failed = sorted(name for name, test in log["tests"].items() if test["outcome"] == "failed")
    counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
    return {"revision": log["revision"], **counts, "failures": failed, "seconds": log["seconds"]}


def run(name: str, output: Path, tests: Sequence[str] = ()) -> dict[str, Any] | None:
    """Run a configuration in a separate process. Returns its result; None if pytest did not finish."""
    configuration = CONFIGURATIONS[name]
    path = output / (f"{name}.json" if not tests else f"{name}.part.json")
    if not has_cpu_flag(configuration.needs):
        result = {"revision": revision(), "reason": f"this processor has no {configuration.needs}"}
        write_json(path, result)
        return result
    path.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--here", name, str(path)]
    command += ["--tests", *tests] if tests else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **configuration.environment}
    print(f"{name}: {configuration.what}", flush=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def revision() -> str | None:
    """The commit of the tested code; None if files have changed since."""
    found = installed_versions().get("git_revision")
    return None if found is None or "+" in found else found


def finished(output: Path, *, keep: bool = False) -> dict[str, dict[str, Any]]:
    """Results by configuration: those of this revision, and with `keep` those of earlier ones without a failure."""
    found, now = {}, revision()
    for name in CONFIGURATIONS:
        path = output / f"{name}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if result is None or result["revision"] is None:
            continue
        if result["revision"] == now or (keep and not result.get("failures")):
            found[name] = result
    return found


def merge(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """All results in one, the content of docs/results/test_machines.json."""
    missing = [name for name in CONFIGURATIONS if name not in results]
    if missing:
        raise ValueError(f"{', '.join(missing)} has no result of this revision. Commit, and run `{COMMAND}`.")
    failed = {name: result["failures"] for name, result in results.items() if result.get("failures")}
    if failed:
        name, tests = next(iter(failed.items()))
        raise ValueError(f"{name}: {len(tests)} tests failed, the first is {tests[0]}. Fix them and run `{COMMAND}`.")
    return {
        "command": COMMAND,
        "machine": {"processor": processor_name(), "architecture": platform.machine(), "cpus": os.cpu_count()},
        "python": platform.python_version(),
        "versions": library_versions(*LIBRARIES),
        "workers": WORKERS,
        "left_out": LEFT_OUT,
        "configurations": {name: _row(name, results[name]) for name in CONFIGURATIONS},
    }


def _row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    configuration = CONFIGURATIONS[name]
    kept = {key: value for key, value in result.items() if key != "status"}
    return {
        "what": configuration.what,
        "environment": dict(configuration.environment),
        "seed": configuration.seed,
        **kept,
    }


def section(merged: Mapping[str, Any]) -> str:
    """The table of docs/reproducibility.md."""
    lines = [
        "| configuration | environment | order | torch computes with | passed | failed | skipped | seconds | revision |",
        "|:--|:--|--:|:--|--:|--:|--:|--:|:--|",
    ]
    seconds = 0
    for name, row in merged["configurations"].items():
        variables = " ".join(f"`{key}={value}`" for key, value in row["environment"].items())
        if "reason" in row:
            lines.append(
                f"| {name}: {row['what']} | {variables} | {row['seed']} | not run: {row['reason']} | | | | | |"
            )
            continue
        counts = " | ".join(str(row[key]) for key in ("passed", "failed", "skipped", "seconds"))
        seconds += row["seconds"]
        computes = f"{row['seed']} | {row['torch_capability']} | {counts} | `{row['revision'][:8]}`"
        lines.append(f"| {name}: {row['what']} | {variables} | {computes} |")
    named = ", ".join(f"{name} {number}" for name, number in merged["versions"].items())
    machine = merged["machine"]
    made = (
        f"{seconds / 60:.0f} minutes on {machine['processor']}, {machine['cpus']} cores, {merged['workers']} processes; "
        f"Python {merged['python']}, {named}."
    )
    left = "\n".join(f"- {why} {', '.join(names)}" for why, names in _by_reason(merged["left_out"]).items())
    return "\n".join([*lines, "", made, "", "Test files that are not run:", "", left])


def _by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in left_out.items():
        found.setdefault(why, []).append(f"`{name}`")
    return found


def page_with(merged: Mapping[str, Any]) -> str:
    """docs/reproducibility.md with the table of these results."""
    return replace_section(PAGE.read_text(encoding="utf-8"), "machines", section(merged))


def main(argv: Sequence[str] | None = None) -> int:
    """Run configurations, write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, metavar="NAME", help=", ".join(CONFIGURATIONS))
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[],
        help="files or folders (default: all that depend on how numbers are computed)",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the results of each configuration")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep results of earlier revisions in which nothing failed; the table names them",
    )
    parser.add_argument("--page", action="store_true", help="write the page from existing results")
    parser.add_argument("--check", action="store_true", help="compare the page with docs/results; runs nothing")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.here:
        return run_here(arguments.here[0], Path(arguments.here[1]), arguments.tests)
    if arguments.check:
        return _check()
    results = finished(arguments.output, keep=arguments.keep)
    if not arguments.page:
        wanted = arguments.only or [name for name in CONFIGURATIONS if name not in results]
        made = {name: run(name, arguments.output, arguments.tests) for name in wanted}
        failed = [name for name, result in made.items() if result is None or result.get("failures")]
        if failed or arguments.only:
            print(f"failed: {', '.join(failed)}" if failed else "no failures")
            return 1 if failed else 0
        results = finished(arguments.output, keep=arguments.keep)
    merged = merge(results)
    write_json(RESULTS, merged)
    atomic_write_text(PAGE, page_with(merged))
    return 0


def _check() -> int:
    """Whether the page shows the results; there may be none yet."""
    page = PAGE.read_text(encoding="utf-8")
    made = page_with(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.is_file() else page
    if made == page:
        return 0
    print(f"{PAGE.name} does not show {RESULTS.name}. Run python scripts/test_machines.py --page.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
