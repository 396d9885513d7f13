"""The page of the site with code, recipe, test and status of every table, figure and equation of the papers.

It is made of reproduction/paper_index.yaml; its numbers are read from the committed results.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import read_yaml
from reproduction import RESULTS, ROOT
from reproduction.findings import verdicts_of, verdicts_of_row
from reproduction.measurements import look_up
from reproduction.real import columns_of, is_embedded, needs_of, preset_names, result_path, settings_of
from reproduction.runs import Run

ROWS = ROOT / "reproduction" / "paper_index.yaml"

PAPERS = {
    "smile": 'SMILE: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation"',
    "discritune": 'DiscriTune: Dessì et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning"',
    "sle": 'SLE: Chen and Jin 2020, "Better Captioning with Sequence-Level Exploration"',
    "ndlb": 'NDLB: "No Detail Left Behind: Revisiting Self-Retrieval for Fine-Grained Image Captioning"',
}
STATUSES = {
    "measured in small": "run on the embedded world; the numbers are committed, and the verdict says whether they show the paper's effect",
    "runs": "one command produces it on the embedded world; no number is claimed",
    "tested": "a formula, an algorithm or settings; the listed tests compare it with something independent",
    "not run": "code, settings and tests exist; the note says what is missing to run it",
    "not applicable": "there is nothing to run; the note says why",
    "withdrawn": "it was part of the project once; the note says why it is no longer",
}
HEADINGS = {"smile": "SMILE", "discritune": "DiscriTune", "sle": "SLE", "ndlb": "No Detail Left Behind"}


def load_index(path: Path = ROWS) -> dict[str, Any]:
    """The whole file."""
    return read_yaml(path)


def load_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows of the index. One dict per row; its keys are described at the top of the file."""
    return load_index(path)["rows"]


@functools.cache
def _results(run: str) -> Any:
    return json.loads((RESULTS / f"{run}.json").read_text(encoding="utf-8"))


@functools.cache
def _all_results() -> dict[str, Any]:
    return {file.stem: _results(file.stem) for file in RESULTS.glob("*.json")}


def find_number(place: str, value: Any) -> tuple[float, float | None]:
    """A number or a mean of a JSON file, and its standard error where there is one."""
    value = look_up(place, value)
    if isinstance(value, dict):
        return float(value["mean" if "mean" in value else "value"]), value.get("standard_error")
    return float(value), None


def _number(mean: float, error: float | None) -> str:
    digits = 2 if abs(mean) >= 2 else 3
    return f"{mean:.{digits}f}" + (f" ±{error:.{digits}f}" if error is not None else "")


def _said(row: dict[str, Any]) -> str:
    numbers = [
        f"{entry['what']}: {_number(*find_number(entry['at'], _results(entry['run'])))}"
        for entry in row.get("numbers", ())
        if "run" in entry and (RESULTS / f"{entry['run']}.json").is_file()
    ]
    parts = ["; ".join(numbers), row.get("note", "")]
    status = f"**{row['status']}**"
    if row["status"] == "measured in small":
        verdicts = Counter(verdicts_of(row["paper"], row["kind"], row["number"], _all_results()))
        status += ": " + (", ".join(f"{verdict} {n}" for verdict, n in sorted(verdicts.items())) or "not compared")
    return status + "".join(f"<br>{part}" for part in parts if part)


def _presets(row: dict[str, Any]) -> str:
    """Starts and data of a row's presets for the paper's data."""
    patterns = [p.removeprefix("recipes/configs/").removesuffix(".yaml") for p in row.get("recipes", ())]
    names = [n for n in preset_names() if any(fnmatch.fnmatch(n, p) for p in patterns)]
    found = [start_and_data(n) for n in names if not is_embedded(n) and not n.endswith("/tiny")]
    if not found:
        return ""
    starts, data = (", ".join(f"`{value}`" for value in dict.fromkeys(values)) for values in zip(*found, strict=True))
    return f"start: {starts}; data: {data}"


def _where(row: dict[str, Any]) -> str:
    parts = [", ".join(f"`{entry}`" for entry in row.get(key, ())) for key in ("code", "recipes")]
    parts.append(_presets(row))
    parts.append(f"`{row['command']}`" if "command" in row else "")
    parts.append(", ".join(f"`{entry}`" for entry in row.get("tests", ())))
    links = [f"[{Path(row['page']).stem}](../docs/{row['page']})"]
    links += [
        f"[{Path(file).name}]({Path(file).relative_to('reproduction').as_posix()})" for file in row.get("results", ())
    ]
    links += [f"[picture](../{row['figure']})"] if "figure" in row else []
    return "<br>".join(part for part in [*parts, ", ".join(links)] if part)


# --- rows of the papers' tables: what their presets state, their status and verdict, and what is wrong ---------------

KEYS = {"row", "preset", "preset_at", "run", "at", "start", "data", "command", "measures", "until", "status", "note"}
NOT_APPLICABLE, NOT_RUN, SMALL, FULL = "not applicable", "not run", "measured in small", "measured"
SETTINGS = ["settings"]
"""What a table measures that lists settings."""
_IN_SMALL = {"reward_blocks_recall_at_1": "rd100_recall_at_1"}
"""Columns that another column stands for on the embedded world."""
NOT_COMPARED = "not compared"
"""Verdict of a measured row that no finding compares; `faults` reports it."""


def start_and_data(preset: str) -> tuple[str, str]:
    """Start and data of a preset."""
    settings = settings_of(preset)
    parts = [settings[key] for key in ("vision_model", "language_model") if key in settings]
    start = settings.get("model_name_or_path") or " and ".join(parts)
    # The folder of an image folder names the data; the name of a published data set does.
    name = settings.get("dataset_name", "scenes")
    data = [settings["data_dir"] if name == "imagefolder" else name]
    data += [settings[key] for key in ("table_split", "caption_column") if key in settings]
    more = [settings[key] for key in ("train_captions", "test_references", "pool", "bags") if settings.get(key)]
    if settings.get("train_captions") and "train_captions_column" in settings:
        more[0] += f" ({settings['train_captions_column']})"
    return str(start), " with ".join(filter(None, [", ".join(map(str, data)), ", ".join(more)]))


def until_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """For presets whose row is their learning curve where it reaches another preset's number: that preset and the number's place."""
    return {line["preset"]: line["until"] for row in rows for line in row.get("lines", ()) if "until" in line}


def measures_of(table: Mapping[str, Any], line: Mapping[str, Any]) -> list[str]:
    """Columns of a row in the paper, by the keys of our results."""
    return list(line.get("measures", table["measures"]))


def missing_columns(table: Mapping[str, Any], line: Mapping[str, Any], record: Any) -> list[str]:
    """Columns of the paper that the result does not have; the held-out scorer may stand for the scorer of the reward."""
    row = look_up(line["at"], record)
    wanted = {key: {key, key.removeprefix("reward_"), _IN_SMALL.get(key, key)} for key in measures_of(table, line)}
    return [key for key, keys in wanted.items() if not any(row.get(each) is not None for each in keys)]


def is_measured(table: Mapping[str, Any], line: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """Whether a result has at least one of the row's columns; its preset may have got them after the run."""
    record = results.get(line.get("run", ""))
    return record is not None and len(missing_columns(table, line, record)) < len(measures_of(table, line))


def status_of(table: Mapping[str, Any], line: Mapping[str, Any], results: Mapping[str, Any], output: Path) -> str:
    """Status of a row: it follows from what the row names and from which results there are."""
    if "status" in line:
        return str(line["status"])
    if "preset" in line and result_path(line["preset"], output).exists():
        return FULL
    return SMALL if is_measured(table, line, results) else NOT_RUN


def faults(rows: Sequence[Mapping[str, Any]], runs: Mapping[str, Run], results: Mapping[str, Any]) -> list[str]:
    """What rows of tables name that does not exist, or do not say."""
    found = [f"{row['id']}: no rows" for row in rows if row["kind"] == "table" and not row.get("lines")]
    for table in rows:
        counted = Counter(line["row"] for line in table.get("lines", ()))
        found += [f"{table['id']}: {name!r} is there {n} times" for name, n in counted.items() if n > 1]
        for line in table.get("lines", ()):
            found += [f"{table['id']}, {line['row']}: {why}" for why in _faults(table, line, runs, results)]
    return found


def _faults(
    table: Mapping[str, Any], line: Mapping[str, Any], runs: Mapping[str, Run], results: Mapping[str, Any]
) -> Iterator[str]:
    yield from (f"key {key}" for key in sorted(line.keys() - KEYS))
    preset, run, place = line.get("preset"), line.get("run", ""), line.get("preset_at", "")
    if "status" in line:
        if line["status"] != NOT_APPLICABLE or preset or run or "note" not in line:
            yield "its status follows from run and preset; only rows that are not applicable have one, with a note"
        return
    if preset is None:
        yield from (f"no preset and no {key}" for key in ("start", "data") if key not in line)
        if "note" not in line and not is_measured(table, line, results):
            yield "not run, without a preset or a note of what is missing"
    elif preset not in preset_names():
        yield f"preset {preset}"
    else:
        yield from (f"{key} is what the preset states" for key in ("start", "data") if key in line)
        if place not in ("start", "trained", "reached") and not place.startswith("rows/"):
            yield f"preset_at {place!r}"
        if place == "trained" and settings_of(preset).get("num_train_epochs") == 0:
            yield "trained, but its preset only evaluates"
        if ("until" in line) != (place == "reached"):
            yield "until belongs to preset_at: reached"
        elif "until" in line and line["until"][0] not in preset_names():
            yield f"until names {line['until'][0]}"
        elif "until" in line and not settings_of(preset).get("learning_curves"):
            yield "until, but its preset writes no curve"
        wanted = [key for key in measures_of(table, line) if [key] != SETTINGS]
        yield from (f"the table of its preset has no {key}" for key in wanted if key not in columns_of(preset))
    if run and run not in runs:
        yield f"run {run}"
    elif run in results:
        try:
            missing_columns(table, line, results[run])
            if verdict_of(table, line, results) == NOT_COMPARED:
                yield "measured, but no finding of reproduction/findings.yaml that names its table compares it"
        except (KeyError, AttributeError) as error:
            yield f"{run}: {error}"


def verdict_of(table: Mapping[str, Any], line: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Verdicts of the comparisons that the row takes part in; empty if it was not measured."""
    if not is_measured(table, line, results):
        return ""
    found = verdicts_of_row((table["paper"], table["kind"], table["number"]), line["run"], line["at"], results)
    counted = Counter(verdict for _, verdict in found)
    return ", ".join(f"{verdict} {n}" for verdict, n in sorted(counted.items())) or NOT_COMPARED


def _cells(table: Mapping[str, Any], line: Mapping[str, Any], results: Mapping[str, Any], output: Path) -> list[str]:
    start, data = start_and_data(line["preset"]) if "preset" in line else (line.get("start", ""), line.get("data", ""))
    if line.get("preset_at") == "rows/references":
        start = "annotators"
    status = status_of(table, line, results, output)
    notes = [status]
    if status == SMALL:
        record = results[line["run"]]
        # A place such as SLL-ME does not say the settings of its row; the row does.
        row = look_up(line["at"], record)
        name = row.get("name", line["at"].removeprefix("rows/"))
        notes = [f"{status}: {name} of [{line['run']}](results/{line['run']}.json)"]
        lost = missing_columns(table, line, record)
        notes += [f"without {', '.join(f'`{key}`' for key in lost)}"] if lost else []
    elif status == NOT_RUN and "run" in line:
        notes.append(f"{line['run']} has {'none of the columns' if line['run'] in results else 'no result'}")
    if status == NOT_RUN and "preset" in line:
        notes.append(needs_of(line["preset"]))
    notes += [line["note"]] if "note" in line else []
    preset = f"`{line['preset']}`" if "preset" in line else f"`{line['command']}`" if "command" in line else ""
    columns = "" if "measures" not in line else ", ".join(f"`{key}`" for key in line["measures"])
    cells = [line["row"], preset, start, data, columns, "; ".join(notes), verdict_of(table, line, results)]
    return [cell.replace("|", "\\|") for cell in cells]


def table_rows(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any], output: Path) -> list[str]:
    """A table per table of the papers; a column that is empty for all rows is left out."""
    lines = []
    heads = ["row", "preset or command", "start", "data", "columns", "status", "verdict"]
    for table in rows:
        if not table.get("lines"):
            continue
        cells = [_cells(table, line, results, output) for line in table["lines"]]
        kept = [n for n in range(len(heads)) if n == 0 or any(row[n] for row in cells)]
        measures = ", ".join(f"`{key}`" if " " not in key else key for key in table["measures"])
        lines += [
            "",
            f"**Table {table['number']}: {table['title']}.** Columns: {measures}.",
            "",
            f"| {' | '.join(heads[n] for n in kept)} |",
            "|" + ":--|" * len(kept),
            *(f"| {' | '.join(row[n] for n in kept)} |" for row in cells),
        ]
    return lines


# --- the page -------------------------------------------------------------------------------------------------------


INTRODUCTION = """# Index of the papers

This page lists every table, figure, numbered equation and algorithm of the four papers, with the code, recipe, command, tests and page
for it. No number of a paper was reproduced on the paper's own data, because neither the images nor the papers' captioners were
available. All experiments were run on the embedded world. Verdicts count the findings of a row in [the findings](findings_smile.md) of its
paper: holds, does not hold, open, no difference seen; not compared, where no finding names the table.

Below the items of each paper are the rows of its tables. Preset, start and data are those of the paper's experiment, read from the preset.
Rows that were not run say what they need, by the names in a folder for `reproduction/reproduce.py --data_root`; rows measured in small name
the row of the result that measures them. Columns are keys of our results:
`reward_` is the scorer of the reward, as in the papers; in small, the held-out scorer may stand for it, and R@1 among 100 drawn images for
P@1 in blocks of 100. The verdict of a row counts the comparisons of the findings that it takes part in.

| status | rows | meaning |
|:--|--:|:--|
{statuses}

`python reproduction/make_paper_index.py` generates this page from [paper_index.yaml](paper_index.yaml). A test checks that every file, test and
number on it exists, and that no item of a paper is missing. ± is one standard error over seeds. [Reproduction](reproduction.md) shows the
papers' numbers beside ours, with intervals."""


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The page."""
    counted = Counter(row["status"] for row in rows)
    statuses = [f"| {status} | {counted[status]} | {meaning} |" for status, meaning in STATUSES.items()]
    lines = [INTRODUCTION.format(statuses="\n".join(statuses))]
    for paper, title in PAPERS.items():
        lines += ["", f"## {HEADINGS[paper]}", "", title.split(": ", 1)[1] + "."]
        lines += ["", "| | status | where |", "|:--|:--|:--|"]
        for row in rows:
            if row["paper"] == paper:
                number = row["number"] if row["number"].isdigit() else ""
                kind = f"{row['kind'].capitalize()} {number}: " if number else ""
                lines.append(f'| <a id="{row["id"]}"></a>{kind}{row["title"]} | {_said(row)} | {_where(row)} |')
        of_paper = [row for row in rows if row["paper"] == paper]
        lines += ["", f"### Rows of {HEADINGS[paper]}'s tables", *table_rows(of_paper, _all_results(), RESULTS)]
    return "\n".join(lines) + "\n"
