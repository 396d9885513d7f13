"""The index of the papers: no item of a paper is missing, and whatever a row names is there."""

import ast
import fnmatch
import functools
import json
import shlex
from pathlib import Path

from reproduction import make_paper_index as index_rows
from reproduction.make_paper_index import PAPERS, STATUSES, find_number, load_index, load_rows
from scripts.docs_hooks import generated_pages
from tests.test_docs import parse

ROOT = Path(__file__).parents[2]
ROWS = load_rows()
RUNS = {run["name"] for run in load_index()["runs"]}
NAMES = index_rows.preset_names()

# What the papers number, counted in the papers: the highest number of each kind; none is left out in between.
NUMBERED = {
    "smile": {"table": 7, "figure": 5, "equation": 4, "algorithm": 1},
    "discritune": {"table": 14, "figure": 3, "equation": 1},
    "sle": {"table": 4, "figure": 4, "equation": 16, "algorithm": 1},
    "ndlb": {"table": 14, "figure": 9, "equation": 1, "algorithm": 2},
}
KEYS = set("id paper kind number title status code recipes command tests results numbers".split())
KEYS |= {"figure", "page", "note", "measures", "lines"}
# Rows with numbers of each table, counted in the papers; a row of DiscriTune's Table 1 has six data sets, and the tables of single rows
# that only the embedded world has are counted by hand as well.
COUNTED = {
    "smile": {1: 10, 2: 4, 3: 7, 4: 3, 5: 6, 6: 3, 7: 6},
    "discritune": {1: 30, 2: 4, 3: 24, 4: 8, 5: 10, 6: 3, 7: 3, 8: 3, 9: 3, 10: 4, 11: 7, 12: 12, 13: 12, 14: 3},
    "sle": {1: 2, 2: 12, 3: 5, 4: 11},
    "ndlb": {1: 12, 2: 4, 3: 6, 4: 9, 5: 8, 6: 15, 7: 10, 8: 6, 9: 4, 10: 9, 11: 3, 12: 3, 13: 6, 14: 9},
}
IN_SMALL_ONLY = ", in small only"
RESULTS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "reproduction/results").glob("*.json")}


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
    recipes = row.get("recipes", [])
    found += [pattern for pattern in recipes if not (fnmatch.filter(NAMES, pattern) or list(ROOT.glob(pattern)))]
    files = [*row.get("results", []), *([row["figure"]] if "figure" in row else [])]
    found += [file for file in files if not (ROOT / file).is_file()]
    if not (ROOT / "docs" / row["page"]).is_file():
        found.append(row["page"])
    for entry in row.get("numbers", []):
        found += [f"key {key}" for key in entry.keys() - {"what", "paper", "run", "at", "preset", "preset_at"}]
        if "preset" in entry and entry["preset"] not in NAMES:
            found.append(entry["preset"])
        if "run" in entry:
            file = f"reproduction/results/{entry['run']}.json"
            if entry["run"] in RUNS and not (ROOT / file).is_file():
                continue  # test_runs.py says which runs are not finished
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
        "withdrawn": {"note"},
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


def test_whatever_a_row_names_is_there(monkeypatch):
    assert {row["id"]: found for row in ROWS if (found := faults(row))} == {}
    monkeypatch.chdir(ROOT)
    lines = [line for row in ROWS for line in row.get("lines", ())]
    for command in {row["command"] for row in [*ROWS, *lines] if "command" in row}:
        for each in command.split(" && "):
            parse(shlex.split(each))


def test_a_row_that_names_nothing_is_seen():
    good = dict(next(row for row in ROWS if row["id"] == "smile-table-1"))
    for key, value in {
        "code": ["hf_captionrl/losses/smile.py:no_loss"],
        "tests": ["tests/losses/test_smile.py::test_nothing"],
        "recipes": ["smile/table9/*"],
        "results": [*good["results"], "reproduction/results/none.json"],
        "numbers": [{"what": "R@1", "run": "smile_blip_seeds", "at": "rows/GAN/length"}],
        "page": "none.md",
    }.items():
        assert len(faults({**good, key: value})) == 1, key
    assert faults({**good, "note": "", "status": "not run"}) == ["not run without note"]


def test_the_page_is_made_of_the_rows():
    page = generated_pages()["paper_index.md"]
    assert all(f'<a id="{row["id"]}"></a>' in page for row in ROWS)
    length = next(row for row in RESULTS["smile_blip_seeds"]["rows"] if row["name"] == "SMILE")["length"]["mean"]
    assert f"SMILE: {length:.2f}" in page


def test_every_row_of_every_table_is_there():
    for row in (row for row in ROWS if row["kind"] == "table"):
        names = [line["row"] for line in row["lines"] if not line["row"].endswith(IN_SMALL_ONLY)]
        assert len(names) == COUNTED[row["paper"]][int(row["number"])], row["id"]
