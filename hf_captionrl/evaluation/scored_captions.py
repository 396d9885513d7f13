"""Captions with the numbers that several tables need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions

__all__ = [
    "REFERENCES",
    "add_scores",
    "count_copies",
    "human_captions",
    "score_sources",
]

REFERENCES = "references"
"""Name of the human captions."""


def score_sources(
    sources: Sequence[ScoredCaptions],
    scorer: Any,
    language_model: tuple[Any, Any] | None = None,
    *,
    clip_prefix: str = "",
    pools: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> None:
    """Add the scores of the first captions by scorer and language model, computed once for all tables; see `CaptionScoring`.

    Large columns are in temporary files of `folder`.
    """
    from hf_captionrl.evaluation.caption_scores import CaptionScoring, score_captions_in_blocks

    scoring = CaptionScoring(scorer, language_model, clip_prefix=clip_prefix, pools=pools)
    for source in sources:
        add_scores(
            source, score_captions_in_blocks(scoring, source.first, folder=folder), scorer, language_model, clip_prefix
        )


def add_scores(
    scored: ScoredCaptions,
    found: Mapping[str, np.ndarray],
    scorer: Any,
    language_model: tuple[Any, Any] | None = None,
    clip_prefix: str = "",
) -> None:
    """Add the columns of `CaptionScoring` to the captions they were computed from, with the same models."""
    import torch

    from hf_captionrl.metrics.perplexity import CaptionLosses, perplexity_of

    if scorer is not None:
        scored.text = torch.from_numpy(found["text"])
        scored.max_text_tokens, scored.scorer = scorer.max_text_tokens, scorer.signature
        scored.tokens = found["tokens"].tolist() if "tokens" in found else None
    if "clip_text" in found:
        scored.clip_text, scored.clip_prefix = torch.from_numpy(found["clip_text"]), clip_prefix
    scored.image_ranks, scored.pool_ranks = found.get("image_rank"), found.get("pool_rank")
    if language_model is not None:
        model = language_model[0]
        losses = CaptionLosses(torch.from_numpy(found["nats"]), torch.from_numpy(found["scored_tokens"]), None)
        scored.perplexity = lambda captions: perplexity_of(losses, model)


def count_copies(image_features: Any) -> int:
    """Number of images in a pool of features `(M, D)` that are copies of an earlier one: false negatives of its captions."""
    from hf_captionrl.retrieval.duplicates import duplicate_images

    return sum(first != row for row, first in enumerate(duplicate_images(image_features).tolist()))


def human_captions(evaluator: Evaluator) -> ScoredCaptions | None:
    """One random reference per image, compared with the others (SMILE, Table 1); None if an image has one reference."""
    from hf_captionrl.data.arrow_columns import MappedRows
    from hf_captionrl.evaluation.evaluator import draw_references
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions

    drawn = draw_references(evaluator.references, evaluator.seed)
    if not all(len(group) > 1 for group in drawn):
        return None
    return ScoredCaptions(REFERENCES, drawn, MappedRows(drawn, lambda _, group: group[1:]), is_human=True)
