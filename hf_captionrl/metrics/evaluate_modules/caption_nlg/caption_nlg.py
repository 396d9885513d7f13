"""Caption NLG: BLEU, ROUGE-L, CIDEr, CIDEr-D as a module of `evaluate`. Generated from hf_captionrl/metrics/evaluate_modules/declarations/caption_nlg.py."""

import evaluate

from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric

__all__ = ["CaptionNlg"]


class CaptionNlg(DeclaredMetric, evaluate.Metric):
    """Caption NLG: BLEU, ROUGE-L, CIDEr, CIDEr-D."""

    declaration = "caption_nlg"
