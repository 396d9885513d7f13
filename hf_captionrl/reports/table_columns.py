"""Columns that some tables have in addition to `COLUMNS`."""

from __future__ import annotations

from hf_captionrl.reports.table import Column

__all__ = ["DEGENERATE", "REWARD_COLUMNS", "SAMPLE_COLUMNS"]

DEGENERATE = Column("degenerate", "Degene-\nrate", "lower", is_fraction=True)
"""Share of captions that repeat themselves."""

_SIZES = (3, 5, 7)  # of bags, as in TrueMatch

REWARD_COLUMNS: tuple[Column, ...] = (
    *(Column(f"bag_{size}_recall_at_1", f"R@1\nbags of {size}", "higher", is_fraction=True) for size in _SIZES),
    *(
        Column(f"reward_bag_{size}_recall_at_1", f"R@1 bags\nof {size}, reward\nscorer", "higher", is_fraction=True)
        for size in _SIZES
    ),
    Column("bag_7_truth_recall_at_1", "R@1 bags\nof 7, truth", "higher", is_fraction=True),
    Column("reward_rd100_recall_at_1", "R@1 RD100,\nreward scorer", "higher", is_fraction=True),
    DEGENERATE,
)
"""Columns of tables after training with rewards: bags by the held-out scorer, the same by the reward scorer and by the
facts ("truth"), and the share of captions that repeat themselves."""

SAMPLE_COLUMNS: tuple[Column, ...] = tuple(
    column
    for decoding, title in (("rs", "samples"), ("bs", "beam"))
    for column in (
        Column(f"{decoding}_cider_d", f"CIDEr-D\n{title}", "higher"),
        Column(f"{decoding}_div_1", f"Div-1\n{title}", "higher", is_fraction=True),
        Column(f"{decoding}_div_2", f"Div-2\n{title}", "higher", is_fraction=True),
        Column(f"{decoding}_mbleu_4_per_image", f"mBLEU-4\n{title}", "lower", is_fraction=True),
    )
)
"""Columns of SLE's Table 4: random samples ("rs" in the paper), then the best captions of a beam ("bs")."""
