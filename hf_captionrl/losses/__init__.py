"""Losses as pure functions of tensors: no model, no config."""

from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX, linear_log_probs
from hf_captionrl.losses.policy_gradient import caption_log_probs, policy_gradient_loss
from hf_captionrl.losses.smile import fused_smile_loss, shift_first_token, smile_loss

__all__ = [
    "IGNORE_INDEX",
    "caption_log_probs",
    "fused_smile_loss",
    "linear_log_probs",
    "policy_gradient_loss",
    "shift_first_token",
    "smile_loss",
]
