"""The papers' tables: their columns, and how a row is computed from one file of captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from hf_captionrl.evaluate_modules.metric import all_metrics, table_columns
from hf_captionrl.evaluate_modules.results_columns import variants
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.metrics import paired_test
from hf_captionrl.metrics.meteor_spice import meteor, spice
from hf_captionrl.metrics.suites import discritune_suite, ndlb_suite, sle_suite, smile_suite
from hf_captionrl.metrics.suites.suite_row import SuiteRow, spoken
from hf_captionrl.metrics.word_statistics import length_statistics
from hf_captionrl.reports.table import Column
from hf_captionrl.scenes import check

__all__ = ["CAPTIONS_TABLE", "PREFERENCES_TABLE", "TABLES", "ScoredCaptions", "Table", "compare_with_first"]


@dataclass
class ScoredCaptions:
    """Captions of one captioner, with everything that is computed once."""

    name: str  # name of the captioner
    captions: Sequence[list[str]]  # captions of each image, in the order of the data set
    references: Sequence[list[str]]  # references of each image, for the first caption
    is_human: bool = False  # whether the captions are the references
    text: Tensor | None = None  # features `(N, D)` of each image's first caption, or None
    # The same for CLIPScore, with `clip_prefix` before each caption, or None if the prefix is empty.
    clip_text: Tensor | None = None
    clip_prefix: str = ""  # text before each caption
    scorer: str = ""  # signature of the scorer
    image_ranks: np.ndarray | None = None  # rank of each image among the images, for the first caption, or None
    pool_ranks: np.ndarray | None = None  # the same in the evaluator's pool
    tokens: list[int] | None = None  # number of the scorer's tokens in each first caption, or None
    max_text_tokens: int | None = None  # largest number of tokens that the scorer reads
    # Function from captions to the result of `caption_perplexity`, or None.
    perplexity: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
    # Number of words in each first caption, set by the table of captions.
    lengths: list[int] = field(default_factory=list)

    @property
    def first(self) -> list[str]:
        """The first caption of each image: the best beam."""
        return [group[0] for group in self.captions]

    @cached_property
    def given_references(self) -> Sequence[list[str]] | None:
        """The references if every image has one; metrics of references are left out otherwise."""
        return self.references if all(self.references) else None


@dataclass(frozen=True)
class Table:
    """A paper's table; `compute` maps scored captions and the evaluator to a row with details."""

    title: str
    columns: tuple[Column, ...]
    compute: Callable[[ScoredCaptions, Evaluator], dict[str, Any]]


def _shared(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    """Arguments of every suite with retrieval."""
    return {
        "references": scored.given_references,
        "text_features": scored.text,
        "image_features": evaluator.image_features,
        "scorer": scored.scorer,
        "seed": evaluator.seed,
        "details": True,
        "facts": evaluator.facts,
        "check": check if evaluator.facts is not None else None,
    }


def _smile(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return smile_suite(
        scored.first,
        pool_features=evaluator.pool_features,
        image_ranks=scored.image_ranks,
        pool_ranks=scored.pool_ranks,
        clip_features=scored.clip_text,
        clip_prefix=scored.clip_prefix,
        perplexity=scored.perplexity,
        **_shared(scored, evaluator),
    )


def _discritune(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return discritune_suite(scored.first, meteor=meteor, spice=spice, **_shared(scored, evaluator))


def _ndlb(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return ndlb_suite(scored.first, bags=evaluator.bags, image_ranks=scored.image_ranks, **_shared(scored, evaluator))


def _sle(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    if min(len(group) for group in scored.captions) < 2:
        empty = SuiteRow(scored.first, evaluator.seed)
        empty.missing("one caption per image; this table needs several", *(c.key for c in TABLES["sle"].columns))
        return empty.result(details=True)
    if not scored.is_human:
        return sle_suite(scored.captions, references=scored.given_references, seed=evaluator.seed, details=True)
    row = sle_suite(scored.captions, seed=evaluator.seed, details=True)
    reason = "the references are the captions"
    return row | {"cider_d_reason": reason, "best_cider_d_reason": reason}


def _captions(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    tokens = scored.tokens
    counted = None if tokens is None else iter(tokens)
    found = length_statistics(
        spoken(scored.first),
        count_tokens=None if counted is None else lambda block: list(islice(counted, len(block))),
    )
    scored.lengths = found["words"].tolist()
    row = SuiteRow(scored.first, evaluator.seed)
    row.mean("mean_words", found["words"])
    row.number("std_words", found["std_words"])
    row.number("max_words", found["max_words"])
    if tokens is None:
        row.missing("no scorer, or one that does not count tokens", "mean_tokens", "std_tokens", "captions_truncated")
    else:
        row.mean("mean_tokens", found["tokens"])
        row.number("std_tokens", found["std_tokens"])
        row.mean("captions_truncated", found["tokens"] > (scored.max_text_tokens or np.inf), is_share=True)
    for metric in _CAPTION_METRICS:
        result = metric.compute(spoken(scored.first))
        for column in metric.columns:
            row.mean(column.key, result["per_sample"], signature=result["signature"], is_share=column.is_fraction)
    return row.result(details=True)


def _preferences(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    shared = _shared(scored, evaluator)
    row = SuiteRow(scored.first, evaluator.seed, scored.scorer)
    if scored.text is not None and evaluator.image_features is not None:
        row.random_distractors((1,), scored.text, evaluator.image_features, scored.image_ranks)
    row.faithfulness(shared["facts"], shared["check"])
    row.parts(evaluator.parts)
    return row.result(details=True)


_FAITHFULNESS = ("hallucination", "fact_recall")


TABLES: dict[str, Table] = {
    "smile": Table(
        "SMILE",
        table_columns(
            *("length", "lexical_diversity", "pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1"),
            *("rd100_recall_at_5", "clip_score", "perplexity", "cider_d", *_FAITHFULNESS),
        ),
        _smile,
    ),
    "discritune": Table(
        "DiscriTune",
        table_columns("blocks_recall_at_1", "bleu_4", "meteor", "cider_d", "spice", *_FAITHFULNESS),
        _discritune,
    ),
    "sle": Table(
        "SLE (several captions per image)",
        (
            *table_columns("captions_per_image"),
            replace(*table_columns("cider_d"), header="CIDEr-D, mean over an image's captions"),
            *table_columns("best_cider_d", "div_1", "div_2", "mbleu_4_per_image", "mbleu_4", "unique_captions"),
        ),
        _sle,
    ),
    "ndlb": Table(
        "No Detail Left Behind",
        (
            *table_columns(
                "bag_3_recall_at_1", "bag_5_recall_at_1", "bag_7_recall_at_1", "rd100_recall_at_1", "bleu_4"
            ),
            *table_columns("cider_d"),
            replace(*table_columns("ndlb_clip_score"), key="clip_score"),
            *table_columns("vocabulary_size", *_FAITHFULNESS),
        ),
        _ndlb,
    ),
}
"""Suites by the name for `--suite`."""

_BY_PART = table_columns("rd100_recall_at_1", "hallucination")

PREFERENCES_TABLE = Table(
    "Scenes with and against the preferences of their kinds",
    (
        *variants("with_preferences", ", with preferences", *_BY_PART),
        *variants("against_preferences", ", against preferences", *_BY_PART),
    ),
    _preferences,
)
"""Printed below every suite on the embedded world, where some test scenes go against what their kind prefers."""

_CAPTION_METRICS = [metric for metric in all_metrics().values() if metric.in_captions_table]

CAPTIONS_TABLE = Table(
    "Captions",
    (
        Column("mean_words", "Words, mean", None, digits=2),
        Column("std_words", "Words, standard deviation", None, digits=2),
        Column("max_words", "Words, longest", None, digits=0),
        Column("mean_tokens", "Scorer's tokens, mean", None, digits=2),
        Column("std_tokens", "Scorer's tokens, standard deviation", None, digits=2),
        Column("captions_truncated", "Truncated at the scorer's text limit", "lower", is_fraction=True),
        Column("empty_captions", "Empty captions", "lower", digits=0),
        *(column for metric in _CAPTION_METRICS for column in metric.columns),
    ),
    _captions,
)
"""Printed below every suite: lengths of the captions, and how many the scorer truncated (NDLB Table 9)."""


def compare_with_first(rows: Sequence[dict[str, Any]], *, seed: int) -> None:
    """Test each row against the first; adds `<key>_p_value`, `<key>_difference` and, below 0.05, `<key>_mark`."""
    first = rows[0]["per_sample"]
    for row in rows[1:]:
        for key, values in row["per_sample"].items():
            if key not in first or len(first[key]) != len(values):
                continue
            found = paired_test(values, first[key], groups=row["groups"].get(key), seed=seed)
            row[f"{key}_difference"], row[f"{key}_p_value"] = found["difference"], found["p_value"]
            if found["p_value"] < 0.05:
                row[f"{key}_mark"] = "**" if found["p_value"] < 0.01 else "*"
