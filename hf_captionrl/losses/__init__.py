"""Losses as pure functions of tensors: no model, no config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX, linear_log_probs  # not the module of the same name
from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.losses.policy_gradient import policy_gradient_loss
    from hf_captionrl.losses.smile import fused_smile_loss, shift_first_token, smile_loss

__getattr__, __all__ = lazy_names(__name__)
__all__ += ["IGNORE_INDEX", "linear_log_probs"]
