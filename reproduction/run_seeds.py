"""Run a recipe with several seeds, and write mean and standard error of every number into one table.

    python reproduction/run_seeds.py smile_blip --seeds 0 1 2 --output reproduction/results/smile_blip_seeds

writes `smile_blip_seeds.json` and `smile_blip_seeds.md`. Arguments after `--` go to the recipe. A seed with existing
results is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.metrics.columns import COLUMNS, REWARD_COLUMNS, SAMPLE_COLUMNS, Column
from hf_captionrl.utils.io import atomic_write_text, write_json

ROOT = Path(__file__).resolve().parents[1]
BEST_ALPHA = "SLE (best alpha)"
"""Row of the alpha that the validation split chose, which can differ between seeds."""


def aggregate(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every number of every row as `{"mean", "standard_error", "values"}` over seeds; with one seed, its `interval` over images."""
    names = [[row["name"] for row in rows] for rows in runs]
    if any(other != names[0] for other in names):
        raise ValueError(f"The runs have different rows: {names}. Run all seeds with the same arguments.")
    result = []
    for position, name in enumerate(names[0]):
        entry: dict[str, Any] = {"name": name}
        for key, value in runs[0][position].items():
            found = [rows[position].get(key) for rows in runs]
            if isinstance(value, bool) or not all(isinstance(each, int | float) for each in found):
                continue
            values = [float(rows[position][key]) for rows in runs]
            error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
            entry[key] = {"mean": float(np.mean(values)), "standard_error": error, "values": values}
            if len(runs) == 1 and (interval := runs[0][position].get(f"{key}_ci")):
                entry[key]["interval"] = interval
        result.append(entry)
    return result


def collapsed(folder: Path) -> bool:
    """Whether a recipe has failed because the captions of a run have collapsed: its rows are written, and count."""
    path = folder / "results.json"
    found = json.loads(path.read_text()).get("selected", {}) if path.is_file() else {}
    return any("collapsed" in run for run in found.values())


def aggregate_curves(
    runs: Sequence[Mapping[str, Sequence[Mapping[str, float]]]], x: str = "step"
) -> dict[str, list[dict[str, Any]]]:
    """The points of every curve by row name, each with its `x` and what [`aggregate`] makes of its numbers.

    Points that not every seed has are left out, and so are rows without a common point.
    """
    found = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        places = [{point[x]: {**point, "name": name} for point in run.get(name, ())} for run in runs]
        common = sorted(set.intersection(*(set(of_seed) for of_seed in places)))
        if not common:
            continue
        points = [aggregate([[of_seed[place]] for of_seed in places])[0] for place in common]
        found[name] = [
            {x: place, **{key: value for key, value in point.items() if key not in ("name", x, "epoch")}}
            for place, point in zip(common, points, strict=True)
        ]
    return found


def of_best_alpha(
    runs: Sequence[Sequence[dict[str, Any]]], samples: Sequence[Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """The rows of each seed, with the one that the validation split chose again as BEST_ALPHA, if every seed chose one."""
    chosen = [(sampled.get("best_alpha") or {}).get("name") for sampled in samples]
    if None in chosen:
        return [list(of_seed) for of_seed in runs]
    rows = zip(runs, chosen, strict=True)
    return [
        [*of_seed, *({**row, "name": BEST_ALPHA} for row in of_seed if row["name"] == name)] for of_seed, name in rows
    ]


def guard_steps(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[int | None]]:
    """For each row, the step at which the guard first tripped or refused an evaluation, by seed; None: at no step."""
    found: dict[str, list[int | None]] = {}
    for name in runs[0]["learning_curves"]:
        guards = [run.get("selected", {}).get(name, {}).get("guard", {}) for run in runs]
        steps = [[entry["step"] for key in ("trips", "refused") for entry in guard.get(key, ())] for guard in guards]
        found[name] = [min(of_seed, default=None) for of_seed in steps]
    return found


def to_markdown(
    rows: list[dict[str, Any]],
    seeds: list[int],
    command: str,
    further: Sequence[Column] = (*REWARD_COLUMNS, *SAMPLE_COLUMNS),
) -> str:
    """The aggregated rows as a Markdown table."""
    shown = (*COLUMNS, *(column for column in further if any(column.key in row for row in rows)))
    columns = [(c.key, c.title, c.digits) for c in shown]
    lines = ["| |" + "".join(f" {title} |" for _, title, _ in columns), "|:--|" + "--:|" * len(columns)]
    for row in rows:
        cells = []
        for key, _, digits in columns:
            cells.append(_cell(row[key], digits) if key in row else "–")
        lines.append(f"| {row['name']} |" + "".join(f" {cell} |" for cell in cells))
    spread = "both values" if len(seeds) == 2 else "standard error"
    said = f"Mean and {spread} over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"Seed {seeds[0]}"
    lines += ["", f"{said}. Made by `{command}`.", ""]
    return "\n".join(lines)


def _cell(found: Mapping[str, Any], digits: int) -> str:
    more = f" ±{found['standard_error']:.{digits}f}" if found["standard_error"] is not None else ""
    more = f" [{', '.join(f'{end:.{digits}f}' for end in found['interval'])}]" if "interval" in found else more
    if len(found["values"]) == 2:  # too few for an error
        more = f" ({', '.join(f'{value:.{digits}f}' for value in found['values'])})"
    return f"{found['mean']:.{digits}f}{more}"


def _of_any_machine(words: Sequence[str]) -> list[str]:
    """Arguments without an absolute folder of runs."""
    text = re.sub(r"\0--runs_dir[=\0]/[^\0]*", "", "\0".join(["", *words]))
    return text.split("\0")[1:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", required=True, help="Path without ending.")
    parser.add_argument("--runs_dir", default="outputs/seeds")
    arguments = sys.argv[1:]
    further: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, further = arguments[:at], arguments[at + 1 :]
    args = parser.parse_args(arguments)
    preset = list[str]()
    if not {"--row", "--config"} & set(further):  # the default of a recipe may be another one
        preset = ["--config", *map(str, (ROOT / "recipes/configs" / args.recipe).glob("*scenes.yaml"))]
    runs, samples = [], []
    for seed in args.seeds:
        folder = Path(args.runs_dir) / args.recipe / f"seed-{seed}"
        if not (folder / "results.json").exists():
            command = [sys.executable, str(ROOT / "recipes" / f"{args.recipe}.py"), *preset, "--seed", str(seed)]
            done = subprocess.run([*command, "--output_dir", str(folder), *further], check=False)
            if not collapsed(folder):
                done.check_returncode()
        runs.append(json.loads((folder / "results.json").read_text()))
        found = folder / "samples.json"
        samples.append(json.loads(found.read_text()) if found.exists() else {})
    rows = aggregate(of_best_alpha([run["rows"] for run in runs], samples))
    again = " ".join(["python", "reproduction/run_seeds.py", *_of_any_machine(sys.argv[1:])])
    # Seeds may have been run days apart, so each result contains its revision.
    revisions = [run["versions"].get("git_revision") for run in runs]
    record = {"rows": rows, "seeds": args.seeds, "command": again}
    record |= {"versions": runs[0]["versions"], "revisions": revisions}
    if all(run.get("learning_curves") for run in runs):
        record["learning_curves"] = aggregate_curves([run["learning_curves"] for run in runs])
        record["guard"] = guard_steps(runs)
    if any(samples):
        points = [sampled.get("points", {}) for sampled in samples]
        record["over_temperatures"] = aggregate_curves(points, x="temperature")
        record["best_alpha"] = [sampled.get("best_alpha") for sampled in samples]
    write_json(f"{args.output}.json", record)
    atomic_write_text(f"{args.output}.md", to_markdown(rows, args.seeds, again))


if __name__ == "__main__":
    main()
