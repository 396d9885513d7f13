"""The one table of the numbers that tables show: key, headings, direction, decimals, and what computes it.

`function` is the method of [`hf_captionrl.metrics.suites.SuiteRow`] that computes a number from captions and features; without
one, whoever writes the row computes the number. Suites, recipes, `captionrl evaluate`, TrueMatch and pages choose columns by key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    key: str  # in a row and in results.json
    header: str  # may contain line breaks
    better: Literal["higher", "lower"] | None  # which direction is better; None: neither
    digits: int = 3  # decimals
    is_fraction: bool = False  # whether values lie in [0, 1]
    short_header: str = ""  # in tables with many columns, with line breaks; empty: `header`
    function: str = ""  # method of `SuiteRow` that computes the number; empty: none

    @property
    def arrow(self) -> str:
        """`↑` if higher is better, `↓` if lower is better, else empty."""
        return {"higher": "↑", "lower": "↓", None: ""}[self.better]

    @property
    def title(self) -> str:
        """The header with its arrow, on one line."""
        return " ".join(f"{self.header} {self.arrow}".split())


def _share(key: str, header: str, better: Literal["higher", "lower"], short: str = "", function: str = "") -> Column:
    return Column(key, header, better, is_fraction=True, short_header=short, function=function)


def bag_column(size: int) -> Column:
    """The column of recall in bags of a size."""
    bags = f"bags of {size}"
    return _share(f"bag_{size}_recall_at_1", f"R@1, {bags}", "higher", f"R@1\n{bags}", "set_bag_recalls")


# fmt: off
TABLE = (  # a suite computes its numbers in this order
    Column("length", "Length (words)", None, 2, short_header="Length\n(words)", function="set_statistics"),
    Column("lexical_diversity", "Lexical diversity (thousands of words)", "higher", short_header="Lexical\ndiv.",
           function="set_statistics"),
    _share("pool_recall_at_1", "R@1, whole pool", "higher", "R@1\npool", "set_pool_recalls"),
    _share("pool_recall_at_5", "R@5, whole pool", "higher", "R@5\npool", "set_pool_recalls"),
    _share("rd100_recall_at_1", "R@1, RD100", "higher", "R@1\nRD100", "set_random_distractors"),
    _share("rd100_recall_at_5", "R@5, RD100", "higher", "R@5\nRD100", "set_random_distractors"),
    _share("blocks_recall_at_1", "P@1 among 100 (blocks)", "higher", "P@1\nblocks", "set_block_recalls"),
    *map(bag_column, (3, 5, 7)),
    _share("bag_7_truth_recall_at_1", "R@1, bags of 7, by the facts", "higher", "R@1 bags\nof 7, truth",
           "set_truth_recalls"),
    Column("clip_score", "CLIPScore (2.5 cos)", "higher", short_header="CLIPScore\n", function="set_clip_score"),
    Column("perplexity", "Perplexity", "lower", 2, short_header="Perplexity\n", function="set_perplexity"),
    Column("captions_per_image", "Captions per image", None, 0, function="set_diversity"),
    _share("div_1", "Div-1", "higher", function="set_diversity"),
    _share("div_2", "Div-2", "higher", function="set_diversity"),
    _share("mbleu_4_per_image", "mBLEU-4, mean over captions", "lower", "mBLEU-4", "set_diversity"),
    _share("mbleu_4", "mBLEU-4, corpus", "lower", function="set_diversity"),
    _share("unique_captions", "Unique captions", "higher", function="set_diversity"),
    _share("bleu_1", "BLEU-1", "higher", function="set_bleu"),
    _share("bleu_4", "BLEU-4", "higher", function="set_bleu"),
    _share("rouge_l", "ROUGE-L", "higher", function="set_rouge_l"),
    Column("cider_d", "CIDEr-D", "higher", short_header="CIDEr-D\n", function="set_cider_d"),
    Column("best_cider_d", "CIDEr-D, best caption of an image", "higher", function="set_cider_d"),
    _share("meteor", "METEOR", "higher", function="set_by_java"),
    _share("spice", "SPICE", "higher", function="set_by_java"),
    Column("vocabulary_size", "Words that occur at least 5 times", "higher", 0, short_header="Words seen\n5 times",
           function="set_vocabulary_size"),
    _share("repeated_captions", "Images that share their caption", "lower", function="set_repeated_captions"),
    Column("ndlb_clip_score", "ClipSc (100 cos)", "higher", 2, short_header="ClipSc\n(100 cos)",
           function="set_clip_score"),
    _share("hallucination", "Hallucination", "lower", "Hallucination\n", "set_faithfulness"),
    _share("fact_recall", "Fact recall", "higher", "Fact\nrecall", "set_faithfulness"),
    _share("unmentioned_objects", "Objects that no reference names", "lower", "Objects not\nin references",
           "set_unmentioned_objects"),
    _share("degenerate", "Degenerate", "lower", "Degenerate\n", "set_degenerate"),
    # Below every suite.
    Column("std_words", "Words, standard deviation", None, 2, function="set_lengths"),
    Column("max_words", "Words, longest", None, 0, function="set_lengths"),
    Column("mean_tokens", "Scorer's tokens, mean", None, 2, function="set_lengths"),
    Column("std_tokens", "Scorer's tokens, standard deviation", None, 2, function="set_lengths"),
    _share("captions_truncated", "Truncated at the scorer's text limit", "lower", function="set_lengths"),
    _share("empty", "Empty (no letter or digit)", "lower", function="set_degenerate"),
    # Of videos.
    Column("emscore_precision", "EMScore\nP", "higher"),
    Column("emscore_recall", "EMScore\nR", "higher"),
    Column("emscore", "EMScore\nF", "higher"),
    _share("emscore_recall_at_1", "R@1 by\nEMScore", "higher"),
    _share("emscore_recall_at_5", "R@5 by\nEMScore", "higher"),
    Column("emscore_references", "EMScore,\nreferences", "higher"),
)
# fmt: on

_BY_KEY = {column.key: column for column in TABLE}


def table_columns(*keys: str, short: bool = False) -> tuple[Column, ...]:
    """The columns of some keys; `short` for tables with many columns."""
    chosen = (_BY_KEY[key] for key in keys)
    return tuple(replace(c, header=c.short_header or c.header) if short else c for c in chosen)


def variants(condition: str, heading: str, *columns: Column) -> tuple[Column, ...]:
    """The same numbers under another condition: keys `<condition>_<key>`, and `heading` after the headers."""
    return tuple(replace(c, key=f"{condition}_{c.key}", header=c.header.rstrip() + heading) for c in columns)


def by_reward_scorer(*columns: Column) -> tuple[Column, ...]:
    """The same numbers by the reward scorer."""
    return variants("reward", ",\nreward\nscorer", *columns)


# --- What suites compute: keys, in the order of the columns ----------------------------------------------------------

_FAITHFULNESS = ("hallucination", "fact_recall")

SUITES: dict[str, tuple[str, ...]] = {
    "text": (
        *("length", "lexical_diversity", "vocabulary_size", "repeated_captions", "perplexity", "bleu_1", "bleu_4"),
        *("meteor", "rouge_l", "cider_d", "spice", "unmentioned_objects"),
    ),
    "smile": (
        *("length", "lexical_diversity", "pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1"),
        *("rd100_recall_at_5", "clip_score", "perplexity", "cider_d", *_FAITHFULNESS),
    ),
    "discritune": ("blocks_recall_at_1", "bleu_4", "meteor", "cider_d", "spice", *_FAITHFULNESS),
    "sle": (
        *("captions_per_image", "cider_d", "best_cider_d", "div_1", "div_2", "mbleu_4_per_image", "mbleu_4"),
        "unique_captions",
    ),
    "ndlb": (
        *("bag_3_recall_at_1", "bag_5_recall_at_1", "bag_7_recall_at_1", "rd100_recall_at_1", "bleu_4", "cider_d"),
        *("ndlb_clip_score", "vocabulary_size", *_FAITHFULNESS, "bag_7_truth_recall_at_1"),
    ),
    "lengths": (
        *("length", "std_words", "max_words", "mean_tokens", "std_tokens", "captions_truncated"),
        *("empty", "degenerate"),
    ),
}
"""Tables by the name for `--suite`: of text alone, of papers, and the one below every suite."""

PAPERS = {
    "discritune": ("blocks_recall_at_1", "bleu_4", "meteor", "spice"),
    "ndlb": ("bleu_4", "ndlb_clip_score", "vocabulary_size"),
    "sle": ("meteor", "spice"),
}
"""Columns that `--paper` adds to the table of a recipe."""

BY_SCORER = ("blocks_recall_at_1", "ndlb_clip_score")
"""Columns of papers that depend on the scorer; the papers compute them with the scorer of the reward."""

# --- Columns of the tables of recipes --------------------------------------------------------------------------------

COLUMNS: tuple[Column, ...] = table_columns(*SUITES["smile"], short=True)
"""Columns of every results table, in the order in which they are shown."""

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
"""Columns after those of every table: bags by the held-out scorer, the same by the reward scorer and by the
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

VIDEO_COLUMNS: tuple[Column, ...] = table_columns(
    *("emscore_precision", "emscore_recall", "emscore", "emscore_recall_at_1", "emscore_recall_at_5"),
    "emscore_references",
)
"""Columns for videos, by the held-out scorer: EMScore's precision, recall and F in [-1, 1], self-retrieval among the test videos
by F (SMILE, Table 6), and F with references."""
