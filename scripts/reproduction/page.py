"""The papers' numbers beside ours, as a page of the site."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.make_paper_index import PAPERS
from scripts.reproduction.checks import has_figure
from scripts.reproduction.numbers import Measured, measured, shown
from scripts.reproduction.real import missing_of, result_path
from scripts.reproduction.runs import Run, of_older_world

_HEADINGS = {"smile": "SMILE", "discritune": "DiscriTune", "sle": "SLE", "ndlb": "No Detail Left Behind"}
_HEAD = "| | | paper | ours | 95 % interval | preset | hardware | |"
_EMBEDDED = "embedded world"
_RULE = "|:--|:--|--:|--:|:--|:--|:--|:--|"


def _anchor(paper: str) -> str:
    return _HEADINGS[paper].lower().replace(" ", "-")


def _interval(number: Measured) -> str:
    if number.low is None or number.high is None:
        return "same for every seed" if len(number.values) > 1 else ""
    return f"{shown(number.low)} to {shown(number.high)}"


def _short(preset: str) -> str:
    return f"`{preset}`" if "/" in preset else preset


def _hardware(record: Mapping[str, Any]) -> str:
    return str(record.get("hardware", "CPU, not recorded"))


def _why(row: Mapping[str, Any], entry: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Why the number was not measured on the paper's data."""
    if "preset" not in entry:
        return f"not run: {row['note']}"
    reason = reasons.get(entry["preset"])
    if reason is None:
        reason = f"{', '.join(missing_of(entry['preset'], None))} and a GPU were not available"
    return f"not run: {reason}"


def _lines(
    row: Mapping[str, Any],
    entry: Mapping[str, Any],
    results: Mapping[str, Any],
    runs: Mapping[str, Run],
    output: Path,
    reasons: Mapping[str, str],
) -> list[str]:
    """One line for the embedded world, and one for the paper's data."""
    source = f"[{row['kind'].capitalize()} {row['number']}](paper_index.md#{_anchor(row['paper'])})"
    paper = shown(entry["paper"]) if "paper" in entry else ""
    lines = []
    if entry.get("run") in results:
        record = results[entry["run"]]
        ours = measured(entry["at"], record)
        cells = [source, entry["what"], paper, shown(ours.value), _interval(ours)]
        place = _EMBEDDED + of_older_world(record)
        run = runs[entry["run"]]
        stale = [preset for preset, why in run.changed(record).items() if why == "stale"]
        place += f"; made before {', '.join(map(_short, stale))} changed" if stale else ""
        lines.append([*cells, "<br>".join(map(_short, run.presets)) or run.preset, _hardware(record), place])
        if "preset" in entry:
            lines[0][-1] += "; the paper's data: not run"
    path = result_path(entry["preset"], output) if "preset" in entry else None
    if path is not None and path.exists():
        if lines:
            lines[0][-1] = place
        record = json.loads(path.read_text(encoding="utf-8"))
        at, where = entry.get("preset_at", entry.get("at")), "the paper's data"
        number = ["", ""]
        if at.startswith("reached/") and "reached" not in record:
            where += ": the curve does not reach the other result"
        else:
            ours = measured(at, record)
            number = [shown(ours.value), _interval(ours)]
        lines.append([source, entry["what"], paper, *number, _short(entry["preset"]), _hardware(record), where])
    elif not lines:
        why = (
            _why(row, entry, reasons)
            if entry.get("run") is None
            else f"not run: {reasons.get(entry['run'], 'no result')}"
        )
        lines.append([source, entry["what"], paper, "", "", _short(entry.get("preset", "")), "", why])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _checked(rows: Sequence[Mapping[str, Any]], checks: Mapping[str, Any]) -> list[str]:
    """Rows without a number: whether their command or tests succeeded."""
    lines = [
        "| | status | what was run | outcome |",
        "|:--|:--|:--|:--|",
    ]
    for row in rows:
        if has_figure(row) or (row.get("numbers") and row["status"] == "not run") or row["status"] == "not applicable":
            continue
        check = checks.get(row["id"])
        if check is None:
            command, outcome = "", "not run; `python scripts/reproduce.py` runs it"
            if row["status"] == "not run":
                outcome = f"not run: {row['note']}"
        else:
            command = f"`{check['command']}`" if row["status"] == "runs" else "its tests"
            passed = "exit code 0" if row["status"] == "runs" else f"{check['tests']} passed"
            outcome = passed if check["exit_code"] == 0 else f"exit code {check['exit_code']}"
        name = f"{row['paper']} {row['kind']} {row['number']}"
        lines.append(f"| [{name}](paper_index.md#{_anchor(row['paper'])}) | {row['status']} | {command} | {outcome} |")
    return lines


def to_markdown(
    rows: Sequence[Mapping[str, Any]],
    runs: Mapping[str, Run],
    results: Mapping[str, Any],
    output: Path,
    *,
    checks: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
) -> str:
    """The page."""
    reasons = reasons or {}
    entries = [entry for row in rows for entry in row.get("numbers", ())]
    with_ours = sum(entry.get("run") in results for entry in entries)
    older = sum(bool(of_older_world(results[entry["run"]])) for entry in entries if entry.get("run") in results)
    on_theirs = sum("preset" in entry and result_path(entry["preset"], output).exists() for entry in entries)
    lines = [
        "# Reproduction",
        "",
        f"This page shows {len(entries)} numbers of the papers beside ours. {with_ours} were measured on the embedded world, {older} of these on an older version of it, {on_theirs} on the paper's data.",
        "The embedded world has small synthetic images and other captioners, so most of its numbers differ from the paper's. Compare the",
        "direction between two rows instead, as [the findings](findings.md) do.",
        "",
        "```bash",
        "python scripts/reproduce.py --list                              # every row, and what is missing",
        "python scripts/reproduce.py                                     # run what is missing",
        "python scripts/reproduce.py --only smile-table-1 --seeds 0 1 2 3 4",
        "python scripts/reproduce.py --data_root DATA                    # also rows on the papers' data, if data and captioners exist",
        "```",
        "",
        "A finished result with the same command, seeds, package version and version of the world is not computed again. If the code changed, delete",
        "the result first. Each result contains the revision that produced it and a digest of its presets; `--check` says which presets changed",
        "afterwards. To run such a result again, delete it and its folder in `outputs/reproduction`. A killed run resumes with the remaining seeds",
        "and steps.",
        "",
        "Numbers of the papers are in our units: fractions instead of percentages, CIDEr divided by 100. The interval is Student's t over seeds if",
        "there are several, otherwise a bootstrap over images. It does not apply to other data. With three seeds, it extends 4.3 standard errors",
        "to each side.",
        "",
        "The top of `scripts/reproduction/real.py` describes the contents of `--data_root`. The last column below says what a row on the paper's",
        "data requires. A captioner that another preset makes is made first. Presets state the batch of one optimizer step, which all processes",
        "share, so a run has the paper's batch on any number of GPUs that divides it.",
    ]
    for paper, title in PAPERS.items():
        lines += ["", f"## {_HEADINGS[paper]}", "", title.split(": ", 1)[1] + ".", "", _HEAD, _RULE]
        for row in rows:
            if row["paper"] == paper:
                for entry in row.get("numbers", ()):
                    lines += _lines(row, entry, results, runs, output, reasons)
    lines += ["", "## Rows without a number", "", *_checked(rows, checks)]
    return "\n".join(lines) + "\n"
