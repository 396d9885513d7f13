"""Evaluation of captions of videos, with EMScore.

Legend: N videos, F frames, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_captionrl.data import cached_features, frames_of
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.metrics import emscore
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.reports.table import Column
from hf_captionrl.retrieval import FeatureCache
from hf_captionrl.retrieval.scorer_base import TokenScorer

__all__ = ["VIDEO_COLUMNS", "VideoEvaluator"]

VIDEO_COLUMNS: tuple[Column, ...] = (
    Column("emscore", "EMScore", "higher", digits=3),
    Column("emscore_references", "EMScore,\nreferences", "higher", digits=3),
)
"""Columns for videos: EMScore without and with references, by the held-out scorer, in [-1, 1]."""


class VideoEvaluator(Evaluator):
    """Evaluates captions of videos like [`Evaluator`], and with EMScore if the held-out scorer has token features.

    Args:
        args: Positional arguments of [`Evaluator`].
        cache_dir: Folder of the feature cache; None for the default.
        kwargs: Keyword arguments of [`Evaluator`].
    """

    def __init__(self, *args: Any, cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, cache_dir=cache_dir, **kwargs)
        number = frames_of(self.dataset)
        if not number:
            raise ValueError("The data are images. Set num_frames to the number of frames per video, for example 8.")
        self.frame_features: list[Tensor] | None = None
        self._reference_features: list[Tensor] = []
        if isinstance(self.held_out_scorer, TokenScorer):
            cache = FeatureCache.for_scorer(self.held_out_scorer, cache_dir, what=f"image_{number}_frames")
            found = cached_features(
                cache, self.dataset, self.held_out_scorer.image_features, unit_length=True, pooling="concat"
            )
            self.frame_features = list(found.tensor().float())  # N times (F, D)
            flat = spoken([text for texts in self.references for text in texts])
            self._reference_features = [row.cpu() for row in self.held_out_scorer.token_features(flat)]

    def row(self, name: str, captions: Sequence[str], references: list[list[str]] | None = None) -> dict[str, Any]:
        """One row of the table."""
        row = super().row(name, captions, references)
        if self.frame_features is None or not isinstance(self.held_out_scorer, TokenScorer):
            reason = "the held-out scorer has no token features; use a CLIP of transformers or open_clip"
            return row | {c.key: None for c in VIDEO_COLUMNS} | {f"{c.key}_reason": reason for c in VIDEO_COLUMNS}
        tokens = [r.cpu() for r in self.held_out_scorer.token_features(spoken(captions))]
        texts = self._texts(references)
        found = emscore(tokens, self.frame_features, reference_features=texts)
        return row | {"emscore": found["f"], "emscore_references": found["reference_f"]}

    def _texts(self, references: list[list[str]] | None) -> list[list[Tensor]]:
        """Token features of the references."""
        known = iter(self._reference_features)
        every = [[next(known) for _ in texts] for texts in self.references]
        if references is None:
            return every
        by_text = [
            dict(zip(texts, features, strict=True)) for texts, features in zip(self.references, every, strict=True)
        ]
        return [[found[text] for text in texts] for found, texts in zip(by_text, references, strict=True)]
