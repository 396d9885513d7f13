"""The columns of SMILE's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics import caption_statistics
from hf_captionrl.metrics.suites.suite_row import SuiteRow, check_lengths

__all__ = ["smile_suite"]


def smile_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    pool_features: Any | None = None,
    image_ranks: Any | None = None,
    pool_ranks: Any | None = None,
    clip_features: Any | None = None,
    clip_prefix: str = "",
    perplexity: Callable[[Sequence[str]], float | Mapping[str, Any]] | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    bags: Mapping[int, list[list[int]]] | None = None,
    parts: Mapping[str, Sequence[bool]] | None = None,
    scorer: str = "",
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of SMILE's Table 1, with a faithfulness number beside every retrieval number.

    Source: Yue et al. 2023, section 3.1 and Table 1. A number that cannot be computed is None, and `<key>_reason` says why.

    Args:
        captions: N captions, one per image.
        references: References of each image, for CIDEr-D (with document frequencies of these references).
        text_features: `(N, D)` features of the captions by the scorer that evaluates.
        image_features: `(N, D)` features of the images by the same scorer.
        pool_features: `(M, D)` features of the pool of `pool_recall_at_<k>`, whose first N are `image_features`; None: these
            alone. The paper's pool is CapEnrich's, of 30,000 images.
        image_ranks: `(N,)` ranks of the captions' images among the N images, if known; None: they are computed.
        pool_ranks: The same in `pool_features`.
        clip_features: `(N, D)` features for CLIPScore, of the captions with `clip_prefix`; None: `text_features`.
        clip_prefix: Prefix of the captions there, for the signature; the paper's is "A photo depicts ".
        perplexity: Maps captions to the result of [`caption_perplexity`] under a language model, or to the number alone,
            which then has no interval.
        facts: Facts of each image.
        check: Checks a caption with the facts of its image.
        bags: For each bag size the bags, as lists of rows.
        parts: For each part of the images its name, and whether each image belongs to it.
        scorer: Signature of the scorer, for the signatures of the numbers.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, scores of single images (or bags) whose mean is the number, for
            [`paired_test`]; `groups`, the bag of each score if there are bags; and `signatures`.

    Returns:
        `dict`: `length`, `lexical_diversity`, `pool_recall_at_1`, `pool_recall_at_5`, `rd100_recall_at_1`,
        `rd100_recall_at_5`, `clip_score`, `perplexity`, `cider_d`, `hallucination`, `fact_recall`, `empty_captions`
        (their number) and, with bags, `bag_<size>_recall_at_1` and `bag_<size>_truth_recall_at_1` (of captions whose
        claims fit no other image of the bag); with parts, `<part>_rd100_recall_at_1` and `<part>_hallucination`; `ranks`,
        the rank of each image in the pool; `<key>_ci` holds 95 % bootstrap intervals over images, `<key>_reason` the
        reason why a value is None.

    Raises:
        ValueError: If lengths differ.
    """
    check_lengths(
        captions,
        references=references,
        text_features=text_features,
        clip_features=clip_features,
        facts=facts,
        **(parts or {}),
    )
    row = SuiteRow(captions, seed, scorer)
    statistics = caption_statistics(row.texts)
    row.mean("length", [len(caption.split()) for caption in captions], signature=statistics["signature"])
    row.number("lexical_diversity", float(statistics["lexical_diversity"]), signature=statistics["signature"])
    if text_features is None or image_features is None:
        keys = ["pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1", "rd100_recall_at_5", "clip_score"]
        row.missing("no scorer", *keys)
    else:
        text, images = torch.as_tensor(text_features), torch.as_tensor(image_features)
        pool = images if pool_features is None else torch.as_tensor(pool_features)
        known = image_ranks if pool_features is None else pool_ranks
        found = row.recalls("pool", (1, 5), text, pool, targets=torch.arange(len(text)), pool_ranks=known)
        row.numbers["ranks"] = np.asarray(found["ranks"])
        known = found["ranks"] if pool_features is None else image_ranks
        row.random_distractors((1, 5), text, images, known)
        prefixed = text if clip_features is None else torch.as_tensor(clip_features)
        row.clip_score(prefixed, images, "hessel", clip_prefix)
        for size, members in (bags or {}).items():
            row.recalls(f"bag_{size}", (1,), text, images, bags=members)
    row.perplexity(perplexity)
    row.cider_d(references)
    row.faithfulness(facts, check)
    row.parts(parts or {})
    row.truth_recalls(facts, check, bags or {})
    return row.result(details)
