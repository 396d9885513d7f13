"""The columns of No Detail Left Behind's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_captionrl.metrics.diversity import vocabulary_size
from hf_captionrl.metrics.signature import signature
from hf_captionrl.metrics.suites.suite_row import SuiteRow, check_lengths
from hf_captionrl.text.tokenize import ptb_tokenize

__all__ = ["BAG_SIZES", "ndlb_suite"]

BAG_SIZES = (3, 5, 7)
"""Sizes of TrueMatch's bags."""


def ndlb_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    image_ranks: Any | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    bags: Mapping[int, list[list[int]]] | None = None,
    min_frequency: int = 5,
    scorer: str = "",
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of No Detail Left Behind's Tables 3 to 7: bags, random distractors, similarity, vocabulary.

    Source: Gaur et al. 2024, sections 3 and 4. ClipSc is 100 times the cosine, without prefix and without clamping,
    so text features must be those of the bare captions.

    Args:
        captions: N captions, one per image.
        references: References of each image, for CIDEr-D (with document frequencies of these references).
        text_features: `(N, D)` features of the captions by the scorer that evaluates.
        image_features: `(N, D)` features of the images by the same scorer.
        image_ranks: `(N,)` ranks of the captions' images among the N images, if known; None: they are computed.
        facts: Facts of each image.
        check: Checks a caption with the facts of its image.
        bags: For each bag size the bags, as lists of rows.
        min_frequency: Number of occurrences from which a word counts for the vocabulary (Table 6).
        scorer: Signature of the scorer, for the signatures of the numbers.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, `groups` and `signatures`, as [`smile_suite`] does.

    Returns:
        `dict`: `bag_3_recall_at_1`, `bag_5_recall_at_1`, `bag_7_recall_at_1` (and those of other sizes in `bags`),
        `rd100_recall_at_1`, `bleu_4`, `cider_d`, `clip_score`, `vocabulary_size` (a number of words), `hallucination`,
        `fact_recall`, `empty_captions`; `<key>_ci` and `<key>_reason` as in [`smile_suite`].

    Raises:
        ValueError: If lengths differ or `min_frequency` is below 1.
    """
    check_lengths(captions, references=references, text_features=text_features, facts=facts)
    row = SuiteRow(captions, seed, scorer)
    vocabulary = vocabulary_size(map(ptb_tokenize, row.texts), min_frequency)
    sizes = sorted({*BAG_SIZES, *(bags or {})})
    if text_features is None or image_features is None:
        row.missing("no scorer", *(f"bag_{size}_recall_at_1" for size in sizes), "rd100_recall_at_1", "clip_score")
    else:
        text, images = torch.as_tensor(text_features), torch.as_tensor(image_features)
        for size in sizes:
            if bags and bags.get(size):
                row.recalls(f"bag_{size}", (1,), text, images, bags=bags[size])
            else:
                row.missing(f"no bags of {size} in the data", f"bag_{size}_recall_at_1")
        row.random_distractors((1,), text, images, image_ranks)
        row.clip_score(text, images, "ndlb")
    row.bleu_4(references)
    row.cider_d(references)
    row.number(
        "vocabulary_size",
        vocabulary,
        signature=signature(metric="vocabulary_size", tok="ptb", frequency=f">={min_frequency}"),
    )
    row.faithfulness(facts, check)
    return row.result(details)
