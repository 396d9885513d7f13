"""Suites: all numbers of one paper's table for one list of captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics import (
    bootstrap_interval,
    caption_statistics,
    cider_d,
    clip_score,
    faithfulness,
    self_retrieval,
)

__all__ = ["EMPTY_CAPTION", "smile_suite"]

EMPTY_CAPTION = "."
"""Stands for a caption without a word: scorers can read it, and n-gram metrics see nothing in it."""


def smile_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    perplexity: Callable[[Sequence[str]], float] | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    bags: Mapping[int, list[list[int]]] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The columns of SMILE's Table 1, with a faithfulness number beside every retrieval number.

    Source: Yue et al. 2023, section 3.1 and Table 1. What cannot be measured is None, with the reason beside it.

    Args:
        captions: N captions, one an image.
        references: For each image its references; for CIDEr-D (document frequencies of these references).
        text_features: `(N, D)` features of the captions by the judging scorer.
        image_features: `(N, D)` features of the images by the same scorer.
        perplexity: Maps captions to their perplexity under a language model.
        facts: For each image what is true of it.
        check: Checks one caption against one image's facts.
        bags: For each bag size its bags, as lists of rows.
        seed: Of the bootstrap.

    Returns:
        `dict`: `length`, `lexical_diversity`, `pool_recall_at_1`, `pool_recall_at_5`, `rd100_recall_at_1`,
        `rd100_recall_at_5`, `clip_score`, `perplexity`, `cider_d`, `hallucination`, `fact_recall`, `empty_captions` (their number) and, with bags,
        `bag_<size>_recall_at_1`; `ranks`, the rank of each image in the pool; `<key>_ci` holds 95 % bootstrap intervals over images, `<key>_reason` why a value is None.

    Raises:
        ValueError: If lengths disagree.
    """
    for name, value in {"references": references, "text_features": text_features, "facts": facts}.items():
        if value is not None and len(value) != len(captions):
            raise ValueError(f"There are {len(captions)} captions but {len(value)} {name}. Pass one an image.")
    row: dict[str, Any] = {}
    # A captioner may write nothing. The other metrics refuse that; here it counts as a caption that says nothing.
    row["empty_captions"] = sum(not caption.strip() for caption in captions)
    texts = [caption if caption.strip() else EMPTY_CAPTION for caption in captions]

    def mean_with_interval(key: str, values: Any, weights: Any = None) -> None:
        values = np.asarray(values, dtype=np.float64)
        total = len(values) if weights is None else float(np.sum(weights))
        row[key] = float(values.sum() / total) if total else 0.0
        row[f"{key}_ci"] = list(bootstrap_interval(values, weights=weights, seed=seed)) if total else None

    def missing(reason: str, *keys: str) -> None:
        for key in keys:
            row[key] = None
            row[f"{key}_reason"] = reason

    mean_with_interval("length", [len(caption.split()) for caption in captions])
    row["lexical_diversity"] = float(caption_statistics(texts)["lexical_diversity"])

    if text_features is None or image_features is None:
        keys = ["pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1", "rd100_recall_at_5", "clip_score"]
        missing("no scorer", *keys)
    else:
        text_features, image_features = torch.as_tensor(text_features), torch.as_tensor(image_features)
        pool = self_retrieval(text_features, image_features, seed=seed)
        row["ranks"] = np.asarray(pool["ranks"])
        recalls = {"pool": pool}
        if len(captions) < 100:
            missing("fewer than 100 images", "rd100_recall_at_1", "rd100_recall_at_5")
        else:
            recalls["rd100"] = self_retrieval(text_features, image_features, num_distractors=99, seed=seed)
        for name, found in recalls.items():
            for k in (1, 5):
                row[f"{name}_recall_at_{k}"] = float(found[f"recall_at_{k}"])
                row[f"{name}_recall_at_{k}_ci"] = [float(bound) for bound in found[f"recall_at_{k}_ci"]]
        mean_with_interval("clip_score", clip_score(text_features, image_features, preset="hessel")["per_sample"])
        for size, members in (bags or {}).items():
            found = self_retrieval(text_features, image_features, bags=members, ks=(1,), seed=seed)
            row[f"bag_{size}_recall_at_1"] = float(found["recall_at_1"])
            row[f"bag_{size}_recall_at_1_ci"] = [float(bound) for bound in found["recall_at_1_ci"]]

    if perplexity is None:
        missing("no language model", "perplexity")
    else:
        row["perplexity"] = float(perplexity(texts))

    if references is None:
        missing("no references", "cider_d")
    else:
        mean_with_interval("cider_d", cider_d(texts, [list(r) for r in references])["per_sample"])

    if facts is None or check is None:
        missing("no truth to check against", "hallucination", "fact_recall")
    else:
        counts = faithfulness(texts, facts, check)["per_sample"]
        numbers = {name: np.asarray(values) for name, values in counts.items()}
        mean_with_interval("hallucination", numbers["wrong"], numbers["wrong"] + numbers["right"])
        mean_with_interval("fact_recall", numbers["recalled"], numbers["recalled"] + numbers["missed"])
    return row
