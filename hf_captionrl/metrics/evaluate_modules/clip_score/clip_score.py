"""CLIPScore and RefCLIPScore as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/clip_score.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["ClipScore"]


class ClipScore(DeclaredMetric, evaluate.Metric):
    """CLIPScore and RefCLIPScore."""

    declaration = "clip_score"
