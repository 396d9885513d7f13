"""What the site generates: tables as they were measured, formulas, fields. `make docs` checks links and docstrings."""

import json
import logging
import re
from pathlib import Path

import pytest

from scripts import docs_hooks, docs_pictures
from scripts.docs_hooks import columns_of, generated_pages

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
    page = "<!-- table smile_blip_seeds: R@1 RD100 ↑ -->\n\n| SMILE | 0.1 |\n\n<!-- /table -->"
    page = docs_hooks.on_page_markdown(page)
    assert f"| {measured['mean']:.3f} ±{measured['standard_error']:.3f} |" in page
    assert "[All columns](reproduction/full_tables.md#smile_blip_seeds)" in page
    assert page.count("| SMILE |") == 1  # instead of the committed rows


@pytest.mark.parametrize("folder", [".", "docs", "reproduction"])
def test_committed_tables_are_those_of_the_results(folder):
    texts = {page: page.read_text(encoding="utf-8") for page in (ROOT / folder).glob("*.md")}
    assert sum("<!-- /table -->" in text for text in texts.values()) > 0
    stale = [page.name for page, text in texts.items() if docs_hooks.with_committed_tables(text) != text]
    assert stale == [], "run python scripts/docs_hooks.py"
    text = "<!-- table smile_blip_seeds: CIDEr-D ↑ -->\n\n| | CIDEr-D ↑ |\n| SMILE | 0.7 |\n\n<!-- /table -->"
    assert "| SMILE | 0.705 ±0.063 |" in docs_hooks.with_committed_tables(text)


def test_every_marker_becomes_a_table_and_a_wrong_one_warns(caplog):
    with caplog.at_level(logging.WARNING):
        for page in DOCS.glob("*.md"):
            text = docs_hooks.on_page_markdown(page.read_text(encoding="utf-8"))
            assert "<!--" not in re.sub(r"```.*?```", "", text, flags=re.S) or page.name == "architecture.md", page
    assert caplog.messages == []
    docs_hooks.on_page_markdown("<!-- table smile_blip_seeds: No such column -->\n\n<!-- table no_run: R@1 -->")
    assert ["No such column" in caplog.messages[0], "no_run" in caplog.messages[1]] == [True, True]
    table = "| | A, a | B ↑ | C |\n|:--|--:|:-:|--:|\n| x | 1 | 2 | 3 |\n\nA note."
    assert columns_of(table, ["B ↑"], ["y"]) == "|  | B ↑ |\n| :-- | :-: |\n\nA note."
    assert columns_of(table, ["C", "A, a"]) == "|  | C | A, a |\n| :-- | --: | --: |\n| x | 3 | 1 |\n\nA note."


def test_pictures_show_the_committed_results(monkeypatch, capsys):
    assert docs_pictures.main(["--check"]) == 0
    monkeypatch.setitem(docs_pictures.PICTURES, "video", docs_pictures.PICTURES["truematch"])
    assert docs_pictures.main(["--check"]) == 1
    assert "video.png does not show the committed results" in capsys.readouterr().out
