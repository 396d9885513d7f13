"""Caption Faithfulness as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/caption_faithfulness.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["CaptionFaithfulness"]


class CaptionFaithfulness(DeclaredMetric, evaluate.Metric):
    """Caption Faithfulness."""

    declaration = "caption_faithfulness"
