"""Tables of reproduction/findings.md on ten worlds drawn anew: which part of a difference's spread is the world's, which the training's?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reproduction.findings import HOLDS, OPEN, load_findings, said
from reproduction.hacking import cell, verdict_of, verdict_table
from reproduction.measurements import seed_interval, shown, survivors

RUN = "redrawn_seeds"
OTHER_KINDS = "other_kinds_seeds"
_NAMES = {
    "pool_recall_at_1": "R@1 in the pool",
    "rd100_recall_at_1": "R@1 among 100",
    "bag_7_truth_recall_at_1": "R@1 in bags of 7, truth",
    "cider_d": "CIDEr-D",
    "hallucination": "hallucination",
}
_PAIRS = (("SMILE", "further MLE"), ("SR", "MLE"), ("BagCurri", "SR"), ("CIDEr", "MLE"))


def differences(record: Mapping[str, Any], more: str, less: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """One row minus another in each world, of the first training and of the second; the start is the same in both."""
    rows = {row["name"]: np.array(row[key]["values"]) for row in record["rows"] if key in row}
    again = [rows.get(f"{name}, again", rows[name]) for name in (more, less)]
    return rows[more] - rows[less], again[0] - again[1]


def spread(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Standard deviation over worlds (of one training each), and of two trainings in one world."""
    return float(first.std(ddof=1)), float(np.sqrt(np.mean((first - second) ** 2) / 2))


def table(record: Mapping[str, Any]) -> str:
    """A row per difference."""
    columns = ["", "difference", "standard deviation over worlds", "of two trainings in one world"]
    lines = [f"| {' | '.join(columns)} |", "|:--|--:|--:|--:|"]
    means = []
    for more, less in _PAIRS:
        for key, name in _NAMES.items():
            found = differences(record, more, less, key)
            means.append(seed_interval(list(found[0])))
            cells = [cell(means[-1]), *map(shown, spread(*found))]
            lines.append(f"| {name}, {more} - {less} | {' | '.join(cells)} |")
    made = f"Mean ± half of the 95 % interval over ten worlds. {survivors(means)} Made by `python reproduction/reproduce.py --only {RUN}`."
    return "\n".join([*lines, "", made])


def judged(record: Mapping[str, Any]) -> dict[str, str]:
    """What became of W1 and W2 of reproduction/predictions.md."""
    found = load_findings()["redrawn"]["findings"]
    expected = [OPEN if "curriculum" in finding["claim"] else HOLDS for finding in found]
    verdicts = [said(finding, {RUN: record}) for finding in found]
    wide = [("SMILE", "further MLE", "pool_recall_at_1"), ("SR", "MLE", "rd100_recall_at_1")]
    spreads = [spread(*differences(record, *one)) for one in wide]
    conditions: dict[str, list[bool | None]] = {
        "W1": [one == other for one, other in zip(verdicts, expected, strict=True)],
        "W2": [over >= 2 * within for over, within in spreads],
    }
    return {name: verdict_of(each) for name, each in conditions.items()}


def judged_kinds(record: Mapping[str, Any]) -> dict[str, str]:
    """What became of K1 and K2 of reproduction/predictions.md: in worlds of other things, the claims of self-retrieval hold, and parts of SMILE's."""
    found = load_findings()["other_kinds"]["findings"]
    results = {OTHER_KINDS: record}
    of_smile = [{**finding, "compare": [one]} for finding in found[1:4] for one in finding["compare"]]
    expected = [HOLDS, HOLDS, OPEN, HOLDS, OPEN]  # words, pool, bags of 7, CIDEr-D, wrong claims
    conditions: dict[str, list[bool | None]] = {
        "K1": [said(finding, results) == HOLDS for finding in found[6:]],
        "K2": [said(finding, results) == verdict for finding, verdict in zip(of_smile, expected, strict=True)],
    }
    return {name: verdict_of(each) for name, each in conditions.items()}


TABLES = {
    RUN: (RUN, table),
    "worlds": (RUN, lambda record: verdict_table({"verdict": judged(record)})),
    "other_kinds": (OTHER_KINDS, lambda record: verdict_table({"verdict": judged_kinds(record)})),
}
"""The result and the table behind each marker of a page."""
