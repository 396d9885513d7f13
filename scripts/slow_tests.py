"""Run the slow tests, and keep a short log: `make test-slow`.

    python scripts/slow_tests.py                       # all of them; the log goes to outputs/slow_tests.json
    python scripts/slow_tests.py tests/faults          # a part
    python scripts/slow_tests.py --page                # the log that is there, into docs/results/ and docs/reliability.md

The log is written after every test: this program may be killed, too.
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
from hf_captionrl.io import atomic_write_text, write_json
from hf_captionrl.reports.versions import installed_versions
from scripts.benchmark import replace_section
from scripts.fault_campaign import versions

__all__ = ["Recorder", "main", "table"]

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "outputs" / "slow_tests.json"
RESULTS = ROOT / "docs" / "results" / "slow_tests.json"
PAGE = ROOT / "docs" / "reliability.md"


class Recorder:
    """A plugin of pytest that writes down how each test ended.

    Args:
        path (`Path`): The log.
        asked (`Sequence[str]`): Files or folders that are run.
    """

    def __init__(self, path: Path, asked: Sequence[str] = ("tests",)) -> None:
        self.path = path
        self.asked = list(asked)
        self.tests: dict[str, dict[str, Any]] = {}
        self.begun = time.monotonic()
        self.revision = installed_versions().get("git_revision")
        self.ended = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test; setup and teardown count as its time, and their failure as its own.

        Args:
            report (`pytest.TestReport`): Of one phase.
        """
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            self.write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Say that every test was run.

        Args:
            exitstatus (`int`): 0 or 1 where none was left out; else the run was broken off.
        """
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
            "versions": versions(),
            "revision": self.revision,
            **made,
            "tests": self.tests,
        }
        write_json(self.path, log)


def table(log: Mapping[str, Any]) -> str:
    """A log as Markdown, a row for each file.

    Args:
        log: As [`Recorder`] writes it.

    Returns:
        `str`: The table, with sums.
    """
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
    """Take over the log that is there.

    Args:
        path (`Path`): The log.

    Raises:
        ValueError: If the run was broken off, or a test failed.
    """
    log = json.loads(path.read_text(encoding="utf-8"))
    if not log["ended"]:
        raise ValueError(f"The run of {path.name} was broken off. Run `make test-slow` to its end.")
    if log.get("asked", ["tests"]) != ["tests"]:
        raise ValueError(f"{path.name} is of {' '.join(log['asked'])} alone. Run `make test-slow`.")
    failed = [name for name, test in log["tests"].items() if test["outcome"] == "failed"]
    if failed:
        raise ValueError(f"{len(failed)} tests failed, the first is {failed[0]}. Mend them, and run `make test-slow`.")
    write_json(RESULTS, log)
    named = ", ".join(f"{name} {number}" for name, number in log["versions"].items())
    made = f"Python {log['python']}, {named}; {log['cpus']} CPU cores, shared with other work."
    section = f"{table(log)}\n\n{log['seconds'] / 60:.0f} minutes in one run. {made}"
    atomic_write_text(PAGE, replace_section(PAGE.read_text(encoding="utf-8"), "slow", section))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the slow tests, or take over their log.

    Args:
        argv: Arguments without the program's name; None for `sys.argv`.

    Returns:
        `int`: The exit status of pytest.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders (default: all)")
    parser.add_argument("--log", type=Path, default=LOG, metavar="FILE", help="where the log goes")
    parser.add_argument("--page", action="store_true", help="take over the log that is there; runs nothing")
    arguments = parser.parse_args(argv)
    if arguments.page:
        write_page(arguments.log)
        return 0
    options = ["-m", "slow", "--timeout", "3600", "--durations", "10"]
    return int(pytest.main([*options, *arguments.tests], plugins=[Recorder(arguments.log, arguments.tests)]))


if __name__ == "__main__":
    sys.exit(main())
