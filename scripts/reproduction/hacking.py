"""docs/reward_hacking.md: rewards and held-out measurements of captions during a training that is too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.page_sections import replace_section
from scripts.reproduction.numbers import Measured, difference, seed_interval, shown
from scripts.reproduction.runs import ROOT

PAGE = "reward_hacking.md"
RUN = "reward_hacking_seeds"
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


def section(record: Mapping[str, Any] | None) -> str:
    """One row per reward, from its first evaluation, before training, to its last."""
    if record is None:
        return "The runs of this page are not finished: `python scripts/reproduce.py --only reward_hacking_seeds`."
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|:--|{'--:|' * (len(_COLUMNS) - 1)}"]
    for name, points in record["learning_curves"].items():
        rises = [difference(_at(points, -1, key), _at(points, 0, key)) for key in (REWARD, HELD_OUT)]
        cells = [_cell(rise) for rise in (*rises, difference(*rises), _after_best(points))]
        cells += [_cell(_at(points, -1, key), signed=False) for key in ("hallucination", "length")]
        lines.append(f"| {name} | {' | '.join(cells)} | {_alarms(record['guard'][name])} |")
    seeds = ", ".join(map(str, record["seeds"]))
    return "\n".join([*lines, "", f"Mean and 95 % interval over seeds {seeds}. Made by `{record['command']}`."])


def page(results: Mapping[str, Any], docs: Path = ROOT / "docs") -> dict[str, str]:
    """The page with the table of these results."""
    text = (docs / PAGE).read_text(encoding="utf-8")
    return {PAGE: replace_section(text, "reward_hacking", section(results.get(RUN)))}
