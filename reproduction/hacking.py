"""Tables of reproduction/reward_hacking.md: the observatory, its predictions, and large bags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import kendalltau

from reproduction import ROOT
from reproduction.measurements import Measured, detectable, difference, scaled, seed_interval, shown, survivors

OBSERVATORY, BAGS = "observatory", "large_bags_seeds"
HELD_OUT = "rd100_recall_at_1"
PREDICTIONS = ROOT / "reproduction" / "predictions.md"
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


def cell(number: Measured, *, signed: bool = True) -> str:
    """A number with half of its interval."""
    sign = "+" if signed and number.value >= 0 else ""
    ends = "" if number.low is None else f" ±{shown(number.value - number.low)}"
    return f"{sign}{shown(number.value)}{ends}"


def _alarms(steps: Sequence[int | None]) -> str:
    return ", ".join("never" if step is None else str(step) for step in steps)


def bags_section(record: Mapping[str, Any]) -> str:
    """One row per change to bags of 20 without penalties: the last evaluation."""
    lines = [f"| {' | '.join(_BAG_COLUMNS)} |", f"|:--|{'--:|' * (len(_BAG_COLUMNS) - 1)}"]
    start, rows = record["rows"][0], {row["name"]: row for row in record["rows"]}
    for name, alarms in record["guard"].items():
        values = {key: seed_interval(rows[name][key]["values"]) for key in _BAG_KEYS}
        rise = difference(values.pop(HELD_OUT), seed_interval(start[HELD_OUT]["values"]))
        cells = [cell(value, signed=False) for value in values.values()]
        lines.append(f"| {name} | {' | '.join([*cells, cell(rise)])} | {_alarms(alarms)} |")
    return "\n".join([*lines, "", _made_by(record)])


def _made_by(record: Mapping[str, Any]) -> str:
    command = record["command"]
    command = command if isinstance(command, str) else f"python reproduction/reproduce.py --only {OBSERVATORY}"
    return f"Mean ± half of the 95 % interval over seeds {', '.join(map(str, record['seeds']))}. Made by `{command}`."


# --- The observatory: one budget for every reward; the predictions of reproduction/predictions.md ------------------------------

_OBSERVED = {
    "fact_recall": "fact recall",
    "hallucination": "hallucination",
    HELD_OUT: "R@1 among 100, held-out",
    "cider_d": "CIDEr-D",
    "words": "words",
    "unique": "different captions",
}
_UNINFORMED = ("CIDEr", "SR", "SR, bags of 5", "CLIPScore", "log-probability", "random")


def above(number: Measured, limit: float = 0.0) -> bool | None:
    """Whether the whole interval is above the limit (True), nothing of it (False), or some of it (None)."""
    low, high = (number.value if bound is None else bound for bound in (number.low, number.high))
    return True if low > limit else False if high <= limit else None


def below(number: Measured, limit: float = 0.0) -> bool | None:
    """The opposite of [`above`]."""
    found = above(number, limit)
    return None if found is None else not found


def unchanged(number: Measured) -> bool:
    """Whether 0 is in the interval."""
    return above(number) is None or number.value == 0


def verdict_of(conditions: Sequence[bool | Measured | None]) -> str:
    """What became of a prediction with these conditions; a number stands for that it is above 0.

    An open verdict names the least effect that each of its open comparisons with 0 would have shown, in the order of the prediction.
    """
    found = [above(one) if isinstance(one, Measured) else one for one in conditions]
    if False in found or None not in found:
        return "does not hold" if False in found else "holds"
    unsure = [one for one, said in zip(conditions, found, strict=True) if said is None]
    least = [shown(detectable(one) or 0.0) for one in unsure if isinstance(one, Measured)]
    return f"open (detectable: {', '.join(least)})" if least else "open"


def verdict_table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """The predictions of reproduction/predictions.md with these names, and a column of verdicts for each heading."""
    text = dict(re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", PREDICTIONS.read_text(encoding="utf-8"), re.M))
    lines = [["", "prediction", *columns], [":--"] * (len(columns) + 2)]
    lines += [[name, text[name], *(said[name] for said in columns.values())] for name in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def observatory(record: Mapping[str, Any]) -> str:
    """The change of every number by 200 steps of each reward, and in the held-back world."""
    columns = ["reward", *_OBSERVED.values(), "KL", "fact recall, held back", "hallucination, held back"]
    lines = [f"| {' | '.join(columns)} |", f"|:--|{'--:|' * (len(columns) - 1)}"]
    all_changes: list[Measured] = []
    for name, points in record["learning_curves"].items():
        changes = [difference(_at(points, -1, key), _at(points, 0, key)) for key in _OBSERVED]
        held_back = record["held_back"][name]
        changes += [difference(_at(held_back, -1, key), _at(held_back, 0, key)) for key in list(_OBSERVED)[:2]]
        cells = [cell(change) for change in changes]
        cells.insert(len(_OBSERVED), cell(_at(points, -1, "kl"), signed=False))
        all_changes += changes
        lines.append(f"| {name} | {' | '.join(cells)} |")
    first = {key: shown(_at(points, 0, key).value) for key in _OBSERVED}
    before = ", ".join(f"{title} {first[key]}" for key, title in _OBSERVED.items())
    return "\n".join([*lines, "", f"Before training: {before}. {survivors(all_changes)} {_made_by(record)}"])


def predictions(record: Mapping[str, Any]) -> str:
    """The verdict of each prediction on the test scenes and in the held-back world."""
    worlds = {"test scenes": "learning_curves", "held-back world": "held_back"}
    return verdict_table({heading: judged(record[world]) for heading, world in worlds.items()})


def judged(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """What became of O1 to O12 of reproduction/predictions.md: "holds", "does not hold" or "open".

    A condition holds if the whole interval over seeds fulfils it, and does not hold if nothing of it does. A prediction holds if all
    its conditions do, and does not hold if one does not. "Does not raise" (O7) and "change nothing" (O9) hold unless the change is significant.
    """

    def end(reward: str, key: str) -> Measured:
        return _at(curves[reward], -1, key)

    def gain(reward: str, key: str = "fact_recall") -> Measured:
        return difference(end(reward, key), _at(curves[reward], 0, key))

    def between(number: Measured, limit: float) -> bool | None:
        sides = (below(number, limit), above(number, -limit))
        return False if False in sides else None if None in sides else True

    def taus() -> Measured:
        def of_seed(seed: int) -> float:
            found = [
                [gain(reward, key).values[seed] for reward in _UNINFORMED]
                for key in (HELD_OUT, "fact_recall", "hallucination")
            ]
            return float(
                kendalltau(found[0], [fact - wrong for fact, wrong in zip(*found[1:], strict=True)]).statistic
            )

        return seed_interval([of_seed(seed) for seed in range(len(gain("SR").values))])

    f1, exact, judge, truth = "F1 of claims", "questions, exact reader", "judge with length bias", "SR by truth"
    words = difference(end("recall of claims", "words"), scaled(_at(curves["recall of claims"], 0, "words"), 2))
    conditions: dict[str, list[bool | Measured | None]] = {
        "O1": [between(gain("CIDEr"), 0.05), gain("CIDEr", "cider_d")],
        "O2": [gain(reward, key) for reward in ("SR", "SR, bags of 5") for key in ("fact_recall", "hallucination")],
        "O3": [difference(end("CLIPScore", key), end("SR", key)) for key in ("words", "hallucination")],
        "O4": [scaled(gain("log-probability", key), -1) for key in ("fact_recall", "unique")],
        "O5": [below(end("precision of claims", "hallucination"), 0.05), below(gain("precision of claims"), 0.05)],
        "O6": [words, above(end("recall of claims", "hallucination"), 0.2)],
        "O7": [above(gain(f1), 0.2), above(gain(f1, "hallucination")) is not True],
        "O8": [
            between(difference(gain(exact), gain(f1)), 0.1),
            difference(end(exact, "hallucination"), end(f1, "hallucination")),
        ],
        "O9": [
            unchanged(gain(reward, key)) for reward in ("questions, guessing reader", "random") for key in _OBSERVED
        ],
        "O10": [difference(end(judge, key), end(f1, key)) for key in ("words", "hallucination")],
        "O11": [difference(gain(truth), gain("SR")), difference(gain(f1), gain(truth))],
        "O12": [below(taus(), 0.5)],
    }
    return {name: verdict_of(found) for name, found in conditions.items()}


TABLES = {
    "observatory": (OBSERVATORY, observatory),
    "predictions": (OBSERVATORY, predictions),
    "large_bags": (BAGS, bags_section),
}
"""The result and the table behind each marker of a page."""
