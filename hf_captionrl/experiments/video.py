"""Evaluation of captions of videos, with EMScore.

Legend: N videos, F frames, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.data import cached_features, frames_of
from hf_captionrl.evaluate_modules.metric import load_metric
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.metrics import emscore
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.metrics.video_matching import emscore_matrix
from hf_captionrl.retrieval import FeatureCache
from hf_captionrl.retrieval.ranking import ranks_from_scores, recall_at_k
from hf_captionrl.retrieval.scorer_base import TokenScorer

__all__ = ["VIDEO_COLUMNS", "VideoEvaluator"]

VIDEO_COLUMNS = load_metric("emscore").columns
"""Columns for videos, by the held-out scorer: EMScore's precision, recall and F in [-1, 1], self-retrieval among the test videos
by F (SMILE, Table 6), and F with references."""


class VideoEvaluator(Evaluator):
    """Evaluates captions of videos like [`Evaluator`], and with EMScore if the held-out scorer has token features."""

    def __init__(self, *args: Any, cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, cache_dir=cache_dir, **kwargs)
        number = frames_of(self.dataset)
        if not number:
            raise ValueError("The data are images. Set num_frames to the number of frames per video, for example 8.")
        self.frame_features: list[Tensor] | None = None
        self._reference_features: list[Tensor] = []
        if _has_token_features(self.held_out_scorer):
            scorer: Any = self.held_out_scorer
            cache = FeatureCache.for_scorer(scorer, cache_dir, what=f"image_{number}_frames")
            found = cached_features(cache, self.dataset, scorer.image_features, unit_length=True, pooling="concat")
            self.frame_features = list(found.tensor().float())  # N times (F, D)
            flat = spoken([text for texts in self.references for text in texts])
            self._reference_features = [row.cpu() for row in scorer.token_features(flat)]

    def more_numbers(self, captions: Sequence[str], references: Sequence[list[str]] | None) -> dict[str, Any]:
        if self.frame_features is None:
            reason = "the held-out scorer has no token features; use a CLIP of transformers or open_clip"
            keys = [column.key for column in VIDEO_COLUMNS]
            return dict.fromkeys(keys) | {f"{key}_reason": reason for key in keys}
        scorer: Any = self.held_out_scorer
        tokens = [r.cpu() for r in scorer.token_features(spoken(captions))]
        texts = self._texts(references)
        found = emscore(tokens, self.frame_features, reference_features=texts)
        ranks = ranks_from_scores(emscore_matrix(tokens, self.frame_features), torch.arange(len(tokens)))
        recalls = {f"emscore_recall_at_{k}": recall_at_k(ranks, k) for k in (1, 5)}
        values = {"emscore": found["f"], "emscore_references": found["reference_f"]}
        return values | recalls | {f"emscore_{name}": found[name] for name in ("precision", "recall")}

    def _texts(self, references: Sequence[list[str]] | None) -> list[list[Tensor]]:
        """Token features of the references."""
        known = iter(self._reference_features)
        every = [[next(known) for _ in texts] for texts in self.references]
        if references is None:
            return every
        by_text = [
            dict(zip(texts, features, strict=True)) for texts, features in zip(self.references, every, strict=True)
        ]
        return [[found[text] for text in texts] for found, texts in zip(by_text, references, strict=True)]


def _has_token_features(scorer: Any) -> bool:
    """Whether a scorer has features of tokens; SigLIP and other fixed-length text towers have none."""
    if not isinstance(scorer, TokenScorer):
        return False
    try:
        scorer.token_features(["a"])
    except ValueError:
        return False
    return True
