r"""Penalties on the form of a caption, against reward hacking.

Legend: N captions, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_captionrl.rewards.base import Reward, RewardContext
from hf_captionrl.rewards.registry import register_reward
from hf_captionrl.text.ngrams import TokenBatch, count_ngrams, distinct_share

__all__ = ["LengthPenalty", "RepetitionPenalty", "TruncationPenalty", "repeated_share"]


def repeated_share(ids: Tensor, mask: Tensor, order: int = 2) -> Tensor:
    """Share of the n-grams of each caption that occurred in it before.

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


@register_reward
@dataclass(eq=False)
class RepetitionPenalty(Reward):
    """Minus the share of a caption's n-grams that occurred in it before, in [-1, 0].

    Args:
        order (`int`): n; 2 also finds a word that occurs three times in a row.

    Raises:
        ValueError: If the order is below 1.
    """

    name = "repetition"
    summary = "the penalty on repetition"
    is_standalone = False

    order: int = 2

    def __post_init__(self) -> None:
        if self.order < 1:
            raise ValueError(f"order is {self.order}. Use 1 for words, 2 for pairs, and so on.")

    def __call__(self, context: RewardContext) -> Tensor:
        return -repeated_share(context.ids, context.mask, self.order)


@register_reward
@dataclass(eq=False)
class LengthPenalty(Reward):
    """Minus the tokens beyond a limit, as a share of the limit; 0 within it.

    Raises:
        ValueError: If the limit is below 1.
    """

    name = "length"
    summary = "the penalty on tokens beyond max_tokens"
    is_standalone = False

    max_tokens: int = field(
        default=30, metadata={"help": "Longest caption without a length penalty, in tokens, the end token included."}
    )

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}. Use at least 1.")

    def describe(self) -> str:
        return f"the penalty on tokens beyond the {self.max_tokens}th"

    def __call__(self, context: RewardContext) -> Tensor:
        return -(context.mask.sum(1) - self.max_tokens).clamp(min=0).double() / self.max_tokens


@register_reward
@dataclass(eq=False)
class TruncationPenalty(Reward):
    """-1 for a caption that the length limit truncated, 0 for one with an end token."""

    name = "truncation"
    summary = "the penalty on truncated captions"
    is_standalone = False

    def __call__(self, context: RewardContext) -> Tensor:
        return -(~context.ended).double()
