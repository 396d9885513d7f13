"""Tables of reproduction/estimators.md: what an estimator of the policy gradient does to captions, and its predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reproduction.hacking import PREDICTIONS, cell, unchanged, verdict_of, verdict_table
from reproduction.measurements import Measured, difference, scaled, seed_interval, survivors

RUNS = {"estimators_seeds": "self-retrieval", "estimators_cider_seeds": "CIDEr-D"}
REDUCTIONS, BASELINES, TEMPERATURES = ("mean", "sum", "tokens"), ("running", "greedy", "others"), ("T 1", "T 0.3")
_START = PREDICTIONS.parent / "results" / "estimators_start.json"
_WORDS, _TRUTH, _CIDER, _HELD_OUT = "length", "bag_7_truth_recall_at_1", "cider_d", "rd100_recall_at_1"
_COLUMNS = {_TRUTH: "R@1 by truth, bags of 7", _HELD_OUT: "R@1 among 100, held-out"}
_COLUMNS |= {f"reward_{_HELD_OUT}": "R@1 among 100, reward scorer", _CIDER: "CIDEr-D"}
_COLUMNS |= {"hallucination": "wrong claims"}
_NAME = re.compile(rf"({'|'.join(REDUCTIONS)}), ({'|'.join(BASELINES)}), T [\d.]+")

Curves = Mapping[str, Sequence[Mapping[str, Any]]]


def curves_of(record: Mapping[str, Any]) -> Curves:
    """The learning curves by reduction, baseline and temperature; the row that is no variant is the first cell."""
    named = {name: _NAME.match(name) for name in record["learning_curves"]}
    return {
        found[0] if found else "mean, running, T 1": record["learning_curves"][name] for name, found in named.items()
    }


def _at(points: Sequence[Mapping[str, Any]], step: int, key: str) -> Measured:
    return seed_interval(next(point for point in points if point["step"] == step)[key]["values"])


def _change(points: Sequence[Mapping[str, Any]], key: str, step: int = 200) -> Measured:
    return difference(_at(points, step, key), _at(points, 0, key))


def covariance(start: Mapping[str, Any], reduction: str, baseline: str, temperature: str) -> float:
    """Cov(A, L) of all samples at the start, or Cov(A / L, L) for the mean over a caption's tokens: what E1 is judged by."""
    return float(start[temperature][baseline]["of_mean" if reduction == "mean" else "of_sum"])


def covariance_within(start: Mapping[str, Any], reduction: str, baseline: str, temperature: str) -> Measured:
    """The same within images, which is what training can use, with its 95 % interval."""
    found = start[temperature][baseline][f"of_{'mean' if reduction == 'mean' else 'sum'}_within"]
    mean, half = found["mean"], 1.96 * found["standard_error"]
    return Measured(mean, mean - half, mean + half)


def _ends(record: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The share of degenerate captions after training, and in how many runs the guard broke a limit."""
    (name,) = [name for name, found in record["learning_curves"].items() if found is points]
    (row,) = [row for row in record["rows"] if row["name"] == name]
    steps = record["guard"][name]
    stopped = f"{sum(step is not None for step in steps)} of {len(steps)}"
    return [f"{row['degenerate']['mean']:.3f}", stopped]


def table(record: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """A row per estimator: the covariance within images at the start, the change of words after 50 and 200 steps, and changes of other numbers."""
    curves, names = curves_of(record), [*_COLUMNS.values()]
    columns = ["tokens", "baseline", "mean advantage", "covariance within images"]
    columns += ["words, 50 steps", "words, 200 steps", *names, "degenerate", "guard"]
    changes: list[Measured] = []
    lines = [f"| {' | '.join(['T', *columns])} |", f"|:--|:--|:--|{'--:|' * (len(columns) - 2)}"]
    for temperature in TEMPERATURES:
        for reduction in REDUCTIONS:
            for baseline in BASELINES:
                points = curves[f"{reduction}, {baseline}, {temperature}"]
                cells = [temperature[2:], reduction, baseline, f"{start[temperature][baseline]['advantage']:+.3f}"]
                cells.append(cell(covariance_within(start, reduction, baseline, temperature)))
                of_cell = [_change(points, _WORDS, step) for step in (50, 200)]
                of_cell += [_change(points, key) for key in _COLUMNS]
                changes += of_cell
                cells += [*map(cell, of_cell), *_ends(record, points)]
                lines.append(f"| {' | '.join(cells)} |")
    before = next(iter(curves.values()))
    first = ", ".join(
        f"{name} {cell(_at(before, 0, key), signed=False)}" for key, name in {_WORDS: "words", **_COLUMNS}.items()
    )
    seeds = ", ".join(map(str, record["seeds"]))
    return "\n".join(
        [
            *lines,
            "",
            f"Before training: {first}. Change ± half of the 95 % interval over seeds {seeds}, and of the covariance over images. {survivors(changes)} Made by `{record['command']}`.",
        ]
    )


def same_signs(record: Mapping[str, Any], start: Mapping[str, Any]) -> int:
    """In how many of the 18 cells the words of the first 50 steps change in the direction of the covariance."""
    curves = curves_of(record)
    return sum(
        _change(curves[f"{r}, {b}, {t}"], _WORDS, 50).value * covariance(start, r, b, t) > 0
        for r in REDUCTIONS
        for b in BASELINES
        for t in TEMPERATURES
    )


def judged(records: Mapping[str, Mapping[str, Any]], starts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What became of E1 to E5 of reproduction/predictions.md, by the rule of the observatory's predictions."""
    retrieval, cider = (curves_of(records[run]) for run in RUNS)

    def pairs(curves: Curves, key: str) -> list[Measured]:
        """By how much temperature 1 ends higher than 0.3, for each reduction and baseline."""
        ends = [[_at(curves[f"{r}, {b}, {t}"], 200, key) for t in TEMPERATURES] for r in REDUCTIONS for b in BASELINES]
        return [difference(warm, cold) for warm, cold in ends]

    ends = [[_at(c[f"{r}, greedy, T 1"], 200, _WORDS) for r in ("mean", "sum")] for c in (retrieval, cider)]
    baselines = [[_at(retrieval[f"{r}, {b}, T 1"], 200, _TRUTH) for b in ("running", "others")] for r in REDUCTIONS]
    conditions: dict[str, list[bool | Measured | None]] = {
        "E1": [same_signs(records[run], starts[run]) >= 15 for run in RUNS],
        "E2": [difference(of_mean, of_sum) for of_mean, of_sum in ends],
        "E3": [scaled(higher, -1) for higher in pairs(cider, _CIDER)],
        # That no difference is seen does not show that there is none.
        "E4": [found if unchanged(found) else False for found in (difference(*pair) for pair in baselines)],
        "E5": [*pairs(retrieval, _TRUTH)],
    }
    return {name: verdict_of(found) for name, found in conditions.items()}


def section(name: str, results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The table of a run, or with the name "estimators" the predictions; None for other names."""
    if name not in (*RUNS, "estimators"):
        return None
    missing = [run for run in RUNS if run not in results]
    if missing:
        return f"Not finished: `python reproduction/reproduce.py --only {' '.join(missing)}`."
    starts = json.loads(_START.read_text(encoding="utf-8"))
    if name in RUNS:
        return table(results[name], starts[name])
    said = judged(results, starts)
    signs = " and ".join(f"{same_signs(results[run], starts[run])} of 18 with {title}" for run, title in RUNS.items())
    return verdict_table({"verdict": {**said, "E1": f"{said['E1']}: {signs}"}})
