"""REINFORCE and the clipped policy gradient, as a pure function of per-token log-probabilities.

Legend: N captions, T tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

LossType = Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "sum"]
"""How the terms of the tokens are added up, with TRL's names: `"grpo"`, the mean over the tokens of each caption, then over
captions (DiscriTune's code); `"dapo"`, the sum divided by the tokens of the whole step (SLE's code); `"dr_grpo"`, the sum
divided by captions times the maximum length; `"bnpo"`, the sum divided by the tokens of the micro-batch; and `"sum"`, the sum
divided by captions (the papers' formulas). `"cispo"` adds up as `"dapo"`, `"sapo"` as `"grpo"`, with another ratio."""

LOSS_TYPES: tuple[str, ...] = get_args(LossType)
_SAPO_TEMPERATURES = (1.0, 1.05)  # for positive and other advantages, as in the paper (arXiv 2511.20347)
_MAX_EXPONENT = 60.0  # nats: e^60 = 1e26 can still be multiplied and summed in fp32, where exp overflows at 88


def _exp(difference: Tensor) -> Tensor:
    """`exp`, continued linearly above `_MAX_EXPONENT`: infinity times a gradient of 0 would make every weight NaN."""
    near = difference.clamp(max=_MAX_EXPONENT)
    return near.exp() * (1 + (difference - near))


def _weights(mask: Tensor, loss_type: str, dtype: torch.dtype) -> Tensor:
    """`(N, T)` weight of each token in its caption, in fp32 or higher."""
    weights = mask.to(torch.promote_types(dtype, torch.float32))
    if loss_type == "bnpo":
        return weights * (len(mask) / weights.sum().clamp(min=1))
    return weights / weights.sum(1, keepdim=True).clamp(min=1) if loss_type in ("grpo", "sapo") else weights


def loss_normalizer(mask: Tensor, loss_type: LossType, max_completion_length: int | None = None) -> Tensor | int:
    """Z of [`policy_gradient_loss`]: captions, tokens, or captions times their maximum length; `mask` is `(N, T)`."""
    if loss_type in ("dapo", "cispo"):
        return mask.sum().clamp(min=1)
    if loss_type != "dr_grpo":
        return max(len(mask), 1)
    if max_completion_length is None:
        raise ValueError("loss_type='dr_grpo' divides by max_completion_length, which is None. Pass it.")
    return max(len(mask), 1) * max_completion_length


def policy_gradient_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType = "grpo",
    old_log_probs: Tensor | None = None,
    epsilon: float | None = None,
    epsilon_high: float | None = None,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    entropy: Tensor | None = None,
    entropy_weight: float = 0.0,
    normalizer: Tensor | float | None = None,
    max_completion_length: int | None = None,
) -> dict[str, Tensor]:
    r"""Surrogate loss whose gradient is the policy gradient.

    Reference: Williams 1992 (REINFORCE); Dessi et al. 2023, Eq. 1; Schulman et al. 2017, Eq. 7, for the clipped ratio.
    With `w` the weight of a token (see `LossType`), `A` its advantage, in the papers that of its caption, and `Z` the normaliser:
    `loss = -1/Z sum_nt w_nt [A_nt log p_nt - beta k_nt + entropy_weight H_nt]`. With `old_log_probs`,
    `A log p` becomes `min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, where `r = p / p_old`; with `"cispo"`
    `min(r, epsilon_high) A log p`, whose ratio has no gradient, and with `"sapo"` `4 A sigmoid(u (r - 1)) / u`, where `u` is
    1 for positive and 1.05 for other advantages. `k = exp(d) - d - 1` with
    `d = log p_ref - log p` is an unbiased, non-negative estimate of KL(p, p_ref) from the sampled token. The sampling
    itself is not differentiated, so that the gradient of `k` is that of KL(p_ref, p), as in GRPO.

    Args:
        log_probs (`torch.Tensor` of shape `(N, T)`): Log-probability of each token under the policy, with gradient.
        advantages (`torch.Tensor` of shape `(N,)` or `(N, T)`): Reward minus baseline of each caption, or an advantage of each
            token; not differentiated.
        mask (`torch.Tensor` of shape `(N, T)`): True at the tokens of the caption, including the end token.
        loss_type: Way of adding up the tokens, see `LossType`.
        old_log_probs (`torch.Tensor` of shape `(N, T)`, *optional*): Log-probabilities under the sampling policy.
        epsilon (`float`, *optional*): Range of the clipped ratio; None does not clip.
        epsilon_high (`float`, *optional*): Upper range, by default `epsilon`; with `"cispo"` the largest ratio, by default unbounded.
        ref_log_probs (`torch.Tensor` of shape `(N, T)`, *optional*): Log-probabilities under the reference model.
        beta (`float`): Weight of the KL penalty.
        entropy (`torch.Tensor` of shape `(N, T)`, *optional*): Entropy of the distribution of each token, in nats.
        entropy_weight (`float`): Weight of the entropy bonus.
        normalizer (`torch.Tensor` or `float`, *optional*): Z: number of captions (`"dapo"`: tokens; `"dr_grpo"`: captions
            times `max_completion_length`) of the whole optimizer step, if this batch is a part of it. By default those of this batch.
        max_completion_length (`int`, *optional*): For `loss_type="dr_grpo"` without a normalizer.

    Returns:
        `dict`: The scalar `loss`, and where they apply `kl`, `entropy` and `clipped_share`: detached sums over
        captions of token means.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}. Use one of {LOSS_TYPES}.")
    if log_probs.ndim != 2 or log_probs.shape != mask.shape:
        raise ValueError(f"log_probs {tuple(log_probs.shape)} and mask {tuple(mask.shape)} must both be (N, T).")
    if advantages.shape not in (log_probs.shape[:1], log_probs.shape):
        shapes = f"({len(log_probs)},), one per caption, or {tuple(log_probs.shape)}, one per token"
        raise ValueError(f"advantages must be {shapes}. Got {tuple(advantages.shape)}.")
    for name, value, weight in (
        ("old_log_probs", old_log_probs, 0.0),
        ("ref_log_probs", ref_log_probs, beta),
        ("entropy", entropy, entropy_weight),
    ):
        if weight and value is None:
            raise ValueError(f"A weight of {weight} needs {name}. Pass it, or set the weight to 0.")
        if value is not None and value.shape != log_probs.shape:
            raise ValueError(f"{name} must be {tuple(log_probs.shape)}, as log_probs. Got {tuple(value.shape)}.")
    mask = mask.bool()
    weights = _weights(mask, loss_type, log_probs.dtype)  # (N, T)
    means = _weights(mask, "grpo", log_probs.dtype)
    if normalizer is None:
        normalizer = loss_normalizer(mask, loss_type, max_completion_length)
    # Half precision would round the advantages and overflow at e^11.
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    advantage = advantages.detach().to(dtype)
    advantage = (
        advantage.unsqueeze(1) if advantage.ndim == 1 else torch.where(mask, advantage, 0.0)
    )  # (N, 1) or (N, T)
    named: dict[str, Tensor] = {}

    # Clear padding first: after an exponential, NaN and -inf give NaN gradients even if the result is not used.
    log_probs = torch.where(mask, log_probs, 0.0).to(dtype)
    if old_log_probs is None:
        gain = advantage * log_probs
    else:
        ratio = _exp(log_probs - torch.where(mask, old_log_probs, 0.0))
        gain = ratio * advantage
        if loss_type == "cispo":
            bound = torch.inf if epsilon_high is None else epsilon_high
            gain = ratio.clamp(max=bound).detach() * advantage * log_probs
        elif loss_type == "sapo":
            sharpness = torch.where(advantage > 0, *_SAPO_TEMPERATURES)
            gain = torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * advantage
        elif epsilon is not None:
            high = epsilon if epsilon_high is None else epsilon_high
            clipped = ratio.clamp(1 - epsilon, 1 + high) * advantage
            named["clipped_share"] = ((clipped < gain).float() * means).sum().detach()
            gain = torch.minimum(gain, clipped)
    if ref_log_probs is not None:
        difference = torch.where(mask, ref_log_probs, 0.0) - log_probs
        penalty = _exp(difference) - difference - 1
        named["kl"] = (penalty * means).sum().detach()
        gain = gain - beta * penalty
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0.0)
        named["entropy"] = (entropy * means).sum().detach()
        if entropy_weight:
            gain = gain + entropy_weight * entropy
    named["loss"] = -(gain * weights).sum() / normalizer
    return named
