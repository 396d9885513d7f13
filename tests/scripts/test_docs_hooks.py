"""What the site generates: tables as they were measured, formulas, fields; the quickstart runs. `make docs` checks links and docstrings."""

import json
import logging
import re
from pathlib import Path

from scripts import docs_hooks, docs_pictures
from scripts.docs_hooks import columns_of, generated_pages
from tests.test_docs import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_tables_show_what_was_measured():
    rows = {
        row["name"]: row
        for row in json.loads((ROOT / "reproduction/results/smile_blip_seeds.json").read_text())["rows"]
    }
    _, tables = generated_pages()["full_tables.md"].split("## smile_blip_seeds\n")
    line = next(line for line in tables.splitlines() if line.startswith("| SMILE |"))
    measured = rows["SMILE"]["rd100_recall_at_1"]
    assert f"| {measured['mean']:.3f} ±{measured['standard_error']:.3f} |" in line
    page = docs_hooks.on_page_markdown((DOCS / "smile.md").read_text(encoding="utf-8"))
    assert f"| {measured['mean']:.3f} ±{measured['standard_error']:.3f} |" in page
    assert "[All columns](reproduction/full_tables.md#smile_blip_seeds)" in page


def test_every_marker_becomes_a_table_and_a_wrong_one_warns(caplog):
    with caplog.at_level(logging.WARNING):
        for page in DOCS.glob("*.md"):
            text = docs_hooks.on_page_markdown(page.read_text(encoding="utf-8"))
            assert "<!--" not in re.sub(r"```.*?```", "", text, flags=re.S) or page.name == "architecture.md", page
    assert caplog.messages == []
    docs_hooks.on_page_markdown("<!-- table smile_blip_seeds: No such column -->\n\n<!-- table no_run: R@1 -->")
    assert ["No such column" in caplog.messages[0], "no_run" in caplog.messages[1]] == [True, True]
    table = "| | A, a | B ↑ | C |\n|:--|--:|:-:|--:|\n| x | 1 | 2 | 3 |\n\nA note."
    assert columns_of(table, ["C", "A, a"]) == "|  | C | A, a |\n| :-- | --: | --: |\n| x | 3 | 1 |\n\nA note."


def different(page):
    """Lines of tables in a page that their results do not have; a table with another heading is different whole."""
    found = []
    for name, arguments, table in docs_hooks.WRITTEN_OUT.findall(page):
        lines, measured = table.splitlines(), docs_hooks.table_of(name, arguments).splitlines()
        found += [line for line in lines if line not in measured or lines[:2] != measured[:2]]
    return found


def test_tables_that_stand_in_pages_are_those_of_the_results():
    pages = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}
    assert {name: lines for name, text in pages.items() if (lines := different(text))} == {}
    assert {"album.md", "boosting.md", "metrics.md"} <= {name for name, text in pages.items() if "<!-- /table" in text}
    assert different(pages["boosting.md"].replace("0.911 ±", "0.912 ±"))[0].startswith("| HolisticCap | 0.912")
    assert len(different(pages["boosting.md"].replace("|  | Fact recall", "|  | Facts"))) == 6


def test_pictures_show_the_committed_results(monkeypatch, capsys):
    assert docs_pictures.main(["--check"]) == 0
    monkeypatch.setitem(docs_pictures.PICTURES, "smile", docs_pictures.PICTURES["truematch"])
    assert docs_pictures.main(["--check"]) == 1
    assert "smile.png does not show the committed results" in capsys.readouterr().out


def test_code_of_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPTIONRL_CACHE", str(tmp_path / "cache"))
    names: dict = {}
    for number, code in enumerate(blocks(DOCS / "quickstart.md", "python")):
        exec(compile(code, f"docs/quickstart.md, example {number}", "exec"), names)
    assert names["found"]["recall_at_1"] < 0.7
    assert names["truth"]["fact_recall"] < 0.5
    assert names["trainer"].state.global_step == 2
