"""Checks the head tap against the model's own loss on the first batch."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.head_tap import mean_cross_entropy
from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX

__all__ = ["check_tap", "first_rows"]

logger = logging.getLogger(__name__)


def first_rows(batch: dict[str, Any], number: int = 2) -> dict[str, Any]:
    """The first captions of a batch with their images; the whole batch if images are not rows, or nothing is supervised."""
    images = batch.get("image_features", batch.get("pixel_values"))
    captions = len(batch["labels"])
    if images is None or captions % len(images) or not bool((batch["labels"][:number] != IGNORE_INDEX).any()):
        return batch
    per_image = captions // len(images)
    kept = {captions: number, len(images): number}
    if per_image > 1:  # captions of one image
        kept = {captions: min(number, per_image), len(images): 1}
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    if any(len(value) not in kept for value in tensors.values()):
        return batch
    return {**batch, **{name: value[: kept[len(value)]] for name, value in tensors.items()}}


def check_tap(captioner: Any, batch: dict[str, Any], atol: float | None = None) -> float:
    """See `Captioner.self_check`."""
    model, batch = captioner.model, first_rows(batch)
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
