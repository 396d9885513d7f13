r"""Penalties on what a caption looks like, whatever it says: remedies against hacked rewards.

Legend: N captions, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_captionrl.rewards.base import Reward, RewardContext
from hf_captionrl.text.ngrams import TokenBatch, count_ngrams, distinct_share

__all__ = ["LengthPenalty", "RepetitionPenalty", "TruncationPenalty", "repeated_share"]


def repeated_share(ids: Tensor, mask: Tensor, order: int = 2) -> Tensor:
    """Which share of the n-grams of each caption stood in it before.

    Args:
        ids (`torch.Tensor` of shape `(N, T)`): Completions.
        mask (`torch.Tensor` of shape `(N, T)`): True at the tokens of the caption.
        order (`int`): n.

    Returns:
        `torch.Tensor` of shape `(N,)`: float64 in [0, 1); 0 for captions shorter than n.
    """
    batch = TokenBatch.from_ids(ids, mask)
    counts = count_ngrams(batch, order, torch.arange(len(batch), device=ids.device))
    share = distinct_share(counts, order, len(batch), per="ngrams")
    return torch.where(counts.totals()[:, order - 1] > 0, 1 - share, 0.0)


class RepetitionPenalty(Reward):
    """Minus the share of a caption's n-grams that it has already said, in [-1, 0].

    Args:
        order (`int`): n; 2 also finds single words said twice in a row, three times.

    Raises:
        ValueError: If the order is below 1.
    """

    name = "repetition"

    def __init__(self, order: int = 2) -> None:
        if order < 1:
            raise ValueError(f"order is {order}. Use 1 for words, 2 for pairs, and so on.")
        self.order = order

    def __call__(self, context: RewardContext) -> Tensor:
        return -repeated_share(context.ids, context.mask, self.order)


class LengthPenalty(Reward):
    """Minus the tokens beyond a limit, as a share of the limit; 0 within it.

    Args:
        max_tokens (`int`): Longest caption that costs nothing, the end token included.

    Raises:
        ValueError: If it is below 1.
    """

    name = "length"

    def __init__(self, max_tokens: int = 30) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}. Use at least 1.")
        self.max_tokens = max_tokens

    def __call__(self, context: RewardContext) -> Tensor:
        return -(context.mask.sum(1) - self.max_tokens).clamp(min=0).double() / self.max_tokens


class TruncationPenalty(Reward):
    """-1 for a caption that the length limit cut, 0 for one that ended by itself."""

    name = "truncation"

    def __call__(self, context: RewardContext) -> Tensor:
        return -(~context.ended).double()
