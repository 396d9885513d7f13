"""docs/reward_hacking.md: rewards and held-out measurements of captions during a training that is too long, and large bags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import replace_section
from scripts.reproduction.numbers import Measured, difference, seed_interval, shown
from scripts.reproduction.runs import ROOT

PAGE = "reward_hacking.md"
RUNS = ("reward_hacking_seeds", "reward_hacking_kinds_seeds", "reward_hacking_diversity_seeds")
BAGS = "large_bags_seeds"
REWARD, HELD_OUT = "reward_rd100_recall_at_1", "rd100_recall_at_1"
_COLUMNS = (
    "reward",
    "reward scorer, change",
    "held-out scorer, change",
    "reward minus held-out",
    "held-out, last minus best",
    "hallucination",
    "words",
    "guard, step",
)
_BAG_COLUMNS = (
    "bags of 20, without penalties, and one change",
    "words",
    "degenerate",
    "hallucination",
    "R@1 in bags of 7, held-out",
    "R@1 among 100, held-out, change",
    "guard, step",
)
_BAG_KEYS = ("length", "degenerate", "hallucination", "bag_7_recall_at_1", HELD_OUT)


def _at(points: Sequence[Mapping[str, Any]], step: int, key: str) -> Measured:
    return seed_interval(points[step][key]["values"])


def _cell(number: Measured, *, signed: bool = True) -> str:
    sign = "+" if signed and number.value >= 0 else ""
    ends = "" if number.low is None else f" [{shown(number.low)}, {shown(number.high or 0.0)}]"
    return f"{sign}{shown(number.value)}{ends}"


def _after_best(points: Sequence[Mapping[str, Any]]) -> Measured:
    """R@1 of the last evaluation minus that of the best one of each seed, by the held-out scorer."""
    seeds = range(len(points[0][HELD_OUT]["values"]))
    of_seeds = [[point[HELD_OUT]["values"][seed] for point in points] for seed in seeds]
    return seed_interval([values[-1] - max(values) for values in of_seeds])


def _alarms(steps: Sequence[int | None]) -> str:
    return ", ".join("never" if step is None else str(step) for step in steps)


def _unfinished(*runs: str) -> str:
    return f"The runs of this section are not finished: `python scripts/reproduce.py --only {' '.join(runs)}`."


def section(records: Sequence[Mapping[str, Any] | None]) -> str:
    """One row per reward, from its first evaluation, before training, to its last."""
    finished = [record for record in records if record is not None]
    if len(finished) < len(records):
        return _unfinished(*RUNS)
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|:--|{'--:|' * (len(_COLUMNS) - 1)}"]
    for record in finished:
        for name, points in record["learning_curves"].items():
            rises = [difference(_at(points, -1, key), _at(points, 0, key)) for key in (REWARD, HELD_OUT)]
            cells = [_cell(rise) for rise in (*rises, difference(*rises), _after_best(points))]
            cells += [_cell(_at(points, -1, key), signed=False) for key in ("hallucination", "length")]
            lines.append(f"| {name} | {' | '.join(cells)} | {_alarms(record['guard'][name])} |")
    return "\n".join([*lines, "", _made_by(*finished)])


def bags_section(record: Mapping[str, Any] | None) -> str:
    """One row per change to bags of 20 without penalties: the last evaluation."""
    if record is None:
        return _unfinished(BAGS)
    lines = [f"| {' | '.join(_BAG_COLUMNS)} |", f"|:--|{'--:|' * (len(_BAG_COLUMNS) - 1)}"]
    start, rows = record["rows"][0], {row["name"]: row for row in record["rows"]}
    for name, alarms in record["guard"].items():
        values = {key: seed_interval(rows[name][key]["values"]) for key in _BAG_KEYS}
        rise = difference(values.pop(HELD_OUT), seed_interval(start[HELD_OUT]["values"]))
        cells = [_cell(value, signed=False) for value in values.values()]
        lines.append(f"| {name} | {' | '.join([*cells, _cell(rise)])} | {_alarms(alarms)} |")
    return "\n".join([*lines, "", _made_by(record)])


def _made_by(*records: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, records[0]["seeds"]))
    commands = " and ".join(f"`{record['command']}`" for record in records)
    return f"Mean and 95 % interval over seeds {seeds}. Made by {commands}."


def page(results: Mapping[str, Any], docs: Path = ROOT / "docs") -> dict[str, str]:
    """The page with the tables of these results."""
    text = (docs / PAGE).read_text(encoding="utf-8")
    text = replace_section(text, "reward_hacking", section([results.get(run) for run in RUNS]))
    return {PAGE: replace_section(text, "large_bags", bags_section(results.get(BAGS)))}
