"""The first-batch check of the head tap against the model's own loss."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.head_tap import mean_cross_entropy

__all__ = ["check_tap"]

logger = logging.getLogger(__name__)


def check_tap(captioner: Any, batch: dict[str, Any], atol: float | None = None) -> float:
    """Compare cross-entropy through the tap with the model's own loss; if they differ, switch to full logits.

    Args:
        atol (`float`, *optional*): Largest difference in nats; by default 1e-3 in fp32 and 0.05 in 16 bits.
    """
    model = captioner.model
    if atol is None:
        half = torch.is_autocast_enabled(captioner.device.type) or next(model.parameters()).element_size() < 4
        atol = 0.05 if half else 1e-3
    with evaluating(model), torch.no_grad():  # dropout would make any two forwards differ
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
            "SELF-CHECK: cross-entropy is %.6f, through the head tap and from the full logits, but the own loss of %s "
            "is %.6f. It smooths, weighs or shifts differently; training uses the former.",
            tapped,
            name,
            own,
        )
    else:
        logger.warning(
            "SELF-CHECK FAILED: cross-entropy is %.6f through the head tap, but the own loss of %s is %.6f. Something "
            "follows its output projection. From now on full logits are used (%.6f): slower and larger, but right.",
            tapped,
            name,
            own,
            full,
        )
    return difference
