"""The index of the papers: no item of a paper is missing, and whatever a row names is there."""

import ast
import fnmatch
import functools
import json
import shlex
from pathlib import Path

import pytest

from hf_captionrl.experiments.rows import row_names
from scripts import make_paper_index
from scripts.make_paper_index import PAPERS, STATUSES, find_number, load_index, load_rows, to_markdown
from scripts.reproduction.findings import verdicts_of
from scripts.reproduction.real import settings_of
from scripts.reproduction.runs import CONFIGS
from tests.test_docs import parse

ROOT = Path(__file__).parents[1]
ROWS = load_rows()
# What a run can be configured by: rows of the papers' tables, and base files such as smile_blip/coco.
RUNS = {run["name"] for run in load_index()["runs"]}
NAMES = [*row_names(CONFIGS), *(f"{file.parent.name}/{file.stem}" for file in CONFIGS.glob("*/*.yaml"))]

# What the papers number, counted in the papers: the highest number of each kind; none is left out in between.
NUMBERED = {
    "smile": {"table": 7, "figure": 5, "equation": 4, "algorithm": 1},
    "discritune": {"table": 14, "figure": 3, "equation": 1},
    "sle": {"table": 4, "figure": 4, "equation": 16, "algorithm": 1},
    "ndlb": {"table": 14, "figure": 9, "equation": 1, "algorithm": 2},
}
KEYS = {
    "id",
    "paper",
    "kind",
    "number",
    "title",
    "status",
    "code",
    "recipes",
    "command",
    "tests",
    "results",
    "numbers",
}
KEYS |= {"figure", "page", "note"}


@functools.cache
def names(file):
    """What a Python file defines at its top level."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def faults(row):
    """What a row names that is not there, or does not say."""
    found = [f"key {key}" for key in row.keys() - KEYS]
    for entry in row.get("code", []):
        file, _, name = entry.partition(":")
        if not (ROOT / file).is_file() or (name and name not in names(file)):
            found.append(entry)
    for entry in row.get("tests", []):
        file, _, name = entry.partition("::")
        if not (ROOT / file).is_file() or not name.startswith("test_") or name not in names(file):
            found.append(entry)
    found += [
        pattern
        for pattern in row.get("recipes", [])
        if not (fnmatch.filter(NAMES, pattern) or list(ROOT.glob(pattern)))
    ]
    found += [
        file for file in [*row.get("results", []), *filter(None, [row.get("figure")])] if not (ROOT / file).is_file()
    ]
    if not (ROOT / "docs" / row["page"]).is_file():
        found.append(row["page"])
    for entry in row.get("numbers", []):
        found += [f"key {key}" for key in entry.keys() - {"what", "paper", "run", "at", "preset", "preset_at"}]
        if "preset" in entry and entry["preset"] not in NAMES:
            found.append(entry["preset"])
        if "run" in entry:
            file = f"docs/results/{entry['run']}.json"
            if entry["run"] in RUNS and not (ROOT / file).is_file():
                continue  # tests/test_reproduce.py has the list of runs that are not finished
            try:
                assert file in row.get("results", []), f"{file} is not among the row's results"
                find_number(entry["at"], json.loads((ROOT / file).read_text()))
            except (AssertionError, KeyError, FileNotFoundError) as error:
                found.append(f"{entry['what']}: {error}")
    status = row["status"]
    needed = {
        "measured in small": {"code", "command", "tests", "results", "numbers"},
        "runs": {"code", "command", "tests"},
        "tested": {"code", "tests"},
        "not run": {"code", "tests", "note"},
        "not applicable": {"note"},
    }[status]
    return found + [f"{status} without {key}" for key in needed if not row.get(key)]


def test_no_numbered_item_of_a_paper_is_missing():
    expected = {
        f"{paper}-{kind}-{number}"
        for paper, kinds in NUMBERED.items()
        for kind, last in kinds.items()
        for number in range(1, last + 1)
    }
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids))
    assert {id for id in ids if "-unnumbered-" not in id} == expected
    for row in ROWS:
        assert row["id"] == f"{row['paper']}-{row['kind']}-{row['number']}"
        assert row["paper"] in PAPERS
        assert row["status"] in STATUSES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_whatever_a_row_names_is_there(row, monkeypatch):
    assert faults(row) == []
    if "command" in row:
        monkeypatch.chdir(ROOT)
        parse(shlex.split(row["command"]))


def test_a_row_that_names_nothing_is_seen():
    good = next(row for row in ROWS if row["id"] == "smile-table-1")
    bad = {
        "code": ["hf_captionrl/losses/smile.py:no_loss"],
        "tests": ["tests/losses/test_smile.py::test_nothing"],
        "recipes": ["smile/table9/*"],
        "results": [*good["results"], "docs/results/none.json"],
        "numbers": [{"what": "R@1", "run": "smile_blip_seeds", "at": "rows/GAN/length"}],
        "page": "none.md",
    }
    for key, value in bad.items():
        assert len(faults({**good, key: value})) == 1, key
    assert faults({**good, "note": "", "status": "not run"}) == ["not run without note"]
    assert "measured in small without results" in faults(
        {key: value for key, value in good.items() if key != "results"}
    )


def test_the_page_is_made_of_the_rows(monkeypatch, tmp_path, capsys):
    assert make_paper_index.main(["--check"]) == 0
    page = to_markdown(ROWS)
    assert all(f'<a id="{row["id"]}"></a>' in page for row in ROWS)
    results = json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())
    length = {row["name"]: row for row in results["rows"]}["SMILE"]["length"]["mean"]
    assert f"SMILE: {length:.2f}" in page
    stale = tmp_path / "paper_index.md"
    stale.write_text(page.replace(f"{length:.2f}", "99.99"))
    monkeypatch.setattr(make_paper_index, "PAGE", stale)
    assert make_paper_index.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out


def test_equal_rows_of_papers_are_one_preset_and_come_from_one_run():
    presets, places = {}, {}
    for entry in (entry for row in ROWS for entry in row.get("numbers", ()) if "preset" in entry):
        settings = {k: v for k, v in settings_of(entry["preset"]).items() if k not in ("output_dir", "title")}
        presets.setdefault(json.dumps(settings, sort_keys=True), set()).add(entry["preset"])
        if "run" in entry:
            place = (entry["preset"], entry.get("preset_at", entry["at"]))
            places.setdefault(place, set()).add((entry["run"], entry["at"]))
    assert [names for names in presets.values() if len(names) > 1] == []
    assert {place: found for place, found in places.items() if len(found) > 1} == {}


def test_our_captions_are_compared_with_the_papers_number_of_the_same_metric():
    """EMScore is not the mean of the frames, and HolisticCaps are not the annotators' captions."""
    for row in ROWS:
        for entry in row.get("numbers", ()):
            key = entry.get("preset_at", "").rpartition("/")[2]
            if "run" in entry and key.startswith(("emscore_recall", "more_")):
                assert entry["at"].rpartition("/")[2] == key, entry["what"]


def test_a_row_measured_in_small_has_the_verdicts_of_its_findings(monkeypatch):
    findings = {
        "smile": {
            "findings": [
                {"paper": "R@1 (Tables 1 and 3, row 2)", "compare": []},
                {
                    "paper": "a random subset (Figure 4a)",
                    "compare": [{"run": "r", "first": "a", "second": "b", "expect": ">"}],
                },
            ]
        }
    }
    monkeypatch.setattr("scripts.reproduction.findings.load_findings", lambda: findings)
    for number, expected in {"1": ["not tested"], "2": [], "3": ["not tested"], "4": []}.items():
        assert verdicts_of("smile", "table", number, {}) == expected
    assert verdicts_of("smile", "figure", "4", {}) == ["not tested"]


def test_the_page_names_start_and_data_of_the_papers_presets():
    line = next(line for line in to_markdown(ROWS).splitlines() if 'id="smile-table-3"' in line)
    assert (
        "start: `outputs/smile/mle/from-scratch/model`, `outputs/blip-pretrained`, `outputs/blip-coco-finetuned`"
        in line
    )
    assert "data: `dataset_coco.json with capenrich_hard_pool.json`" in line
