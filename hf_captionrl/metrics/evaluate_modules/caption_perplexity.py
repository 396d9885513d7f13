"""Perplexity of captions under any causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model


def compute(predictions: Sequence[str], *, model: Any = None, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
    """Call `caption_perplexity` with a model given by name or in memory."""
    result = metrics.caption_perplexity(predictions, *load_language_model(model, tokenizer), **options)
    return result | {"per_sample": {"perplexity": result["per_sample"]}}


class CaptionPerplexity(metric.CaptionMetric):
    """Caption Perplexity."""

    about, function, forwarded = DESCRIPTIONS["caption_perplexity"], staticmethod(compute), metrics.caption_perplexity
