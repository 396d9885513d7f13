"""Runs the slow tests and writes a short log: `make test-slow`.

    python scripts/slow_tests.py                       # all of them; the log goes to outputs/slow_tests.json
    python scripts/slow_tests.py tests/faults          # a part
    python scripts/slow_tests.py --page                # the existing log, into docs/results/ and docs/reliability.md

The log is written after every test, because this program may be killed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.utils.io import write_json
from scripts.fault_campaign import LIBRARIES
from scripts.machine_facts import library_versions
from scripts.page_sections import write_section

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "outputs" / "slow_tests.json"
RESULTS = ROOT / "docs" / "results" / "slow_tests.json"
PAGE = ROOT / "docs" / "reliability.md"


class Recorder:
    """A pytest plugin that records the outcome of each test in a log."""

    def __init__(self, path: Path, asked: Sequence[str] = ("tests",)) -> None:
        self.path = path
        self.asked = list(asked)
        self.tests: dict[str, dict[str, Any]] = {}
        self.begun = time.monotonic()
        self.revision = installed_versions().get("git_revision")
        self.ended = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test; time and failures of setup and teardown count for the test."""
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            self.write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Record that every test was run."""
        self.ended = int(exitstatus) in (0, 1)
        self.write()

    def write(self) -> None:
        """Write the log."""
        made = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
        seconds = round(time.monotonic() - self.begun)
        log = {
            "ended": self.ended,
            "asked": self.asked,
            "seconds": seconds,
            "versions": library_versions(*LIBRARIES),
            "revision": self.revision,
            **made,
            "tests": self.tests,
        }
        write_json(self.path, log)


def table(log: Mapping[str, Any]) -> str:
    """A log as Markdown, one row per file."""
    files: dict[str, list[dict[str, Any]]] = {}
    for name, test in sorted(log["tests"].items()):
        files.setdefault(name.partition("::")[0], []).append(test)
    lines = ["| file | tests | passed | failed | skipped | seconds |", "|:--|--:|--:|--:|--:|--:|"]
    for title, tests in [
        *((f"`{file}`", tests) for file, tests in files.items()),
        ("**all**", [*log["tests"].values()]),
    ]:
        counts = " | ".join(
            str(sum(test["outcome"] == outcome for test in tests)) for outcome in ("passed", "failed", "skipped")
        )
        lines.append(f"| {title} | {len(tests)} | {counts} | {sum(test['seconds'] for test in tests):.0f} |")
    return "\n".join(lines)


def write_page(path: Path) -> None:
    """Write the existing log to docs/."""
    log = json.loads(path.read_text(encoding="utf-8"))
    if not log["ended"]:
        raise ValueError(f"The run of {path.name} is incomplete. Run `make test-slow` to its end.")
    if log.get("asked", ["tests"]) != ["tests"]:
        raise ValueError(f"{path.name} is of {' '.join(log['asked'])} only. Run `make test-slow`.")
    failed = [name for name, test in log["tests"].items() if test["outcome"] == "failed"]
    if failed:
        raise ValueError(f"{len(failed)} tests failed, the first is {failed[0]}. Fix them, and run `make test-slow`.")
    write_json(RESULTS, log)
    named = ", ".join(f"{name} {number}" for name, number in log["versions"].items())
    made = f"Python {log['python']}, {named}; {log['cpus']} CPU cores, shared with other work."
    section = f"{table(log)}\n\n{log['seconds'] / 60:.0f} minutes in one run. {made}"
    write_section(PAGE, "slow", section)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the slow tests, or write their log to docs/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders (default: all)")
    parser.add_argument("--log", type=Path, default=LOG, metavar="FILE", help="where the log goes")
    parser.add_argument("--page", action="store_true", help="write the existing log to docs/; runs nothing")
    arguments = parser.parse_args(argv)
    if arguments.page:
        write_page(arguments.log)
        return 0
    options = ["-m", "slow", "--timeout", "3600", "--durations", "10"]
    return int(pytest.main([*options, *arguments.tests], plugins=[Recorder(arguments.log, arguments.tests)]))


if __name__ == "__main__":
    sys.exit(main())
