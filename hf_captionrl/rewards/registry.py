"""Rewards by name, and rewards from what a user writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_captionrl.rewards.base import Reward, WeightedRewards
from hf_captionrl.rewards.cider import CiderReward
from hf_captionrl.rewards.diversity import PairwiseDiversity
from hf_captionrl.rewards.functions import FunctionReward, function_reward
from hf_captionrl.rewards.penalties import LengthPenalty, RepetitionPenalty, TruncationPenalty
from hf_captionrl.rewards.self_retrieval import SelfRetrieval

__all__ = ["REWARDS", "RewardLike", "resolve_rewards"]

REWARDS: dict[str, Callable[[], Reward]] = {
    kind.name: kind
    for kind in (SelfRetrieval, CiderReward, PairwiseDiversity, RepetitionPenalty, LengthPenalty, TruncationPenalty)
}
"""Rewards that a name stands for, with their default arguments."""

RewardLike = Reward | Callable[..., Any] | str
"""A reward, a function of a [`RewardContext`], a function with TRL's signature, or a name."""


def resolve_rewards(
    reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]],
    reward_weights: Sequence[float] | None = None,
) -> WeightedRewards:
    """Rewards from what a user writes: a reward, a callable, a name, or a list of them with or without weights.

    Of callables with one name, such as two lambdas, later ones are called `name_2`, `name_3`, ...

    Args:
        reward_funcs: One of them, or a list; in a list also `(reward, weight)`.
        reward_weights (`Sequence[float]`, *optional*): One each, in place of weights in the list.

    Returns:
        [`WeightedRewards`]: In the order given.

    Raises:
        ValueError: If a name is unknown, or weights are given twice.
        TypeError: If something is no reward, or a function has neither signature.
    """
    if isinstance(reward_funcs, tuple) and len(reward_funcs) == 2 and isinstance(reward_funcs[1], (int, float)):
        reward_funcs = [reward_funcs]  # one reward with its weight
    items = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    weights: list[float] = []
    rewards: list[Reward] = []
    plain: list[FunctionReward] = []
    for item in items:
        item, weight = item if isinstance(item, tuple) else (item, None)
        if weight is not None and reward_weights is not None:
            raise ValueError("Reward weights are given both in reward_funcs and in reward_weights. Give them once.")
        if isinstance(item, str):
            if item not in REWARDS:
                raise ValueError(f"There is no reward {item!r}. Use one of {sorted(REWARDS)}, or pass a callable.")
            item = REWARDS[item]()
        if not isinstance(item, Reward):
            if not callable(item) or isinstance(item, type):
                raise TypeError(
                    f"{item!r} is no reward. Pass a Reward, a function of a RewardContext, a function with TRL's signature, "
                    "or a name."
                )
            item = function_reward(item)
            plain.append(item)
        rewards.append(item)
        weights.append(1.0 if weight is None else float(weight))
    _make_unique(rewards, plain)
    return WeightedRewards(rewards, weights if reward_weights is None else reward_weights)


def _make_unique(rewards: Sequence[Reward], plain: Sequence[FunctionReward]) -> None:
    """Number the names of callables that came without one of their own; a chosen name stays."""
    made = {id(reward) for reward in plain}
    taken = {reward.name for reward in rewards if id(reward) not in made}
    for reward in plain:
        base, number = reward.name, 1
        while reward.name in taken:
            number += 1
            reward.name = f"{base}_{number}"
        taken.add(reward.name)
