"""docs/paper_index.yaml: code, recipe, test and status of every table, figure and equation of the papers, as a page of the site."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import read_yaml
from scripts.reproduction.findings import verdicts_of
from scripts.reproduction.index_rows import start_and_data
from scripts.reproduction.index_rows import to_markdown as table_rows
from scripts.reproduction.numbers import look_up
from scripts.reproduction.real import is_embedded, preset_names

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROWS = DOCS / "paper_index.yaml"
RESULTS = DOCS / "results"

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
}
_HEADINGS = {"smile": "SMILE", "discritune": "DiscriTune", "sle": "SLE", "ndlb": "No Detail Left Behind"}


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
    links = [f"[{Path(row['page']).stem}]({row['page']})"]
    links += [f"[{Path(file).name}]({Path(file).relative_to('docs').as_posix()})" for file in row.get("results", ())]
    links += [f"[picture]({Path(row['figure']).relative_to('docs').as_posix()})"] if "figure" in row else []
    return "<br>".join(part for part in [*parts, ", ".join(links)] if part)


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The page."""
    counted = Counter(row["status"] for row in rows)
    lines = [
        "# Index of the papers",
        "",
        "This page lists every table, figure, numbered equation and algorithm of the four papers, with the code, recipe, command, tests and page",
        "for it. No number of a paper was reproduced on the paper's own data, because neither the images nor the papers' captioners were",
        "available. All experiments were run on the embedded world. Verdicts count the findings of a row in [the findings](findings.md) of its",
        "paper: holds, does not hold, open, no difference seen; not compared, where no finding names the table.",
        "",
        "Below the items of each paper are the rows of its tables. Preset, start and data are those of the paper's experiment, read from the preset.",
        "Rows that were not run say what they need, by the names in a folder for `scripts/reproduce.py --data_root`; rows measured in small name",
        "the row of the result that measures them. Columns are keys of our results:",
        "`reward_` is the scorer of the reward, as in the papers; in small, the held-out scorer may stand for it, and R@1 among 100 drawn images for",
        "P@1 in blocks of 100. The verdict of a row counts the comparisons of the findings that it takes part in.",
        "",
        "| status | rows | meaning |",
        "|:--|--:|:--|",
        *(f"| {status} | {counted[status]} | {meaning} |" for status, meaning in STATUSES.items()),
        "",
        "The page is made of [paper_index.yaml](paper_index.yaml). A test checks that every file, test and number on it exists, and that no item of a",
        "paper is missing. ± is one standard error over seeds. [Reproduction](reproduction.md) shows the papers' numbers beside ours, with intervals.",
    ]
    for paper, title in PAPERS.items():
        lines += [
            "",
            f"## {_HEADINGS[paper]}",
            "",
            title.split(": ", 1)[1] + ".",
            "",
            "| | status | where |",
            "|:--|:--|:--|",
        ]
        for row in rows:
            if row["paper"] == paper:
                number = row["number"] if row["number"].isdigit() else ""
                kind = f"{row['kind'].capitalize()} {number}: " if number else ""
                lines.append(f'| <a id="{row["id"]}"></a>{kind}{row["title"]} | {_said(row)} | {_where(row)} |')
        of_paper = [row for row in rows if row["paper"] == paper]
        lines += ["", f"### Rows of {_HEADINGS[paper]}'s tables", *table_rows(of_paper, _all_results(), RESULTS)]
    return "\n".join(lines) + "\n"
