"""Self-Retrieval as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/self_retrieval.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["SelfRetrieval"]


class SelfRetrieval(DeclaredMetric, evaluate.Metric):
    """Self-Retrieval."""

    declaration = "self_retrieval"
