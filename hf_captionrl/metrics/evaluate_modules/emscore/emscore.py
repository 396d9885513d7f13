"""EMScore as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/emscore.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["Emscore"]


class Emscore(DeclaredMetric, evaluate.Metric):
    """EMScore."""

    declaration = "emscore"
