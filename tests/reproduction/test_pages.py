"""The tables that stand in pages of reproduction/ are those of the results."""

import json
import re

import numpy as np
import pytest
from scipy import stats
from scipy.stats import false_discovery_control

from reproduction import RESULTS, ROOT
from reproduction.measurements import p_value, seed_interval, shown
from scripts.check import check_links
from scripts.docs_hooks import columns_of, generated_pages, on_page_markdown

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "reproduction").glob("*.md")}
COMMITTED = re.compile(r"^<!-- from (.+) -->\n((?:\|.*\n)+)", re.M)
"""A table with some of the rows and columns of what a marker stands for."""
KEYS = RECALL, REWARD, CIDER = "rd100_recall_at_1", "reward_rd100_recall_at_1", "cider_d"
RATES = ("1e-5", "2e-5", "5e-5")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def table_below(page, heading):
    return cells(re.search(rf"^\| {re.escape(heading)} \|.*\n((?:\|.*\n)+)", PAGES[page], re.M)[1])[1:]


def different(page):
    """Rows of committed tables that the generated ones lack."""
    rows = []
    for marker, table in COMMITTED.findall(page):
        heading, _, *lines = cells(table)
        generated = cells(columns_of(on_page_markdown(f"<!-- {marker} -->").split("\n\n")[0], heading[1:]))
        rows += [line for line in lines if line not in generated]
    return rows


def test_tables_are_rows_and_columns_of_the_generated_ones():
    assert sum(len(COMMITTED.findall(text)) for text in PAGES.values()) >= 8
    assert {name: rows for name, text in PAGES.items() if (rows := different(text))} == {}
    assert different(PAGES["omission"].replace("0.640 ±", "0.641 ±")) != []


def test_the_verdicts_of_each_claim_are_those_of_its_comparisons():
    columns = (None, "redrawn", "held_back", "other_kinds")
    names = {"SMILE": "smile", "DiscriTune": "discritune", "SLE": "sle", "NDLB": "ndlb"}
    number = 0
    for _, *verdicts in table_below("findings", "claim"):
        for column, cell in zip(columns, verdicts, strict=True):
            for paper, at, verdict in re.findall(r"(?:(\w+) )?(\d+): ([a-z ]+)", cell):
                page = generated_pages()[f"findings_{names.get(paper) or column}.md"]
                assert f"**{verdict.strip()}**" in re.search(rf"^\| {at} \|.*", page, re.M)[0], cell
                number += 1
    assert number > 30


def changes():
    """Change by training and seed of each number on photographs, from all results that have it."""
    by_seed = {}

    def add(training, seed, end, start):
        for key in KEYS:
            if end.get(key) is not None and start.get(key) is not None:
                by_seed.setdefault((training, key), {})[seed] = end[key] - start[key]

    for path in sorted(RESULTS.glob("p*s*/photographs-flickr8k-*.json")):  # those of one seed first
        record = json.loads(path.read_text(encoding="utf-8"))
        for index, seed in enumerate(record["seeds"]):
            rows = [{key: row[key]["values"][index] for key in KEYS if key in row} for row in record["rows"]]
            training = path.stem.removeprefix("photographs-flickr8k-")
            trained = rows[1:-1]
            for name, end in zip(["sll", training][2 - len(trained) :], trained, strict=True):
                add(name, seed, end, rows[0])
    rows = {
        row["name"].removeprefix("400 steps, ").removesuffix(", 100"): row
        for row in read("photographs_starts")["rows"]
    }
    for name, row in rows.items():
        add(name, 3, row, rows["400 steps"])
    return by_seed


def test_changes_on_photographs_are_means_over_seeds():
    by_seed, table, p_values = changes(), table_below("photographs", "training"), {}
    assert len(table) >= 9
    for name, seeds, *numbers in table:
        training = re.search(r"`(.+)`", name)[1]
        for key, cell in zip(KEYS, numbers, strict=True):
            values = by_seed[training, key]
            mean = sum(values.values()) / len(values)
            if len(values) > 2:
                interval = seed_interval(list(values.values()))
                p_values[training, key] = p_value(interval), "**" in cell
                assert cell.replace("*", "") == f"{mean:+.3f} [{shown(interval.low)}, {shown(interval.high)}]", name
            else:
                assert cell.split(" (")[0] == f"{mean:+.3f}", name
            marked = re.search(r"\(seeds? (.+)\)", cell)
            assert (marked[1] if marked else seeds) == ", ".join(map(str, sorted(values))), (name, key)
    corrected = false_discovery_control([p for p, _ in p_values.values()])
    assert [q < 0.05 for q in corrected] == [bold for _, bold in p_values.values()]


def test_changes_of_readme_are_those_of_the_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {name: numbers for name, *numbers in cells(readme.split("<!-- table changes -->\n\n")[1].split("\n\n")[0])}
    start, end = (
        next(row for row in read("dose_scenes")["rows"] if row["name"] == f"blip, {name}3 beams")
        for name in ("", "lambda 0.5, ")
    )
    for key, cell in zip((RECALL, CIDER, "hallucination"), lines["SMILE, lambda 0.5 (3)"], strict=True):
        gains = np.subtract(end[key]["values"], start[key]["values"])
        low, high = stats.t.interval(0.95, 2, gains.mean(), stats.sem(gains))
        assert cell == f"{gains.mean():+.3f} [{low:.3f}, {high:.3f}]"
    page = {re.search("`(.+)`", name)[1]: row for name, *row in table_below("photographs", "training")}
    for name, training in (("SMILE, 100 steps (4)", "smile"), ("self-retrieval, bags (3)", "sr-curriculum")):
        # Of two rows with a name the last one, which is on Flickr8k; its numbers are those of a page that is tested above.
        assert lines[name] == [page[training][1].strip("*"), page[training][3].strip("*"), "–"]
    values = [
        *read("photographs_seeds/photographs-flickr8k-smile")["rows"][0][RECALL]["values"],
        by_name(read("photographs_starts")["rows"])["400 steps"][RECALL],
    ]
    assert lines["**Flickr8k, before training**"][0] == f"{np.mean(values):.3f}" != f"{values[0]:.3f}"


def check_compared(lines, keys):
    """Numbers of captions compared image by image; bold: p < 0.05 after one correction for the whole table."""
    tests = []
    for line, rows in lines:
        for cell, key, row in zip(line, keys, rows, strict=True):
            if row is None:
                assert cell == "–"
                continue
            assert cell.strip("*") == f"{row[key]:.3f}", line
            if f"{key}_p_value" in row:
                tests.append((row[f"{key}_p_value"], "**" in cell))
    assert len(tests) > 40
    corrected = false_discovery_control([max(p, 1e-12) for p, _ in tests])
    assert [bool(q < 0.05) for q in corrected] == [bold for _, bold in tests]


def by_name(rows):
    return {row["name"]: row for row in rows}


def test_captions_compared_image_by_image():
    seed_0, files = (
        {},
        {"held-out scorer": "photographs_flickr8k_test", "reward scorer": "photographs_flickr8k_test_reward"},
    )
    for scorer, name in files.items():
        of_bags = read("photographs_flickr8k_bags")[scorer]["rows"]
        for row in [row for table in read(name)["tables"].values() for row in table["rows"]] + of_bags:
            seed_0.setdefault(scorer, {}).setdefault(row["name"], {}).update(row)
    of_seed = {
        "0": seed_0,
        "3": {scorer: by_name(table["rows"]) for scorer, table in read("photographs_starts")["compared"].items()},
    }
    keys, lines = (RECALL, RECALL, "bag_7_recall_at_1", CIDER, "unmentioned_objects"), []
    for name, *line in table_below("photographs_more", "captions, seed"):
        row, seed = re.fullmatch(r"`?([\w-]+)`?, (\d)", name.replace("a human caption", "references")).groups()
        held_out, reward = (of_seed[seed][scorer][row] for scorer in ("held-out scorer", "reward scorer"))
        lines.append((line, (held_out, reward, held_out, held_out, held_out)))
    check_compared(lines, keys)


def test_retrieval_by_start_rate_and_lambda():
    lines, shares = [], ("0", "0.01", "0.05", "0.1", "0.5")
    starts = {
        steps: by_name(read("photographs_starts")["compared"][f"held-out scorer, SMILE from {steps} steps"]["rows"])
        for steps in (100, 200, 400)
    }
    for name, *line in table_below("photographs_more", "start, rate"):
        steps, rate = re.fullmatch(r"(\d+) steps?, (.+)", name).groups()
        rows = starts[int(steps)]
        lines.append(
            (
                line,
                [rows[f"{steps}-{rate}-{share}"] for share in shares] if rate in RATES else [rows[steps], *[None] * 4],
            )
        )
    check_compared(lines, [RECALL] * 5)


@pytest.mark.parametrize("cell", ["0.123", "**0.151**"])
def test_a_wrong_number_and_a_wrong_mark_are_noticed(cell):
    rows = [{"x": 0.151, "x_p_value": 0.5}] * 5
    with pytest.raises(AssertionError):
        check_compared([([cell] + ["0.151"] * 4, rows)] + [(["0.151"] * 5, rows)] * 9, ["x"] * 5)


def test_a_link_to_a_page_that_is_not_in_the_checkout_is_a_fault(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text(
        "[a](../a.md#x) [site](https://x.org/y.md)\n```\n[z](z.md)\n```\n[c](full_tables.md)\n"
    )
    (tmp_path / "a.md").write_text("# X\n\n[b](docs/b.md) [c](#x)\n")
    assert [fault.partition(",")[0] for fault in check_links(tmp_path)] == ["docs/b.md: links full_tables.md"]
