"""Caption Diversity as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/caption_diversity.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["CaptionDiversity"]


class CaptionDiversity(DeclaredMetric, evaluate.Metric):
    """Caption Diversity."""

    declaration = "caption_diversity"
