"""A number that tables show is declared once, in the declaration of its metric."""

import ast
import inspect
from collections import Counter
from pathlib import Path

import pytest

from hf_captionrl.metrics.evaluate_modules.metric import all_metrics, forwards, table_columns
from hf_captionrl.metrics.evaluate_modules.results_columns import by_reward_scorer, variants
from hf_captionrl.metrics.table import Column

ROOT = Path(__file__).parents[2]
DECLARATIONS = ROOT / "hf_captionrl" / "evaluate_modules" / "declarations"
KEYS = [column.key for metric in all_metrics().values() for column in metric.columns]


def declared_again(file):
    """Keys of `Column(...)` in a file that a metric declares too."""
    calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) == "Column" and call.args)
    return {call.args[0].value for call in made if isinstance(call.args[0], ast.Constant)} & set(KEYS)


def test_each_column_is_declared_once(tmp_path):
    assert [key for key, count in Counter(KEYS).items() if count > 1] == []
    again = {}
    for folder in ("hf_captionrl", "recipes", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.parent != DECLARATIONS and (keys := declared_again(file)):
                again[str(file)] = keys
    assert again == {}
    planted = tmp_path / "planted.py"
    planted.write_text('Column("meteor", "METEOR", "higher")')
    assert declared_again(planted) == {"meteor"}


def test_short_headers_and_variants_keep_everything_else():
    (long,), (short,) = table_columns("rd100_recall_at_1"), table_columns("rd100_recall_at_1", short=True)
    assert (long.header, short.header) == ("R@1, RD100", "R@1\nRD100")
    (reward,) = by_reward_scorer(short)
    expected = Column("reward_rd100_recall_at_1", "R@1\nRD100,\nreward\nscorer", "higher", 3, True, short.short_header)
    assert reward == expected
    (samples,) = variants("rs", "\nsamples", *table_columns("cider_d", short=True))
    assert samples.title == "CIDEr-D samples ↑"


def test_forwarded_options_are_in_the_signature():
    def function(captions, model, *, scale=2.0, scorer="", ranks=None):
        return {"scale": scale, "scorer": scorer}

    @forwards(function, "ranks")
    def compute(predictions, *, scorer="mine", **options):
        return function(predictions, None, scorer=scorer, **options)

    assert str(inspect.signature(compute)) == "(predictions, *, scorer='mine', scale=2.0)"
    assert compute(["a"], scale=3.0) == {"scale": 3.0, "scorer": "mine"}
    with pytest.raises(TypeError, match="'bags'"):
        compute(["a"], bags=[])


def test_unknown_column_is_refused():
    with pytest.raises(KeyError, match="rouge_7"):
        table_columns("rouge_7")
