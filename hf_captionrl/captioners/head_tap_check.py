"""Checks the head tap against the model's own loss on the first batch."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.head_tap import mean_cross_entropy

__all__ = ["check_tap"]

logger = logging.getLogger(__name__)


def check_tap(captioner: Any, batch: dict[str, Any], atol: float | None = None) -> float:
    """See `Captioner.self_check`."""
    model = captioner.model
    if atol is None:
        half = torch.is_autocast_enabled(captioner.device.type) or next(model.parameters()).element_size() < 4
        atol = 0.05 if half else 1e-3
    with evaluating(model), torch.no_grad():  # with dropout, two forwards would differ
        own = float(captioner.own_loss(batch))
        try:
            tapped = float(model(**batch, head_objective=mean_cross_entropy).loss)
        except (RuntimeError, TypeError, AttributeError) as error:
            logger.warning("The head tap failed: %s", error)
            tapped = float("nan")
        difference = abs(tapped - own)
        if difference <= atol:
            return difference
        was_full, captioner.use_full_logits = captioner.use_full_logits, True
        full = float(model(**batch, head_objective=mean_cross_entropy).loss)
    name = type(captioner.base_model).__name__
    if abs(full - tapped) <= atol:
        captioner.use_full_logits = was_full
        logger.warning(
            "SELF-CHECK: cross-entropy is %.6f, both through the head tap and from full logits, but %s itself computes "
            "a loss of %.6f. Its loss smooths, weights or shifts differently. Training uses the cross-entropy.",
            tapped,
            name,
            own,
        )
    else:
        logger.warning(
            "SELF-CHECK FAILED: cross-entropy is %.6f through the head tap, but %s itself computes a loss of %.6f. It "
            "changes the logits after the output projection. Full logits (%.6f) are used from now on: correct, but "
            "they need more time and memory.",
            tapped,
            name,
            own,
            full,
        )
    return difference
