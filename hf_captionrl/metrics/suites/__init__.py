"""Suites: all numbers of one paper's table for one captioner, one file per paper."""

from hf_captionrl.metrics.suites.discritune import discritune_suite
from hf_captionrl.metrics.suites.ndlb import ndlb_suite
from hf_captionrl.metrics.suites.sle import decoding_suite, diversity_at_cider_d, sle_suite, tradeoff_points
from hf_captionrl.metrics.suites.smile import smile_suite
from hf_captionrl.metrics.suites.suite_row import EMPTY_CAPTION

__all__ = [
    "EMPTY_CAPTION",
    "decoding_suite",
    "discritune_suite",
    "diversity_at_cider_d",
    "ndlb_suite",
    "sle_suite",
    "smile_suite",
    "tradeoff_points",
]
