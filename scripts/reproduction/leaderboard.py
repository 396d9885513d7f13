"""The leaderboard of the embedded world in docs/leaderboard.md, from the committed results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.common import replace_section
from scripts.reproduction.numbers import Measured, measured, shown
from scripts.reproduction.runs import ROOT, Run, of_older_world

PAGE = "leaderboard.md"
ACCEPTANCE = "scenes_acceptance.json"
RANKED_BY = "bag_7_recall_at_1"
COLUMNS = {
    "length": "words",
    "rd100_recall_at_1": "R@1 RD100 ↑",
    RANKED_BY: "R@1 bags of 7 ↑",
    "bag_7_truth_recall_at_1": "by the truth checker ↑",
    "cider_d": "CIDEr-D ↑",
    "hallucination": "hallucination ↓",
}
PARTS = {
    "with_preferences_hallucination": "hallucination, with ↓",
    "against_preferences_hallucination": "hallucination, against ↓",
    "with_preferences_rd100_recall_at_1": "R@1 RD100, with ↑",
    "against_preferences_rd100_recall_at_1": "R@1 RD100, against ↑",
}
"""Numbers of scenes with and against the preferences of their kinds, which older results lack."""


def _cell(number: Measured | None) -> str:
    if number is None:
        return "–"
    half = "" if number.high is None else f" ±{shown(number.high - number.value)}"
    return shown(number.value) + half


def entries(runs: Mapping[str, Run], results: Mapping[str, Any]) -> list[tuple[str, str, str, dict[str, Measured]]]:
    """Title, run, row and numbers of each method, the best in bags of 7 first; results of an older world are left out."""
    found = []
    for name, run in runs.items():
        if name not in results or of_older_world(results[name]):
            continue
        for row, title in run.leaderboard.items():
            numbers = {key: measured(f"rows/{row}/{key}", results[name]) for key in COLUMNS}
            found.append((title, name, row, numbers))
    return sorted(found, key=lambda entry: -entry[3][RANKED_BY].value)


def parts_section(runs: Mapping[str, Run], results: Mapping[str, Any]) -> str:
    """The table of scenes with and against the preferences, in the same order."""
    lines = [f"| method | {' | '.join(PARTS.values())} |", f"|:--|{'--:|' * len(PARTS)}"]
    for title, name, row, _ in entries(runs, results):
        numbers = [_of_part(f"rows/{row}/{key}", results[name]) for key in PARTS]
        lines.append(f"| [{title}](reproduction.md) | {' | '.join(map(_cell, numbers))} |")
    return "\n".join(lines)


def _of_part(place: str, result: Any) -> Measured | None:
    try:
        return measured(place, result)
    except KeyError:  # made before the parts were measured
        return None


def section(runs: Mapping[str, Run], results: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """The table, under full captions, which no method can be expected to pass."""
    bars = {bar["name"]: shown(bar["mean"]) for bar in full["bars"]}
    best = [bars.get(f"full_captions/{key}", "") for key in COLUMNS]
    lines = [
        f"| method | {' | '.join(COLUMNS.values())} |",
        f"|:--|{'--:|' * len(COLUMNS)}",
        f"| *full captions* | {' | '.join(best)} |",
    ]
    lines += [
        f"| [{title}](reproduction.md) | {' | '.join(_cell(number) for number in numbers.values())} |"
        for title, _, _, numbers in entries(runs, results)
    ]
    return "\n".join(lines)


def page(runs: Mapping[str, Run], results: Mapping[str, Any], docs: Path = ROOT / "docs") -> dict[str, str]:
    """The page with the table of these results."""
    full = json.loads((docs / "results" / ACCEPTANCE).read_text(encoding="utf-8"))
    text = (docs / PAGE).read_text(encoding="utf-8")
    text = replace_section(text, "leaderboard", section(runs, results, full))
    return {PAGE: replace_section(text, "leaderboard of parts", parts_section(runs, results))}
