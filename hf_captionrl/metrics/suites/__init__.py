"""Suites: all numbers of one paper's table for one captioner, one file a paper."""

from hf_captionrl.metrics.suites.discritune import discritune_suite
from hf_captionrl.metrics.suites.ndlb import ndlb_suite
from hf_captionrl.metrics.suites.row import EMPTY_CAPTION
from hf_captionrl.metrics.suites.sle import sle_suite
from hf_captionrl.metrics.suites.smile import smile_suite

__all__ = ["EMPTY_CAPTION", "discritune_suite", "ndlb_suite", "sle_suite", "smile_suite"]
