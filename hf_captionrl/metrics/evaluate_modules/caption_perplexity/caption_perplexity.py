"""Caption Perplexity as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/caption_perplexity.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["CaptionPerplexity"]


class CaptionPerplexity(DeclaredMetric, evaluate.Metric):
    """Caption Perplexity."""

    declaration = "caption_perplexity"
