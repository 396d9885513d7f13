"""Columns of the results tables, chosen from the declarations of the metrics."""

from __future__ import annotations

from dataclasses import replace

from hf_captionrl.metrics.evaluate_modules.metric import table_columns
from hf_captionrl.metrics.table import Column

COLUMNS: tuple[Column, ...] = table_columns(
    *("length", "lexical_diversity", "pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1", "rd100_recall_at_5"),
    *("clip_score", "perplexity", "cider_d", "hallucination", "fact_recall"),
    short=True,
)
"""Columns of every results table, in the order in which they are shown."""


def variants(condition: str, heading: str, *columns: Column) -> tuple[Column, ...]:
    """The same numbers under another condition: keys `<condition>_<key>`, and `heading` after the headers."""
    return tuple(replace(c, key=f"{condition}_{c.key}", header=c.header.rstrip() + heading) for c in columns)


def by_reward_scorer(*columns: Column) -> tuple[Column, ...]:
    """The same numbers by the reward scorer."""
    return variants("reward", ",\nreward\nscorer", *columns)


(DEGENERATE,) = table_columns("degenerate", short=True)
"""Share of captions that repeat themselves."""

_BAGS = table_columns("bag_3_recall_at_1", "bag_5_recall_at_1", "bag_7_recall_at_1", short=True)

REWARD_COLUMNS: tuple[Column, ...] = (
    *_BAGS,
    *by_reward_scorer(*_BAGS),
    *table_columns("bag_7_truth_recall_at_1", short=True),
    *by_reward_scorer(*table_columns("rd100_recall_at_1", short=True)),
    DEGENERATE,
)
"""Columns of tables after training with rewards: bags by the held-out scorer, the same by the reward scorer and by the
facts ("truth"), and the share of captions that repeat themselves."""

MORE_REFERENCES_COLUMNS: tuple[Column, ...] = variants("more", "\n2nd ref.", *table_columns("cider_d", short=True))
"""Columns against the second set of references, `--test_references`."""

_DIVERSITY = table_columns("cider_d", "div_1", "div_2", "mbleu_4_per_image", short=True)

SAMPLE_COLUMNS: tuple[Column, ...] = (
    *variants("rs", "\nsamples", *_DIVERSITY),
    *variants("bs", "\nbeam", *_DIVERSITY),
    *variants("equal_cider", "\nat SLL's\nCIDEr-D", *_DIVERSITY[2:]),
)
"""Columns of SLE's Table 4: random samples ("rs" in the paper), the best captions of a beam ("bs"), and samples at the
temperature where their mean CIDEr-D equals that of SLL's samples at temperature 1."""
