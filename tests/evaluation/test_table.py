"""The results table: printed, written, and invalid rows."""

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_captionrl.metrics.columns import COLUMNS, Column, table_columns
from hf_captionrl.metrics.table import (
    Section,
    check_rows,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    format_cell,
    print_comparison,
    print_table,
    without_repeats,
    write_results,
)

KEYS = "length lexical_diversity pool_recall_at_1 pool_recall_at_5 rd100_recall_at_1 rd100_recall_at_5".split()
KEYS += "clip_score perplexity cider_d hallucination fact_recall".split()
BY_KEY = {column.key: column for column in COLUMNS}
SHOWN = "2.30 0.110 0.100 0.300 0.528 0.900 0.750 12.35 2.570 0.065 0.290".split()


def make_row(name="MLE", **changes):
    values = [2.3, 0.11, 0.1, 0.3, 0.528, 0.9, 0.75, 12.345, 2.57, 0.065, 0.29]
    return {"name": name, **dict(zip(KEYS, values, strict=True)), **changes}


def printed(rows, **options):
    out = io.StringIO()
    print_table(rows, columns=COLUMNS, file=out, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        (None, "0.658"),
        ([0.6372, 0.6791], "0.658 ±0.021"),
        ([0.630, 0.681], "0.658 [0.630, 0.681]"),
        ([0.66, 0.681], "0.658 [0.660, 0.681]"),  # a percentile interval may exclude the value
    ],
)
def test_cell_with_interval(interval, shown):
    row = make_row(rd100_recall_at_1=0.658, rd100_recall_at_1_ci=interval)
    assert format_cell(row, BY_KEY["rd100_recall_at_1"]) == shown
    assert format_cell(make_row(cider_d=None), BY_KEY["cider_d"]) == "–"
    assert format_cell(make_row(cider_d=None, cider_d_reason="no Java"), BY_KEY["cider_d"]) == "not run: no Java"


def test_piped_table_is_not_wrapped():
    rows = [make_row(), make_row("SMILE (lambda=0.01)", rd100_recall_at_1_ci=[0.507, 0.549]), make_row("references")]
    lines = printed(rows, title="A title").splitlines()
    assert lines[0].strip() == "A title"
    numbers = [line for line in lines if re.search(r"\d\.\d\d", line) and "lambda" not in line]
    assert [re.split(r"\s{2,}", line.strip())[1] for line in numbers] == SHOWN
    assert "0.528 ±0.021" in numbers[KEYS.index("rd100_recall_at_1")]


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("80", 80)])
def test_a_piped_table_that_does_not_fit_is_folded_into_several(monkeypatch, columns, width):
    monkeypatch.setattr("os.environ", {} if columns is None else {"COLUMNS": columns})
    rows = [make_row(f"model {n} of a long name", cider_d_ci=[0.11, 0.93]) for n in range(9)]
    lines = printed(rows).splitlines()
    assert max(map(len, lines)) <= width
    numbers = [line.count("2.570 [0.110, 0.930]") for line in lines if "CIDEr-D" in line]
    assert (sum(numbers), len(numbers) > 1) == (9, True)
    assert len([line for line in printed(rows[:1]).splitlines() if "CIDEr-D" in line]) == 1


def test_written_files(tmp_path):
    @dataclass
    class Config:
        learning_rate: float = 1e-5
        output_dir: Path = Path("outputs")
        hub_token: str = "secret-value"

    rows = [make_row(fact_recall=None, bag_3_recall_at_1=0.4), make_row("SMILE", length_ci=(2, 3))]
    config = {"train": Config(), "limit": float("inf"), "api_key": "k", "max_token": 3, "dtype": object}
    path = write_results(tmp_path / "out", rows, columns=COLUMNS, seed=7, config=config)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "results.json"
    assert list(written) == ["rows", "seed", "config", "versions"]
    assert written["rows"][0] == rows[0]
    assert written["rows"][1]["length_ci"] == [2, 3]
    assert written["seed"] == 7
    shown = {"learning_rate": 1e-5, "output_dir": "outputs"}
    assert written["config"] == {"train": shown, "limit": "inf", "max_token": 3, "dtype": str(object)}
    assert {"python", "torch", "transformers", "datasets", "hf_captionrl"} <= set(written["versions"])
    assert "secret-value" not in path.read_text(encoding="utf-8")
    assert "| Length (words) | 2.30 | 2.30 [2.00, 3.00] |" in (tmp_path / "out/results.md").read_text("utf-8")
    assert sorted(p.name for p in path.parent.iterdir()) == ["results.json", "results.md"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([make_row(), make_row()], "different names"),
        ([{"name": "MLE", "length": 2.0}], "lexical_diversity"),
        ([make_row(rd100_recall_at_1=52.8)], "rd100_recall_at_1.*52.8"),
        ([make_row(perplexity=float("nan"))], "perplexity.*finite"),
        ([make_row(fact_recall_ci=[0.2, 1.2])], "fact_recall"),
    ],
)
def test_malformed_rows_are_refused(rows, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_rows(rows, COLUMNS)
    with pytest.raises(ValueError, match=message):
        write_results(tmp_path / "out", rows, columns=COLUMNS, seed=0, config={})
    assert not (tmp_path / "out").exists()


def test_a_reason_is_printed_once_with_its_columns_and_rows():
    missing = {"perplexity": None, "perplexity_reason": "no model", "cider_d": None, "cider_d_reason": "no model"}
    alone = {"fact_recall": None, "fact_recall_reason": "no truth"}
    text = printed([make_row("MLE", **missing, **alone), make_row("SMILE", **missing)])
    notes = [line for line in text.splitlines() if line.startswith("not run: ")]
    assert notes == ["not run: no model: Perplexity ↓, CIDEr-D ↑", "not run: no truth: Fact recall ↑ (MLE)"]


TWO = Column("r", "R@1", "higher", is_fraction=True), Column("h", "Hallucination", "lower", is_fraction=True)
LONG = "the program needs a folder " * 10


def row(name, r, h, **more):
    return {"name": name, "r": r, "h": h, **more}


def section(*rows):
    return Section("A paper", TWO, rows)


ONE = row("one", 0.5, None, h_reason="no truth", r_ci=[0.4, 0.6])
GOOD = section(ONE, row("two", 0.7, None, h_reason=LONG, r_mark="**"))


def printed_comparison(section):
    out = io.StringIO()
    print_comparison([section], file=out)
    return out.getvalue()


def test_cells_show_numbers_marks_reasons_and_hostile_names():
    printed, markdown = printed_comparison(GOOD), comparison_markdown([GOOD], title="T")
    for text in (printed, markdown):
        assert "0.500 ±0.100" in text
        words = " ".join(text.split())
        assert words.count("not run: no truth: Hallucination ↓ (one)") == 1
        assert words.count(f"not run: {' '.join(LONG.split())}: Hallucination ↓ (two)") == 1
    assert "| not run | not run |" in markdown
    assert "0.700 \\*\\*" in markdown
    assert "0.700 **" in printed
    assert "not corrected" in printed
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # a terminal without arrows
    print_comparison([GOOD], file=out)
    out.flush()
    assert b"0.500 ?0.100" in out.buffer.getvalue()
    hostile = section(row("[red]x[/] | <script>", 0.1, 0.2), row("b", 0.1, 0.2))
    assert "[red]x[/]|<script>" in "".join(printed_comparison(hostile).split())
    assert "<script>" not in comparison_markdown([hostile])
    assert "x[/] \\| \\<script" in comparison_markdown([hostile])


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def on_a_terminal(monkeypatch, width, show):
    for name, value in {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    show(out)
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()]


NAMES = ["blip_large_finetuned-on_our.captions", "B", "runs/seven/captions", "git", "Qwen2.5-VL-7B-Instruct"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_gets_every_captioner_and_number(monkeypatch, width):
    columns = table_columns("length", "lexical_diversity", "pool_recall_at_1", "cider_d", "meteor", "hallucination")
    missing = {"meteor": None, "meteor_reason": "there is no Java"}
    rows = [{"name": name, **dict.fromkeys(KEYS, 0.5), "cider_d_ci": [0.11, 0.93], **missing} for name in NAMES]
    section = Section("Scenes with and against the preferences of their kinds", columns, rows)
    lines = on_a_terminal(monkeypatch, width, lambda out: print_comparison([section], file=out))
    assert max(map(len, lines)) <= width
    assert sum("0.500 [0.110, 0.930]" in line for line in lines) > 1  # in several tables
    assert sum(line.count("0.500 [0.110, 0.930]") for line in lines) == len(NAMES)
    assert sum("there is no Java" in line for line in lines) == 1
    for name in NAMES:
        assert name[:10] in "\n".join(lines)


def test_columns_of_later_sections_that_repeat_are_left_out():
    r, h = TWO
    other = Column("r", "R@1 (another number)", "higher")
    first, second = Section("1", (r,), [row("a", 0.1, 0.2)]), Section("2", (r, h, other), [row("a", 0.1, 0.2)])
    found = without_repeats([first, second, Section("3", (h,), [row("a", 0.1, 0.2)])])
    assert [(section.title, list(section.columns)) for section in found] == [("1", [r]), ("2", [h, other])]


def test_csv_has_a_line_per_number():
    def read(*rows):
        return list(csv.DictReader(io.StringIO(comparison_csv([section(*rows)]))))

    rows = read(ONE, row("two, too", 0.7, 0.1, r_difference=0.2, r_p_value=0.01))
    assert [(r["captioner"], r["key"], r["metric"], r["better"]) for r in rows] == [
        (name, key, metric, better)
        for key, metric, better in (("r", "R@1", "higher"), ("h", "Hallucination", "lower"))
        for name in ("one", "two, too")
    ]
    assert [rows[0][key] for key in ("value", "low", "high", "difference", "reason")] == ["0.5", "0.4", "0.6", "", ""]
    assert [rows[1][key] for key in ("value", "low", "difference", "p_value")] == ["0.7", "", "0.2", "0.01"]
    assert (rows[2]["value"], rows[2]["reason"]) == ("", "no truth")
    named, *_ = read(row("=1+1", 0.5, None, r_difference=-0.1))
    assert (named["captioner"], named["difference"]) == ("'=1+1", "-0.1")  # no formula, but a number


def test_latex_has_a_table_per_section_with_escaped_cells():
    hostile = row("50% & _x_ #1 \\input{a} $", 0.7, 0.1, r_ci=[0.6, 0.8], r_mark="**")
    text = comparison_latex([section(row("one", 0.5, 0.2), hostile)])
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[1:4] == [r"\begin{tabular}{lrr}", r"\toprule", body[3]]
    assert body[-2:] == [r"\bottomrule", r"\end{tabular}"]
    cells = [line for line in body if line.endswith(r" \\")]
    assert len(cells) == 3
    assert {len(re.findall(r"(?<!\\)&", line)) for line in cells} == {2}
    assert r"50\% \& \_x\_ \#1 \textbackslash input\{a\} \$" in cells[0]
    assert cells[1] == r"R@1 $\uparrow$ & 0.500 & 0.700 $\pm$0.100 ** \\"
    assert "not run: no truth" in comparison_latex([GOOD])
