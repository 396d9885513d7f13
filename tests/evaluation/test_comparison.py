"""Comparison of captioners, and its plots."""

import io

import pytest
from PIL import Image

from hf_captionrl.evaluation.plots import write_length_histogram, write_trade_off
from hf_captionrl.metrics.columns import Column
from hf_captionrl.metrics.table import Section, comparison_markdown, print_comparison

COLUMNS = (Column("r", "R@1", "higher", is_fraction=True), Column("h", "Hallucination", "lower", is_fraction=True))
LONG = "the program needs a folder " * 10


def row(name, r, h, **more):
    return {"name": name, "r": r, "h": h, **more}


def section(*rows):
    return Section("A paper", COLUMNS, rows)


GOOD = section(
    row("one", 0.5, None, h_reason="no truth", r_ci=[0.4, 0.6]), row("two", 0.7, None, h_reason=LONG, r_mark="**")
)


def test_cells_show_numbers_marks_and_reasons():
    out = io.StringIO()
    print_comparison([GOOD], file=out)
    printed, markdown = out.getvalue(), comparison_markdown([GOOD], title="T")
    for text in (printed, markdown):
        assert "0.500 ±0.100" in text
        assert "not run: no truth" in text
        assert " ..." in text
    assert " ".join(LONG.split()) in " ".join(printed.split())  # printed in full below
    assert markdown.count(" ".join(LONG.split())) == 1
    assert "0.700 \\*\\*" in markdown
    assert "0.700 **" in printed
    assert "not corrected" in printed


def test_names_are_escaped():
    hostile = section(row("[red]x[/] | <script>", 0.1, 0.2), row("b", 0.1, 0.2))
    out = io.StringIO()
    print_comparison([hostile], file=out)
    assert "[red]x[/]" in out.getvalue()
    assert "<script>" not in comparison_markdown([hostile])
    assert "x[/] \\| \\<script" in comparison_markdown([hostile])


def test_a_terminal_without_arrows_gets_ascii():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_comparison([GOOD], file=out)
    out.flush()
    assert b"R@1 ^" in out.buffer.getvalue()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ([], "no sections"),
        ([GOOD, section(row("one", 0.1, 0.1), row("other", 0.1, 0.1))], "Pass the same captioners"),
        ([section(row("one", 50.0, 0.1))], "never percent"),
    ],
)
def test_malformed_sections_are_refused(sections, said):
    for show in (comparison_markdown, print_comparison):
        with pytest.raises(ValueError, match=said):
            show(sections)


def test_the_histogram_is_a_picture_and_the_same_each_time(tmp_path):
    lengths = {"_mle $x$": [2, 2, 3], "long": [0, 41, 300]}
    one = write_length_histogram(tmp_path / "a.png", lengths, title="T").read_bytes()
    assert write_length_histogram(tmp_path / "b.png", lengths, title="T").read_bytes() == one
    with Image.open(io.BytesIO(one)) as image:
        assert min(image.size) > 300
        assert len(image.convert("RGB").getcolors(10**6)) > 20


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({}, "no lengths"),
        ({"a": []}, "'a'"),
        ({"a": [1.5]}, "must be integers"),
        ({"a": [-1]}, "0 or more"),
    ],
)
def test_bad_lengths_are_refused(tmp_path, lengths, said):
    with pytest.raises(ValueError, match=said):
        write_length_histogram(tmp_path / "a.png", lengths)
    assert not (tmp_path / "a.png").exists()


def test_the_trade_off_needs_both_numbers(tmp_path):
    rows = [row("a", 0.1, 0.2, r_ci=[0.0, 0.3]), row("b", 0.3, None)]
    options = {"x": ("r", "R@1"), "y": ("h", "Hallucination")}
    assert write_trade_off(tmp_path / "a.png", rows[1:], **options) is None
    assert write_trade_off(tmp_path / "a.png", rows, **options).stat().st_size > 1000
    with pytest.raises(ValueError, match="PNG"):
        write_trade_off(tmp_path / "a.jpg", rows, **options)
