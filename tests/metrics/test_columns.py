"""A number that tables show is declared once, in the table of columns."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from hf_captionrl.metrics.columns import PAPERS, SUITES, TABLE, Column, by_reward_scorer, table_columns, variants
from hf_captionrl.metrics.suites import SuiteRow

ROOT = Path(__file__).parents[2]
KEYS = [column.key for column in TABLE]


def declared_again(file):
    """Keys of `Column(...)` in a file that the table has too."""
    calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) == "Column" and call.args)
    return {call.args[0].value for call in made if isinstance(call.args[0], ast.Constant)} & set(KEYS)


def test_each_column_is_declared_once(tmp_path):
    assert [key for key, count in Counter(KEYS).items() if count > 1] == []
    again = {}
    for folder in ("hf_captionrl", "recipes", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name != "columns.py" and (keys := declared_again(file)):
                again[str(file)] = keys
    assert again == {}
    planted = tmp_path / "planted.py"
    planted.write_text('Column("meteor", "METEOR", "higher")')
    assert declared_again(planted) == {"meteor"}


def test_every_number_of_a_suite_has_a_function():
    for key in {key for keys in (*SUITES.values(), *PAPERS.values()) for key in keys} - {"empty_captions"}:
        (column,) = table_columns(key)
        assert callable(getattr(SuiteRow, column.function)), key


def test_short_headers_and_variants_keep_everything_else():
    (long,), (short,) = table_columns("rd100_recall_at_1"), table_columns("rd100_recall_at_1", short=True)
    assert (long.header, short.header) == ("R@1, RD100", "R@1\nRD100")
    (reward,) = by_reward_scorer(short)
    header, kept = "R@1\nRD100,\nreward\nscorer", (short.short_header, short.function)
    assert reward == Column("reward_rd100_recall_at_1", header, "higher", 3, True, *kept)
    (samples,) = variants("rs", "\nsamples", *table_columns("cider_d", short=True))
    assert samples.title == "CIDEr-D samples ↑"


def test_unknown_column_is_refused():
    with pytest.raises(KeyError, match="rouge_7"):
        table_columns("rouge_7")
