"""The arguments of a configuration that come from rewards: the weight of each reward, and its fields with a help text."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, ClassVar

from hf_captionrl.rewards.base import Reward

__all__ = ["RewardArguments", "reward_arguments"]


class RewardArguments:
    """Base class of configurations that make rewards from their fields."""

    reward_types: ClassVar[tuple[type[Reward], ...]] = ()

    def reward_weight(self, reward: type[Reward]) -> float:
        """Weight of a reward; 0 leaves it out."""
        return getattr(self, reward.weight_argument)

    def make_rewards(self, **given: Any) -> list[tuple[Reward, float]]:
        """The rewards with a weight above 0, and their weights; `given` replaces fields of the rewards by name."""
        weighted = [(reward, self.reward_weight(reward)) for reward in self.reward_types]
        return [(self._make(reward, given), weight) for reward, weight in weighted if weight]

    def _make(self, reward: type[Reward], given: dict[str, Any]) -> Reward:
        values = {field.name: getattr(self, field.name) for field in _arguments(reward)}
        names = {field.name for field in dataclasses.fields(reward)}  # type: ignore[arg-type]
        return reward(**values | {name: value for name, value in given.items() if name in names})

    def check_rewards(self) -> None:
        """Refuse values that a reward does not accept, and weights that are all 0."""
        for reward in self.reward_types:
            self._make(reward, {})
            weight = self.reward_weight(reward)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{reward.weight_argument} is {weight}. Use 0 or more.")
        # A configuration may compute its weights from another field, as SLE's alpha.
        alone = [r.weight_argument for r in self.reward_types if r.is_standalone and hasattr(self, r.weight_argument)]
        if alone and not any(getattr(self, name) for name in alone):
            names = " and ".join(alone)
            raise ValueError(f"{names} are all 0, so that nothing is rewarded. Set one of them above 0.")


def reward_arguments(rewards: Iterable[type[Reward]], *, weights: bool = True) -> Any:
    """A dataclass with the arguments of rewards, a base of a configuration; `weights` adds a field per weight."""
    rewards = tuple(rewards)
    made: dict[str, tuple[str, Any, Any]] = {}
    for reward in rewards:
        if weights:
            text = f"Weight of {reward.summary}; 0 leaves it out."
            weight = dataclasses.field(default=reward.default_weight, metadata={"help": text})
            made[reward.weight_argument] = (reward.weight_argument, float, weight)
        for field in _arguments(reward):
            if field.name in made:
                raise TypeError(f"Two rewards have an argument {field.name!r}. Rename that of {reward.__name__}.")
            # The command line gives a value of the default's type, whatever else Python programs may pass.
            hint = type(field.default) if field.default is not None else typing.get_type_hints(reward)[field.name]
            copied = dataclasses.field(default=field.default, metadata=field.metadata)
            made[field.name] = (field.name, hint, copied)
    namespace = {"reward_types": rewards, "__doc__": "Arguments of the rewards."}
    return dataclasses.make_dataclass("_RewardFields", made.values(), bases=(RewardArguments,), namespace=namespace)


def _arguments(reward: type[Reward]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(reward) if "help" in field.metadata]  # type: ignore[arg-type]
