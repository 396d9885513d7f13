"""Reproduces the papers' tables as far as the machine allows. `make docs` shows the results.

    python reproduction/reproduce.py --list                          # every row, and what is missing
    python reproduction/reproduce.py --processes 2                   # run what is missing
    python reproduction/reproduce.py --only smile-table-1            # rows or runs by name
    python reproduction/reproduce.py --data_root DATA                # also rows on the papers' data
    python reproduction/reproduce.py --only released --data_root DATA   # the authors' captioners, beside the published numbers
    python reproduction/reproduce.py --check                         # exit code 1 if results are stale or rows of tables are wrong

reproduction/paper_index.yaml defines the runs. A finished result of the same settings, seeds and version of the embedded world is not
computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path

from hf_captionrl.utils.io import installed_versions
from reproduction import RESULTS, ROOT
from reproduction import make_paper_index as index
from reproduction.measurements import measured, shown
from reproduction.real import is_embedded, missing_of, preset_names, result_path, run_preset, with_makers
from reproduction.runs import CONFIGS, Run, changed, execute, finished, in_order, moved_targets, to_run


def load_runs(path: Path = index.ROWS) -> dict[str, Run]:
    """The runs of the embedded world by name; runs that others need come first."""
    return {run["name"]: Run(**run) for run in index.load_index(path)["runs"]}


def load_rows() -> list[dict[str, Any]]:
    """The rows of the papers' tables, our own presets on photographs (`--only photographs`) and the authors' captioners (`released`)."""
    content = index.load_index()
    presets = [name for name in preset_names() if name.startswith("photographs/")]
    ours = [{"id": p, "status": "ours", "numbers": [{"preset": p}]} for p in presets]
    return [*content["rows"], *content["released"], *ours]


def comparison(rows: Sequence[Mapping[str, Any]], output: Path) -> Table:
    """Published numbers beside ours, of presets that have a result on the papers' data."""
    table = Table("preset", "number", "published", "ours", "difference")
    for entry in (entry for row in rows for entry in row.get("numbers", ()) if {"paper", "preset_at"} <= entry.keys()):
        path, cells = result_path(entry["preset"], output), ["not measured", ""]  # such as METEOR without Java
        if path.exists():
            with contextlib.suppress(KeyError):
                ours = measured(entry["preset_at"], json.loads(path.read_text(encoding="utf-8"))).value
                cells = [shown(ours), f"{ours - entry['paper']:+.3f}"]
            table.add_row(entry["preset"], entry["what"], shown(entry["paper"]), *cells)
    return table


def _seeds(run: Run, asked: Sequence[int] | None) -> Sequence[int]:
    return asked if asked and run.seeds else run.seeds


def _results(runs: Mapping[str, Run], output: Path, asked: Sequence[int] | None) -> dict[str, Any]:
    found = {name: finished(run, _seeds(run, asked), output) for name, run in runs.items()}
    return {name: record for name, record in found.items() if record is not None}


def _asked(
    rows: Sequence[dict[str, Any]], only: Sequence[str] | None, runs: Mapping[str, Run]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows that --only names, and the runs that they need, in the order of the file."""
    if not only:
        return list(rows), list(runs)
    names_of = {row["id"]: {row["id"], row["id"].split("/")[0]} for row in rows}
    if unknown := set(only) - set().union(*names_of.values()) - runs.keys():
        raise SystemExit(f"--only {' '.join(sorted(unknown))} is neither a row nor a run. See --list.")
    rows = [row for row in rows if names_of[row["id"]] & set(only)]
    names = {entry["run"] for row in rows for entry in row.get("numbers", ()) if "run" in entry}
    names |= set(only) & runs.keys()
    names |= {other for name in names for other in runs[name].after}
    return rows, [name for name in runs if name in names]


def _presets(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Presets of the papers' data that numbers and rows of tables name."""
    entries = [entry for row in rows for key in ("numbers", "lines") for entry in row.get(key, ())]
    named = dict.fromkeys(entry["preset"] for entry in entries if "preset" in entry)
    return [preset for preset in named if not is_embedded(preset)]


def _listing(
    rows: Sequence[dict[str, Any]], wanted: Sequence[str], runs: Mapping[str, Run], args: argparse.Namespace
) -> Table:
    left = {name for name, run in runs.items() if to_run(run, _seeds(run, args.seeds), args.output)}
    results = _results(runs, args.output, args.seeds)
    stale = {name for name, record in results.items() if "stale" in runs[name].changed(record).values()}
    table = Table(Column("row", overflow="fold"), "status", "embedded world", "the paper's data")
    of_rows = {entry["run"] for row in rows for entry in row.get("numbers", ()) if "run" in entry}
    others = [{"id": "", "status": "no row", "numbers": [{"run": name}]} for name in wanted if name not in of_rows]
    for row in [*rows, *others]:
        names = dict.fromkeys(entry["run"] for entry in row.get("numbers", ()) if "run" in entry)
        said = []
        for name in names:
            state = f"to run, about {runs[name].minutes} minutes" if name in left else "finished"
            said.append(f"{name}: {state}{', stale' if name in stale else ''}")
        presets = _presets([row])
        missing = list(dict.fromkeys(path for preset in presets for path in missing_of(preset, args.data_root)))
        theirs = ("missing: " + ", ".join(missing) if missing else "to run") if presets else ""
        makers = [name for name in with_makers(presets, args.data_root, index.until_of(rows)) if name not in presets]
        theirs += f"; runs {', '.join(makers)} first" if makers else ""
        if presets and all(result_path(preset, args.output).exists() for preset in presets):
            theirs = "finished"
        table.add_row(row["id"], row["status"], "\n".join(said), theirs)
    return table


def check() -> tuple[list[str], list[str]]:
    """What is out of date or wrong, and what is not known of the committed results."""
    rows, runs = index.load_rows(), load_runs()
    results = _results(runs, RESULTS, None)
    texts = {path.relative_to(RESULTS): path.read_text(encoding="utf-8") for path in sorted(RESULTS.rglob("*.json"))}
    wrong = [f"{name} was made from a checkout with changes." for name, text in texts.items() if "+changes" in text]
    unknown = []
    wrong += [
        f"reproduction/results/{name}.json is not recognised as the result of its run: settings or seeds differ."
        for name in runs.keys() - results.keys()
        if (RESULTS / f"{name}.json").exists()
    ]
    wrong += [f"reproduction/paper_index.yaml: {fault}" for fault in index.faults(rows, runs, results)]
    for name, record in results.items():
        for preset, why in runs[name].changed(record).items():
            if why == "stale":
                wrong.append(
                    f"reproduction/results/{name}.json is stale: its preset {preset} changed after it was made."
                )
            else:
                unknown.append(f"reproduction/results/{name}.json does not say the settings of its preset {preset}.")
        for title in moved_targets(runs[name], record, RESULTS):
            wrong.append(
                f"reproduction/results/{name}.json: {title} is where a curve reaches numbers of {runs[name].until[title][0]} that have "
                f"changed. Run python reproduction/reproduce.py --only {name}."
            )
    for preset in preset_names():
        path = result_path(preset, RESULTS)
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if path.exists() and (state := changed(record, [preset], CONFIGS).get(preset)):
            (wrong if state == "stale" else unknown).append(f"{path.name}: the settings of its preset are {state}.")
    return wrong, unknown


def _run_all(
    rows: Sequence[dict[str, Any]],
    wanted: Sequence[str],
    runs: Mapping[str, Run],
    args: argparse.Namespace,
    console: Console,
) -> dict[str, str]:
    """Run what is missing, with a progress bar; returns the reasons of runs that were not run, by name."""
    reasons: dict[str, str] = {}
    wanted = [name for name in wanted if to_run(runs[name], _seeds(runs[name], args.seeds), args.output)]
    until = index.until_of(rows)
    presets = with_makers(_presets(rows), args.data_root, until) if args.data_root else {}
    folders = {"output": args.output.resolve(), "runs_dir": args.runs_dir.resolve()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("runs", total=len(wanted) + len(presets))
        told = {"told": progress.console.print, **folders}

        def work(name: str) -> None:
            progress.update(bar, description=name)
            if name in presets:
                why = run_preset(name, args.data_root, args.seeds or [0], until=until.get(name), **told)
            else:
                why = execute(runs[name], _seeds(runs[name], args.seeds), others=runs, **told)
            if why is not None:
                reasons[name] = why
            progress.advance(bar)

        in_order({**{name: set(runs[name].after) for name in wanted}, **presets}, work, args.processes)
    return reasons


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="rows of the index, or runs")
    parser.add_argument("--seeds", type=int, nargs="+", help="replace the seeds of each run; 0 for the papers' data")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    models = ROOT / "outputs" / "reproduction"
    parser.add_argument("--runs_dir", type=Path, default=models, help="folder of the models")
    parser.add_argument("--data_root", type=Path, help="folder of the papers' data and captioners")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="runs at a time; use about one per core, and 7 GB of memory for each on photographs",
    )
    parser.add_argument("--list", action="store_true", help="show what is finished and what is missing; runs nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is out of date or wrong")
    args = parser.parse_args(argv)
    console = Console()
    if args.check:
        wrong, unknown = check()
        print(*wrong, *unknown, *([] if wrong else ["The results are up to date."]), sep="\n")
        return int(bool(wrong))
    runs = load_runs()
    rows, wanted = _asked(load_rows(), args.only, runs)
    if args.list:
        console.print(_listing(rows, wanted, runs, args))
        return 0
    if args.output == RESULTS and installed_versions().get("git_revision", "").endswith("+changes"):
        parser.error(
            "the checkout has changes, so that no revision names what made a result; commit them, or set --output"
        )
    reasons = _run_all(rows, wanted, runs, args, console)
    if (table := comparison(rows, args.output)).row_count:
        console.print(table)
    for name, why in reasons.items():
        console.print(f"{name}: {why}", markup=False)
    return int(any("exit code" in why for why in reasons.values()))


if __name__ == "__main__":
    raise SystemExit(main())
