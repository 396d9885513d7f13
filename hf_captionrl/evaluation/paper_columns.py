"""Numbers of the tables of individual papers, in addition to those of every results table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_captionrl.evaluate_modules.metric import table_columns
from hf_captionrl.evaluate_modules.results_columns import MORE_REFERENCES_COLUMNS, by_reward_scorer
from hf_captionrl.metrics.meteor_spice import meteor, spice
from hf_captionrl.metrics.suites import discritune_suite, ndlb_suite
from hf_captionrl.metrics.suites.suite_row import SuiteRow
from hf_captionrl.reports.table import Column

__all__ = ["MORE_REFERENCES", "more_columns", "paper_numbers", "references_numbers", "reward_numbers"]

MORE_REFERENCES = "more_references"
"""Column of the test split with a second set of references, such as HolisticCaps."""

_COLUMNS: dict[str, tuple[Column, ...]] = {
    "discritune": table_columns("blocks_recall_at_1", "bleu_4", "meteor", "spice", short=True),
    "ndlb": table_columns("bleu_4", "ndlb_clip_score", "vocabulary_size", short=True),
    "sle": table_columns("meteor", "spice", short=True),
}
_BY_SCORER = ("blocks_recall_at_1", "ndlb_clip_score")
"""Columns that depend on the scorer; the papers compute them with the scorer of the reward."""


def more_columns(paper: str | None, has_reward_scorer: bool, has_more_references: bool) -> tuple[Column, ...]:
    """Columns of a paper, of its retrieval by the reward scorer, and of a second set of references."""
    found = _COLUMNS[paper] if paper else ()
    if has_reward_scorer:
        found += by_reward_scorer(*(column for column in found if column.key in _BY_SCORER))
    if has_more_references:
        found += MORE_REFERENCES_COLUMNS
    return found


def paper_numbers(paper: str | None, captions: Sequence[str], features: dict[str, Any], seed: int) -> dict[str, Any]:
    """Numbers of `_COLUMNS`, with intervals and reasons.

    `features` has `references`, `text_features` and `image_features` of the suites, of the captions without prefix.
    """
    if paper is None:
        return {}
    if paper == "ndlb":
        found = ndlb_suite(captions, **features, seed=seed)
        found |= {key.replace("clip_score", "ndlb_clip_score"): value for key, value in found.items() if "clip" in key}
    else:
        found = discritune_suite(captions, **features, meteor=meteor, spice=spice, seed=seed)
    wanted = [column.key for column in _COLUMNS[paper]]
    return {key: value for key, value in found.items() if key.removesuffix("_ci").removesuffix("_reason") in wanted}


def reward_numbers(paper: str | None, captions: Sequence[str], text: Any, images: Any) -> dict[str, Any]:
    """The retrieval columns of a paper by the reward scorer, without intervals: `reward_<key>` and reasons."""
    features = {"references": None, "text_features": text, "image_features": images}
    found = paper_numbers(paper, captions, features, seed=0)
    kept = {key for key in found if key.removesuffix("_reason") in _BY_SCORER}
    return {f"reward_{key}": found[key] for key in kept}


def references_numbers(
    captions: Sequence[str], references: Sequence[Sequence[str]] | None, seed: int
) -> dict[str, Any]:
    """`more_cider_d`: CIDEr-D against the second set of references."""
    if references is None:
        return {}
    row = SuiteRow(captions, seed)
    row.cider_d(references)
    return {f"more_{key}": value for key, value in row.numbers.items() if key.startswith("cider_d")}
