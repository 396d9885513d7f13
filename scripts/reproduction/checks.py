"""Rows of the index that have no figure: their command is run, or their tests."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import tempfile
import xml.etree.ElementTree as ElementTree  # pytest's report # nosec B405
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_captionrl.utils.io import write_json
from scripts.reproduction.runs import ROOT, Caller, call, words_of

MADE_BY = {
    "outputs/smile_blip/model": "accelerate launch recipes/smile_blip.py",
    "outputs/self_retrieval_blip/model": "accelerate launch recipes/self_retrieval_blip.py",
    "mle.jsonl": "captionrl caption scenes:blip-mle --output mle.jsonl",
    "smile.jsonl": "captionrl caption scenes:blip-smile --output smile.jsonl",
}
"""Captions and captioners that commands of rows read, and what makes them."""


def missing_files(command: str, runs_dir: Path) -> list[str]:
    """Captions and captioners that a command reads and that other commands make."""
    read = [
        word
        for before, word in itertools.pairwise(shlex.split(command))
        if before not in ("--output", "--output_dir") and (word.endswith(".jsonl") or word.startswith("outputs/"))
    ]
    return [
        word for word in read if not ((ROOT if word.startswith("outputs/") else _folder(runs_dir)) / word).exists()
    ]


def _folder(runs_dir: Path) -> Path:
    return runs_dir / "rows"


def outcomes(report: str, tests: Sequence[str]) -> tuple[int, int]:
    """How the tests of a row ended.

    Returns how many cases passed, and how many tests have a case that failed or none at all.
    """
    cases: dict[str, list[bool]] = {test: [] for test in tests}
    # Written by pytest a moment ago in a folder of our own; no other XML is read.
    for case in ElementTree.fromstring(report).iter("testcase"):  # nosec B314
        file = case.get("classname", "").replace(".", "/") + ".py"
        test = f"{file}::{case.get('name', '').split('[')[0]}"
        if test in cases:
            cases[test].append(not any(child.tag in ("failure", "error", "skipped") for child in case))
    return sum(map(sum, cases.values())), sum(not (passed and all(passed)) for passed in cases.values())


def _outside(command: str, runs_dir: Path, caller: Caller) -> int:
    """Run a command; one of captionrl not in the repository, where its relative outputs would lie about."""
    words = words_of(command)
    if not command.startswith("captionrl "):
        return caller(words)
    folder = _folder(runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return caller([str(ROOT / word) if word.startswith("outputs/") else word for word in words], folder)


def has_figure(row: Mapping[str, Any]) -> bool:
    """Whether a run of the embedded world measures a figure of a row; else its command or its tests are run."""
    return any("run" in entry for entry in row.get("numbers", ()))


def _stands_for(row: Mapping[str, Any]) -> str:
    """The command or the tests that are run for a row without a figure."""
    return row["command"] if row["status"] == "runs" else " ".join(row["tests"])


def current_checks(rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """How rows ended, of those that ended with what stands for them today, in this version. By id of the row."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    wanted = {row["id"]: _stands_for(row) for row in rows if row["status"] in ("runs", "tested")}
    made = version("hf_captionrl")
    return {i: c for i, c in found.items() if c["command"] == wanted.get(i) and c["version"] == made}


def check_rows(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    runs_dir: Path,
    *,
    caller: Caller = call,
    told: Callable[[str], None] = print,
) -> dict[str, str]:
    """Run whatever stands for rows without a figure, and record how it ended. Returns why a row was not run, by its id."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ended_well = {i for i, check in current_checks(rows, path).items() if check["exit_code"] == 0}
    reasons: dict[str, str] = {}
    made = {"version": version("hf_captionrl")}
    done: dict[str, int] = {}
    for row in rows:
        if has_figure(row) or row["status"] != "runs" or row["id"] in ended_well:
            continue
        command = row["command"]
        unknown = [name for name in missing_files(command, runs_dir) if name not in MADE_BY]
        if unknown:
            reasons[row["id"]] = f"needs {', '.join(unknown)}"
            continue
        for step in (*(MADE_BY[name] for name in missing_files(command, runs_dir)), command):
            if done.get(step) is None:
                told(f"{row['id']}: {step}")
                done[step] = _outside(step, runs_dir, caller)
            if done[step]:
                break
        found[row["id"]] = {"command": command, "exit_code": done[step], **made}
        write_json(path, found)
    left = [row for row in rows if not has_figure(row) and row["status"] == "tested" and row["id"] not in ended_well]
    if left:
        tests = sorted({test for row in left for test in row["tests"]})
        told(f"{len(tests)} tests of {len(left)} rows")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            caller([sys.executable, "-m", "pytest", "-q", "--junitxml", str(report), *tests])
            text = report.read_text(encoding="utf-8") if report.exists() else "<none/>"
        for row in left:
            passed, failed = outcomes(text, row["tests"])
            found[row["id"]] = {"command": _stands_for(row), "exit_code": int(failed > 0), "tests": passed, **made}
        write_json(path, found)
    return reasons
