"""Boosting followed by self-retrieval: a small version of Tables 3 to 5 of No Detail Left Behind, over seeds.

    captionrl boost --dataset scenes --split train --output outputs/boosted
    for s in 0 1 2 3 4; do
        python recipes/smile_blip.py --row smile/scenes/holistic --seed $s \
            --output_dir outputs/holistic/seed-$s
        python recipes/self_retrieval_blip.py --row ndlb/scenes/sr-l --seed $s \
            --output_dir outputs/sr_l/seed-$s
        python recipes/self_retrieval_blip.py --row ndlb/scenes/sr-lv --seed $s \
            --model_name_or_path outputs/holistic/seed-$s/model --output_dir outputs/sr_lv/seed-$s
    done
    python scripts/ndlb_order.py --seeds 0 1 2 3 4

writes docs/results/ndlb_order_seeds.json and prints the two tables of docs/boosting.md. Intervals are Student's t over
pairs with the same seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.io import write_json  # noqa: E402
from scripts.reproduction.numbers import seed_interval  # noqa: E402
from scripts.run_seeds import aggregate  # noqa: E402

COMMANDS = (
    "captionrl boost --dataset scenes --split train --output outputs/boosted",
    "for each seed s: python recipes/smile_blip.py --row smile/scenes/holistic --seed s "
    "--output_dir outputs/holistic/seed-s",
    "for each seed s: python recipes/self_retrieval_blip.py --row ndlb/scenes/sr-l "
    "--seed s --output_dir outputs/sr_l/seed-s",
    "for each seed s: python recipes/self_retrieval_blip.py --row ndlb/scenes/sr-lv "
    "--seed s --model_name_or_path outputs/holistic/seed-s/model --output_dir outputs/sr_lv/seed-s",
)
"""Commands of the runs, which the result records."""

GENERIC, SR_L = "generic start", "SR-L, random distractors, from generic"
HOLISTIC, SR_LV = "HolisticCap start", "SR-LV, bag curriculum, from HolisticCap"

_COLUMNS = {
    "length": "Words",
    "rd100_recall_at_1": "R@1 RD100 ↑",
    "bag_3_recall_at_1": "R@1 bags of 3 ↑",
    "bag_5_recall_at_1": "R@1 bags of 5 ↑",
    "bag_7_recall_at_1": "R@1 bags of 7 ↑",
    "cider_d": "CIDEr-D ↑",
    "hallucination": "Hallucination ↓",
    "fact_recall": "Fact recall ↑",
    "degenerate": "Degenerate ↓",
}
_FROM = {SR_L: "SR-L, random distractors, from there", SR_LV: "SR-LV, bag curriculum, from there"}


def collect(sr_l: Path, sr_lv: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Combine the results of all runs.

    Returns `commands`, `seeds`, `versions`, `rows` as of [`aggregate`], and `sr_lv_minus_sr_l` of [`differences`].
    """
    runs, versions = [], {}
    for seed in seeds:
        rows = []
        for folder, (start, trained) in ((sr_l, (GENERIC, SR_L)), (sr_lv, (HOLISTIC, SR_LV))):
            found = json.loads((folder / f"seed-{seed}" / "results.json").read_text(encoding="utf-8"))
            written = [row for row in found["rows"] if row["name"] != "references"]
            rows += [{**written[0], "name": start}, {**written[-1], "name": trained}]
            versions = found["versions"]
        runs.append(rows)
    table = aggregate(runs)
    record = {"commands": list(COMMANDS), "seeds": list(seeds), "rows": table}
    return record | {"sr_lv_minus_sr_l": differences(table, SR_LV, SR_L), "versions": versions}


def differences(rows: Sequence[Mapping[str, Any]], more: str, less: str) -> dict[str, dict[str, Any]]:
    """One row minus another, seed by seed.

    Returns for each number `mean`, `standard_error`, `values`, and `interval`, 95 % by Student's t (None where all seeds
    are alike).
    """
    named = {row["name"]: row for row in rows}
    found = {}
    for key in _COLUMNS:
        pairs = zip(named[more][key]["values"], named[less][key]["values"], strict=True)
        values = [a - b for a, b in pairs]
        (entry,) = aggregate([[{"name": "", key: value}] for value in values])
        interval = seed_interval(values)
        ends = None if interval.low is None else [interval.low, interval.high]
        found[key] = {**entry[key], "interval": ends}
    return found


def to_markdown(record: Mapping[str, Any]) -> str:
    """The full table, of which docs/boosting.md shows some columns, and the table of differences."""
    lines = ["| | " + " | ".join(_COLUMNS.values()) + " |", "|:--" + "|--:" * len(_COLUMNS) + "|"]
    for row in record["rows"]:
        cells = []
        for key in _COLUMNS:
            mean, error = row[key]["mean"], row[key]["standard_error"]
            cells.append(f"{mean:.1f} ±{error:.1f}" if key == "length" else f"{mean:.3f} ±{error:.3f}")
        lines.append(f"| {_FROM.get(row['name'], row['name'])} | " + " | ".join(cells) + " |")
    lines += ["", "| SR-LV minus SR-L | Mean | 95 % interval | Shown |", "|:--|--:|--:|:--|"]
    for key, title in _COLUMNS.items():
        found = record["sr_lv_minus_sr_l"][key]
        low, high = found["interval"] or (found["mean"], found["mean"])
        shown = "more" if low > 0 else "less" if high < 0 else "nothing"
        lines.append(f"| {title} | {found['mean']:.3f} | [{low:.3f}, {high:.3f}] | {shown} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sr_l", type=Path, default=Path("outputs/sr_l"), help="runs of SR-L, one folder per seed")
    parser.add_argument("--sr_lv", type=Path, default=Path("outputs/sr_lv"), help="runs of SR-LV, one folder per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/ndlb_order_seeds.json")
    arguments = parser.parse_args(argv)
    record = collect(arguments.sr_l, arguments.sr_lv, arguments.seeds)
    print(to_markdown(record))
    return write_json(arguments.output, record)


if __name__ == "__main__":
    main()
