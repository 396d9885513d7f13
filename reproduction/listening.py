"""Tables of reproduction/listening.md: does the coverage of the reward's scorer decide whether self-retrieval helps?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scipy.stats import kendalltau

from reproduction.hacking import PREDICTIONS, above, cell, verdict_of, verdict_table
from reproduction.measurements import Measured, difference, seed_interval, survivors

RUN = "listening_seeds"
STARTS, FACTS = ("short", "blend", "holistic"), (2, 4, 8, 13)
REWARD, TRUTH = "reward_rd100_recall_at_1", "bag_7_truth_recall_at_1"
_COLUMNS = {
    "length": "words",
    REWARD: "R@1 among 100, the reward's scorer",
    "rd100_recall_at_1": "R@1 among 100, held-out",
    TRUTH: "R@1 in bags of 7, truth",
    "hallucination": "hallucination",
}
_START = PREDICTIONS.parent / "results" / "listening_start.json"


def gains(record: Mapping[str, Any], key: str) -> dict[tuple[str, int], Measured]:
    """What self-retrieval adds to a number, by start and facts of the scorer's captions, paired by seed."""
    rows = {row["name"]: row[key]["values"] for row in record["rows"] if key in row}
    return {
        (start, facts): difference(
            seed_interval(rows[f"{start}, {facts} facts"]), seed_interval(rows[f"{start}, {facts} facts, start"])
        )
        for start in STARTS
        for facts in FACTS
    }


def agreement(start: Mapping[str, Any], key: str = "tau") -> dict[tuple[str, int], Measured]:
    """Kendall's tau between the scorer's reward and the truth's over samples of the start; or within images, `"same_better"`."""
    return {(s, facts): seed_interval(start["rows"][f"{s}, {facts} facts"][key]) for s in STARTS for facts in FACTS}


def table(record: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """A row per start and scorer: its agreement with the truth on samples of the start, and what training changes."""
    agreed = [agreement(start), agreement(start, "same_better")]
    found = [gains(record, key) for key in _COLUMNS]
    columns = ["tau", "same better", *_COLUMNS.values()]
    lines = [f"| start | facts | {' | '.join(columns)} |", f"|:--|--:|{'--:|' * len(columns)}"]
    for one in agreed[0]:
        cells = [one[0], str(one[1]), *(cell(column[one], signed=column in found) for column in (*agreed, *found))]
        lines.append(f"| {' | '.join(cells)} |")
    seeds = ", ".join(map(str, record["seeds"]))
    return "\n".join(
        [
            *lines,
            "",
            f"Change ± half of the 95 % interval over seeds {seeds}. {survivors([gain for column in found for gain in column.values()])} Made by `python reproduction/reproduce.py --only {RUN}`.",
        ]
    )


def judged(record: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, str]:
    """What became of L1 to L3 of reproduction/predictions.md, by the rule of the observatory's predictions.

    L3 is judged by each seed's Kendall's tau between the facts of a scorer's captions and the gain.
    """
    by_truth, by_reward, tau = gains(record, TRUTH), gains(record, REWARD), agreement(start)
    gained = [one for one, gain in by_truth.items() if above(gain)]
    of_seed = zip(*(by_truth["holistic", facts].values for facts in FACTS), strict=True)
    rises = seed_interval([float(kendalltau(FACTS, values).statistic) for values in of_seed])
    conditions: dict[str, list[bool | Measured | None]] = {
        "L1": [tau[one] for one in gained],
        "L2": list(by_reward.values()),
        "L3": [rises],
    }
    return {name: verdict_of(found) for name, found in conditions.items()}


def section(name: str, results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The table, or with the name "listeners" the predictions; None for other names."""
    if name not in (RUN, "listeners"):
        return None
    if RUN not in results or not _START.is_file():
        return f"Not finished: `python reproduction/reproduce.py --only {RUN}`."
    start = json.loads(_START.read_text(encoding="utf-8"))
    return table(results[RUN], start) if name == RUN else verdict_table({"verdict": judged(results[RUN], start)})
