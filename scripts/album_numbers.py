"""Numbers of scripts/album_campaign.py: means over seeds, differences of settings on the same images, and the tables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_captionrl.metrics import paired_test
from hf_captionrl.metrics.table import installed_versions
from scripts.reproduction.numbers import seed_interval, shown
from scripts.reproduction.runs import hardware, world_version

CAPTIONERS = {"MLE": "scenes:blip-mle", "SMILE": "scenes:blip-smile", "SR": "scenes:blip-sr"}
COLUMNS = {
    "distinct": "distinct texts",
    "held_out": "R@1, held-out",
    "reward": "R@1, reward scorer",
    "truth": "R@1 in bags of 7, exact checker",
    "varying": "recall of varying facts",
    "leaked": "shared facts left by --drop_shared",
    "hallucination": "hallucination",
    "words": "words",
    "cpu_s": "CPU s per image",
}
_BEAMS, _MIXED = "{}, assignment of 16 beams", "{}, assignment of 4 beams and 12 samples"
_FOUND, _TRUE, _WRONG, _UNIQUE = "held_out", "truth", "hallucination", "distinct"
# Settings, what is subtracted from them, and the columns; {} is a captioner.
COMPARISONS = (
    (_BEAMS, "{}, one beam", (_UNIQUE, _FOUND, _TRUE, _WRONG)),
    (_BEAMS, _MIXED, (_FOUND, _TRUE, _WRONG)),
    (_BEAMS, "{}, best of 64", (_FOUND, _TRUE, _WRONG)),
    ("{}, assignment of 16", "{}, best of 16", (_UNIQUE, _FOUND, _WRONG)),
    ("{}, assignment of 8 RSA beams", "{}, assignment of 8 beams", (_FOUND, _TRUE, _WRONG)),
    ("SR, one beam", "MLE, best of 64", (_FOUND, _TRUE, _WRONG)),
    ("SR, one beam", "MLE, assignment of 16 beams", (_FOUND, _TRUE, _WRONG)),
    ("SR, best of 4", "MLE, best of 64", (_FOUND, _TRUE)),
    ("MLE, adapted 600 s", "MLE, one beam", (_FOUND, _TRUE, _WRONG)),
    ("MLE, adapted 600 s", "MLE, best of 64", (_FOUND, _TRUE, _WRONG)),
    ("MLE, adapted 600 s", "MLE, assignment of 16 beams", (_FOUND, _TRUE, _WRONG)),
)
SHOWN = (
    # On the page; every setting is in the result.
    "one beam",
    *(f"best of {number}" for number in (1, 4, 16, 64)),
    "assignment of 4 beams and 12 samples",
    *(f"assignment of {number} beams" for number in (4, 8, 16)),
    "RSA 1",
    "assignment of 8 RSA beams",
)


def contributions(row: dict[str, Any], column: str) -> np.ndarray:
    """Numbers of the images whose mean is the column, linearised where the column is a ratio of sums."""
    each = {name: np.array(values, dtype=float) for name, values in row["each"].items()}
    if column != "hallucination":
        return each[column]
    share = each["wrong"].sum() / max(each["claims"].sum(), 1)
    return np.asarray(share + (each["wrong"] - share * each["claims"]) / max(each["claims"].mean(), 1e-9))


def compared(rows: Sequence[dict[str, Any]], column: str, more: str, less: str) -> dict[str, Any] | None:
    """Difference of two settings on the same images; bags of look-alikes are the samples of the interval."""
    pairs = [
        ([r for r in rows if (r["setting"], r["seed"]) == (more, seed)], r_less)
        for r_less in rows
        if r_less["setting"] == less
        for seed in (r_less["seed"],)
    ]
    found = [(mine[0], other) for mine, other in pairs if mine]
    if not found:
        return None
    values = [np.concatenate([contributions(pair[side], column) for pair in found]) for side in (0, 1)]
    bags = [f"{one['seed']}/{bag}" for one, _ in found for bag in one["bags"]]
    test = paired_test(*values, groups=bags)
    return {"column": column, "more": more, "less": less, **test}


def overstated(rows: Sequence[dict[str, Any]], name: str, least: int, most: int) -> dict[str, Any] | None:
    """How much more R@1 rises from few to many samples by the reward scorer, which chose, than by the held-out scorer."""
    by_setting = {(row["setting"], row["seed"]): row for row in rows}
    more, less = f"{name}, best of {most}", f"{name}, best of {least}"
    seeds = sorted({seed for setting, seed in by_setting if setting == more and (less, seed) in by_setting})
    if not seeds or least == most:
        return None
    rises = [
        np.concatenate(
            [
                contributions(by_setting[more, seed], scorer) - contributions(by_setting[less, seed], scorer)
                for seed in seeds
            ]
        )
        for scorer in ("reward", "held_out")
    ]
    bags = [f"{seed}/{bag}" for seed in seeds for bag in by_setting[more, seed]["bags"]]
    return {"column": "reward minus held-out", "more": more, "less": less, **paired_test(*rises, groups=bags)}


def aggregated(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and 95 % interval over seeds of every setting and column."""
    found = []
    models = list(CAPTIONERS)
    names = dict.fromkeys(row["setting"] for row in rows)
    for name in sorted(names, key=lambda name: models.index(name.partition(",")[0])):
        mine = [row for row in rows if row["setting"] == name]
        entry: dict[str, Any] = {"name": name}
        for column in COLUMNS:
            number = seed_interval([row[column] for row in mine])
            entry[column] = {"mean": number.value, "interval": [number.low, number.high], "values": number.values}
        adapters = [row["adapter"] for row in mine if row["adapter"]]
        if adapters:
            entry["adapters"] = adapters
        found.append(entry)
    return found


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is committed: the numbers of every setting, and differences with intervals."""
    samples = sorted({int(r["setting"].rpartition(" ")[2]) for r in rows if ", best of " in r["setting"]})
    differences = []
    for more, less, columns in COMPARISONS:
        for name in ("MLE", "SR") if "{}" in more else ("",):
            for column in columns:
                found = compared(rows, column, more.format(name), less.format(name))
                differences += [found] if found else []
    for name in ("MLE", "SR") if samples else ():
        found = overstated(rows, name, samples[0], samples[-1])
        differences += [found] if found else []
    return {
        "command": "python scripts/album_campaign.py",
        "seeds": sorted({row["seed"] for row in rows}),
        "images": sorted({len(row["bags"]) for row in rows}),
        "rows": aggregated(rows),
        "comparisons": differences,
        "versions": installed_versions(),
        "hardware": hardware(),
        "world": world_version(),
    }


def _cell(value: float, low: float | None, high: float | None) -> str:
    return shown(value) if low is None or high is None else f"{shown(value)} [{shown(low)}, {shown(high)}]"


def to_markdown(result: dict[str, Any]) -> str:
    """The section of the page."""
    tables = (("held_out", "reward", "truth", "hallucination", "cpu_s"), ("distinct", "varying", "leaked", "words"))
    lines = []
    for columns in tables:
        lines += ["| | " + " | ".join(COLUMNS[c] for c in columns) + " |", "|:--|" + "--:|" * len(columns)]
        for row in result["rows"]:
            kind = row["name"].partition(", ")[2]
            if kind not in SHOWN and not kind.startswith("adapted"):
                continue
            cells = [_cell(row[column]["mean"], *row[column]["interval"]) for column in columns]
            lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| setting | minus | of | difference |", "|:--|:--|:--|--:|"]
    for one in result["comparisons"]:
        column = COLUMNS.get(one["column"], "R@1 by the reward scorer minus R@1 by the held-out scorer")
        lines.append(f"| {one['more']} | {one['less']} | {column} | {_cell(one['difference'], *one['interval'])} |")
    images = ", ".join(f"{n:,}" for n in result["images"])
    lines += [
        "",
        f"Albums of {images} images, seeds {', '.join(map(str, result['seeds']))}: means and 95 % intervals over seeds; of the differences, "
        f"95 % bootstrap intervals over bags. Made by `{result['command']}` on {result['hardware']}, one thread.",
    ]
    return "\n".join(lines)
