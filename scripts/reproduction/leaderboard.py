"""The leaderboard of the embedded world, from the committed results, as a page of the site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.reproduction.numbers import Measured, measured, shown
from scripts.reproduction.runs import ROOT, Run, of_older_world

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


def page(runs: Mapping[str, Run], results: Mapping[str, Any], docs: Path = ROOT / "docs") -> str:
    """The page."""
    full = json.loads((docs / "results" / ACCEPTANCE).read_text(encoding="utf-8"))
    return _PAGE.format(table=section(runs, results, full), parts=parts_section(runs, results))


_PAGE = """# Leaderboard of the embedded world

Maximum likelihood on detailed captions leads; self-retrieval from generic captions cannot reach it. Methods on [`scenes`](scenes.md), version 2: greedy
captions of the 1,000 test images, mean over at least three training seeds, ± half of the 95 % interval over seeds, ranked by R@1 in bags of 7
look-alikes. The held-out scorer measures both recalls. *By the truth checker*, a caption counts only if its claims are true of its target and of no
other image of the bag.

{table}

Read the columns together. A caption that mentions every fact finds its image but differs from what a person would write, so CIDEr-D falls. A caption
that claims too much can find its image by its true claims, so hallucination rises. The commands are on the page [Reproduction](reproduction.md).

## Scenes with and against the preferences

Each kind of object prefers a background, a position and a partner ([scenes](scenes.md#images)). In about a third of the test images they differ from
that. A captioner that guesses facts from the kind is wrong there. "–" marks results that were made before the parts were measured.

{parts}

## Add a method

1. Train with seeds 0, 1 and 2 on the train split. Select checkpoints by the validation split and the reward scorer `scenes:clip-reward`. Do not use
   the test split or `scenes:siglip-held-out` for training or selection.
2. Per seed, run `captionrl caption outputs/seed-0/model --dataset scenes --num_beams 1 --output captions.jsonl` and
   `captionrl evaluate --captions captions.jsonl --dataset scenes --suite all`.
3. For a recipe of this repository, add a run with `leaderboard:` to `docs/paper_index.yaml`, run `python scripts/reproduce.py --only NAME`, and commit the
   result.

The data do not change within a version: `docs/results/scenes_digests.json` has their digests. `python scripts/export_scenes.py` writes them as a data set
for the Hub.
"""
