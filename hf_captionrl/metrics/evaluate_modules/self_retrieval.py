"""Self-retrieval: does a caption retrieve its target image?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.metrics.evaluate_modules.inputs import image_pool, scorer_signature, text_features_of, truncation


def compute(
    predictions: Sequence[Any],
    references: Sequence[Any] | None = None,
    *,
    scorer: Any = None,
    text_features: Any = None,
    images: Any = None,
    image_features: Any = None,
    image_ids: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Call `self_retrieval` on the features of captions and of a pool of images."""
    pool: dict[str, Any] = {"images": images, "image_features": image_features, "image_ids": image_ids}
    text = text_features_of(predictions, text_features, scorer)
    features, rows = image_pool(references, targets=targets, scorer=scorer, dtype=text.dtype, **pool)
    result = metrics.self_retrieval(text, features, targets=rows, scorer=scorer_signature(scorer), **options)
    return result | truncation(predictions, scorer)


class SelfRetrieval(metric.CaptionMetric):
    """Self-Retrieval."""

    about, function, forwarded = DESCRIPTIONS["self_retrieval"], staticmethod(compute), metrics.self_retrieval
