"""Tables of the pages that stand in several results, or show some columns of one: as they were measured."""

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts.reproduction.pages import FULL, select_columns, table_pages

DOCS = Path(__file__).parents[1] / "docs"


def test_tables_of_smile_are_what_was_measured():
    """Tables 4 and 5 and Figure 4(a) of docs/smile.md, whose rows stand in several results."""
    page = (DOCS / "smile.md").read_text()
    rows = {}
    for name in ("smile_blip", "smile_first_token", "smile_lambda", "smile_subset"):
        for row in json.loads((DOCS / f"results/{name}_seeds.json").read_text())["rows"]:
            rows[name, row["name"]] = row
    digits = {
        "length": 2,
        "pool_recall_at_1": 3,
        "rd100_recall_at_1": 3,
        "cider_d": 3,
        "fact_recall": 3,
        "hallucination": 3,
    }
    mixtures = [("smile_lambda", f"SMILE (lambda={x})") for x in (0.5, 0.1, 0.05)]
    before, more, smile = (("smile_blip", name) for name in ("MLE", "MLE+MLE", "SMILE"))
    sections = {
        "Table 4": [("smile_first_token", "none"), ("smile_first_token", "shifting"), smile],
        "Table 5": [more, *mixtures, ("smile_blip", "SMILE (lambda=0.01)"), smile],
        "Figure 4(a)": [before, *(("smile_subset", name) for name in ("caption", "random", "one-random", "reverse"))],
    }
    for title, names in sections.items():
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        shown = [line.split(" | ", 1)[1] for line in section.splitlines() if line.startswith("| ") and "±" in line]
        cells = [
            [f"{rows[n][k]['mean']:.{d}f} ±{rows[n][k]['standard_error']:.{d}f}" for k, d in digits.items()]
            for n in names
        ]
        assert shown == [" | ".join(row) + " |" for row in cells], title


def test_the_table_of_videos_is_what_was_measured():
    section = (DOCS / FULL).read_text().split("<!-- begin smile_video -->")[1].split("<!-- end")[0]
    shown = [line for line in section.splitlines() if line.startswith("| ") and "±" in line]
    digits = {"length": 2, "pool_recall_at_1": 3, "rd100_recall_at_1": 3, "cider_d": 3, "hallucination": 3}
    digits |= {"fact_recall": 3, "emscore": 3, "emscore_references": 3}
    wanted = []
    for row in json.loads((DOCS / "results/smile_video_seeds.json").read_text())["rows"]:
        cells = [f"{row[k]['mean']:.{d}f} ±{row[k]['standard_error']:.{d}f}" for k, d in digits.items()]
        wanted.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    assert shown == wanted


def test_figure_4b_of_the_page_is_what_was_measured():
    page = (DOCS / "smile.md").read_text().split("## Figure 4(b)")[1].split("##")[0]
    length = {}
    for level in ("simplest", "simpler"):
        result = json.loads((DOCS / f"results/smile_blip_{level}_seeds.json").read_text())
        for row in result["rows"]:
            digits = {"length": 2, "rd100_recall_at_1": 3, "fact_recall": 3, "hallucination": 3}
            cells = [f"{row[k]['mean']:.{d}f} ±{row[k]['standard_error']:.{d}f}" for k, d in digits.items()]
            assert f"| {row['name']} | " + " | ".join(cells) + " |" in page
            length[level, row["name"]] = row["length"]["mean"]
    # The paper's finding.
    assert length["simplest", "SMILE"] <= 1.01 * length["simplest", "references"]
    assert length["simpler", "SMILE"] > 1.5 * length["simpler", "references"]


MOST_COLUMNS = 7
RULE = re.compile(r"^\|((?:\s*:?-+:?\s*\|)+)$", re.M)


def widest_table(text):
    """The number of columns of the widest table of a page; 0 without one."""
    return max((rule.count("|") for rule in RULE.findall(text)), default=0)


def test_no_guide_has_a_table_wider_than_a_page():
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    sections = {name: entries for section in nav for name, entries in section.items()}
    assert list(sections) == ["Get started", "Guides", "Concepts", "API reference", "Research", "Project"]
    wide = {}
    for name in ("Get started", "Guides", "Concepts"):
        for entry in sections[name]:
            page = entry if isinstance(entry, str) else next(iter(entry.values()))
            wide[page] = widest_table((DOCS / page).read_text(encoding="utf-8"))
    assert {page: columns for page, columns in wide.items() if columns > MOST_COLUMNS} == {}
    assert max(wide.values()) == MOST_COLUMNS
    assert widest_table((DOCS / FULL).read_text(encoding="utf-8")) > MOST_COLUMNS


def test_guides_show_columns_of_the_full_tables():
    made = table_pages()
    assert {"smile.md", "self_retrieval.md", "sle.md", FULL} <= made.keys()
    for name, text in made.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name
    shown, full = made["smile.md"], (DOCS / "results/smile_blip_seeds.md").read_text(encoding="utf-8")
    assert full.strip() in made[FULL]
    heads, values = (full.splitlines()[line].split(" | ") for line in (0, 4))
    for heading in ("R@1 RD100 ↑", "Hallucination ↓"):
        row = next(line for line in shown.splitlines() if line.startswith("| SMILE |"))
        assert f"| {values[heads.index(heading)]} |" in row
    assert "[All columns](full_tables.md#smile)" in shown


def test_columns_are_selected_by_heading():
    table = "| | A, a | B ↑ | C |\n|:--|--:|:-:|--:|\n| x | 1 | 2 | 3 |\n\nA note."
    assert select_columns(table, ["C", "A, a"]) == "|  | C | A, a |\n|:--|--:|--:|\n| x | 3 | 1 |"
    with pytest.raises(ValueError, match=r"no column 'D'. Use one of: A, a, B ↑, C"):
        select_columns(table, ["D"])
    assert [widest_table(text) for text in (table, "no table", "a | b\n|---|---|\n")] == [4, 0, 2]
