"""Caption Diversity as a module of `evaluate`. Generated from hf_captionrl/evaluate_modules/declarations/caption_diversity.py."""

import evaluate

from hf_captionrl.evaluate_modules.adapter import DeclaredMetric

__all__ = ["CaptionDiversity"]


class CaptionDiversity(DeclaredMetric, evaluate.Metric):
    """Caption Diversity."""

    declaration = "caption_diversity"
