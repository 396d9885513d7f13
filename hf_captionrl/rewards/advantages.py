"""Baselines of rewards, and the advantages of a rollout.

A baseline changes the variance of the policy gradient, not its mean. Exceptions: `group_mean` scales the mean by (G-1)/G,
`group_floor` changes it, and `running_mean_inclusive` contains each caption's reward (with a share that falls with the
number of rollouts). Scaling by a standard deviation also rescales it, per image or per rollout.

Legend: B images, G captions per image, N = B * G captions, R rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.rewards.base import RewardContext, WeightedRewards

_EPSILON = 1e-4  # added to standard deviations, as in TRL


class Baseline:
    """No baseline: the advantage is the reward.

    Attributes:
        per_reward: Subtract the baseline from each reward before weighting, not from the weighted sum.
        update_first: Include the current rollout in the statistics.
        needs_greedy: Needs the reward of the greedy caption.
        min_group_size: Smallest number of captions per image.
    """

    per_reward: bool = False
    update_first: bool = False
    needs_greedy: bool = False
    min_group_size: int = 1

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        """Advantages `(B, G)` of rewards `(B, G)`; `greedy` `(B,)` is the reward of the greedy caption of each image."""
        return rewards

    def update(self, mean_reward: float) -> None:
        """Add the mean reward of a rollout over all processes, after its advantages were computed."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers for a checkpoint, which JSON stores exactly."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""


class GreedyBaseline(Baseline):
    """The reward of the greedy caption of the same image (self-critical sequence training, Rennie et al. 2017)."""

    needs_greedy = True

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        assert greedy is not None
        return rewards - greedy.unsqueeze(1)


class RunningMeanBaseline(Baseline):
    """Mean of the mean rewards of all previous rollouts (DiscriTune); 0 at first.

    `update_first` includes the current rollout, as in No Detail Left Behind's code.
    """

    def __init__(self, update_first: bool = False) -> None:
        self.update_first = update_first
        self.mean = 0.0
        self.number = 0

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        return rewards - self.mean

    def update(self, mean_reward: float) -> None:
        self.number += 1
        self.mean += (float(mean_reward) - self.mean) / self.number

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.number = float(state["mean"]), int(state["number"])


class BatchMeanBaseline(Baseline):
    """Mean reward of the captions of the other images of the rollout (of this process); 0 with one image.

    A running mean lags behind when a curriculum continues with larger bags: then nearly all advantages have one sign. This
    mean has the difficulty of the same rollout.
    """

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        images, captions = rewards.shape
        others = (rewards.sum() - rewards.sum(1, keepdim=True)) / max((images - 1) * captions, 1)  # (B, 1)
        return rewards - others


class LeaveOneOutBaseline(Baseline):
    """Mean reward of the other captions of the same image (Kool et al. 2019)."""

    min_group_size = 2

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.size(1) - 1)
        return rewards - others


class GroupMeanBaseline(Baseline):
    """Mean reward of all captions of the same image."""

    min_group_size = 2

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        return rewards - rewards.mean(1, keepdim=True)


class GroupFloorBaseline(Baseline):
    """Mean reward of all captions of the same image, at least -0.5, before the reward's weight (SLE's code of 2018)."""

    per_reward = True
    min_group_size = 2

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        return rewards - rewards.mean(1, keepdim=True).clamp(min=-0.5)


BASELINES: dict[str, Callable[[], Baseline]] = {
    "none": Baseline,
    "greedy": GreedyBaseline,
    "running_mean": RunningMeanBaseline,
    "running_mean_inclusive": lambda: RunningMeanBaseline(update_first=True),
    "batch_mean": BatchMeanBaseline,
    "leave_one_out": LeaveOneOutBaseline,
    "group_mean": GroupMeanBaseline,
    "group_floor": GroupFloorBaseline,
}
"""Baselines by name."""


def make_baseline(name: str, group_size: int, *, do_sample: bool = True) -> Baseline:
    """A new baseline by its name in `BASELINES`; refused if groups are too small for it, or every advantage would be 0."""
    if name not in BASELINES:
        raise ValueError(f"There is no baseline {name!r}. Use one of {sorted(BASELINES)}.")
    baseline = BASELINES[name]()
    if group_size < baseline.min_group_size:
        raise ValueError(
            f"num_generations is {group_size}, and the baseline {name!r} needs {baseline.min_group_size}. Raise it."
        )
    if baseline.needs_greedy and not do_sample:
        raise ValueError(
            f"do_sample is False, so the baseline {name!r} makes every advantage 0. Use 'running_mean', or True."
        )
    return baseline


def compute_advantages(
    rewards: WeightedRewards,
    baselines: dict[str, Baseline],
    default: str,
    context: RewardContext,
    greedy: RewardContext | None,
    mean_over_processes: Callable[[float], float],
    *,
    scale_rewards: str = "none",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> tuple[Tensor, Tensor]:
    """Advantages `(N,)` and rewards `(N, R)` of a rollout, float64 on the CPU; baselines are updated.

    Rewards that share a baseline are summed before the baseline is subtracted. `greedy` is the rollout of the greedy
    captions, for baselines that need it. The last two arguments are those of TRL's GRPO.
    """
    values = rewards(context)  # (N, R)
    weights = torch.tensor(rewards.weights, dtype=values.dtype)
    shape = (len(context.rows), context.group_size)
    number = len(context.candidates) * context.group_size  # captions of all processes
    if multi_objective_aggregation == "normalize_then_sum":
        grouped = values.view(*shape, -1)  # (B, G, R)
        scaled = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + _EPSILON)
        rewards_sum = (scaled * weights).sum(2)  # (B, G)
        mean, deviation = _moments(rewards_sum, number, mean_over_processes)
        return ((rewards_sum - mean) / (deviation + _EPSILON)).flatten(), values
    names = [reward.baseline or default for reward in rewards.rewards]
    columns_of = {name: [i for i, other in enumerate(names) if other == name] for name in names}
    compared = [i for i, name in enumerate(names) if baselines[name].needs_greedy]
    greedy_values = rewards(greedy, only=compared) if greedy is not None and compared else None  # (B, R)
    total = torch.zeros(shape, dtype=values.dtype)
    for name, columns in columns_of.items():
        baseline = baselines[name]
        if baseline.per_reward:
            for column in columns:
                total += weights[column] * baseline(values[:, column].view(shape))
            continue
        rewards_sum = (values[:, columns] * weights[columns]).sum(1).view(shape)  # (B, G)
        greedy_sum = None
        if baseline.needs_greedy:
            assert greedy_values is not None
            greedy_sum = (greedy_values[:, columns] * weights[columns]).sum(1)  # (B,)
        mean = mean_over_processes(float(rewards_sum.mean()))
        if baseline.update_first:
            baseline.update(mean)
        total += baseline(rewards_sum, greedy_sum)
        if not baseline.update_first:
            baseline.update(mean)
    rewards_sum = (values * weights).sum(1).view(shape)
    if scale_rewards == "group":
        total = total / (rewards_sum.std(1, keepdim=True) + _EPSILON)
    elif scale_rewards == "batch":
        total = total / (_moments(rewards_sum, number, mean_over_processes)[1] + _EPSILON)
    return total.flatten(), values


def _moments(values: Tensor, number: int, mean_over_processes: Callable[[float], float]) -> tuple[float, float]:
    """Mean and standard deviation of the `number` values of all processes."""
    mean = mean_over_processes(float(values.mean()))
    square = mean_over_processes(float((values - mean).square().mean()))
    return mean, math.sqrt(square * number / max(number - 1, 1))
