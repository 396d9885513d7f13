"""Rewards by name, and rewards from what a user passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hf_captionrl.rewards.base import Reward, WeightedRewards
from hf_captionrl.rewards.trl_reward_functions import FunctionReward, function_reward

__all__ = ["REWARDS", "RewardLike", "register_reward", "resolve_rewards"]

_RewardType = TypeVar("_RewardType", bound=type[Reward])

REWARDS: dict[str, type[Reward]] = {}
"""Registered rewards by name: first those that may stand alone, then by their default weights."""

RewardLike = Reward | Callable[..., Any] | str
"""A reward, a function of a [`RewardContext`], a function with TRL's signature, or a name."""


def register_reward(reward: _RewardType) -> _RewardType:
    """Class decorator: make a reward known by its name, and an argument of the self-retrieval configurations.

    Args:
        reward: A dataclass, a subclass of [`Reward`], with a default for each field, a `name` and a `summary`.

    Returns:
        The class.

    Raises:
        TypeError: If it is not such a dataclass.
        ValueError: If another class has the name.
    """
    if not dataclasses.is_dataclass(reward) or not reward.summary:
        raise TypeError(f"{reward.__name__} is not a dataclass with a summary. Use @dataclass below @register_reward.")
    known = REWARDS.get(reward.name)
    if known is not None and known.__qualname__ != reward.__qualname__:
        raise ValueError(f"{known.__name__} has the name {reward.name!r}. Use another name for {reward.__name__}.")
    if not reward.weight_argument:
        reward.weight_argument = f"{reward.name}_weight"
    REWARDS[reward.name] = reward
    # Weighted sums add up in this order, so a new file must not change that of the others.
    ordered = sorted(REWARDS.values(), key=lambda r: (not r.is_standalone, -r.default_weight))
    REWARDS.clear()
    REWARDS.update({r.name: r for r in ordered})
    return reward


def resolve_rewards(
    reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]],
    reward_weights: Sequence[float] | None = None,
) -> WeightedRewards:
    """Weighted rewards from a reward, a callable, a name, or a list of them with or without weights.

    Callables with the same name, such as two lambdas, are numbered: `name`, `name_2`, `name_3`, ...

    Args:
        reward_funcs: One of them, or a list; a list may hold pairs `(reward, weight)`.
        reward_weights (`Sequence[float]`, *optional*): One per reward, instead of weights in the list.

    Returns:
        [`WeightedRewards`]: In the order given.

    Raises:
        ValueError: If a name is unknown, or weights are given twice.
        TypeError: If an item is not a reward, or a function has neither signature.
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
            raise ValueError("Reward weights are given both in reward_funcs and in reward_weights. Pass them once.")
        if isinstance(item, str):
            if item not in REWARDS:
                raise ValueError(f"There is no reward {item!r}. Use one of {sorted(REWARDS)}, or pass a callable.")
            item = REWARDS[item]()
        if not isinstance(item, Reward):
            if not callable(item) or isinstance(item, type):
                raise TypeError(
                    f"{item!r} is not a reward. Pass a Reward, a function of a RewardContext, a function with TRL's signature, "
                    "or a name."
                )
            item = function_reward(item)
            plain.append(item)
        rewards.append(item)
        weights.append(1.0 if weight is None else float(weight))
    _make_unique(rewards, plain)
    return WeightedRewards(rewards, weights if reward_weights is None else reward_weights)


def _make_unique(rewards: Sequence[Reward], plain: Sequence[FunctionReward]) -> None:
    """Number equal names of callables; names that the user chose stay."""
    made = {id(reward) for reward in plain}
    taken = {reward.name for reward in rewards if id(reward) not in made}
    for reward in plain:
        base, number = reward.name, 1
        while reward.name in taken:
            number += 1
            reward.name = f"{base}_{number}"
        taken.add(reward.name)
