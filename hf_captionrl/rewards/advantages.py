"""Baselines of rewards, and the advantages of a rollout.

A baseline changes the variance of the policy gradient, not its mean. Exceptions: `group_mean` scales the mean by (G-1)/G,
`group_floor` changes it, and `running_mean_inclusive` contains each caption's reward (with a share that falls with the
number of rollouts). Scaling by a standard deviation also rescales it, per image or per rollout.

A caption without a reward is NaN: it leaves the baseline of the others, and its advantage is 0, as that of a caption with nothing
to compare it with. Everything is of the whole rollout.

Legend: B images of all processes, G captions per image, N = B * G captions, R rewards.
"""

from __future__ import annotations

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
    """Mean reward of the captions of the other images of the rollout; 0 with one image.

    A running mean lags behind when a curriculum continues with larger bags: then nearly all advantages have one sign. This
    mean has the difficulty of the same rollout.
    """

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        sums, numbers = rewards.nansum(1, keepdim=True), (~rewards.isnan()).sum(1, keepdim=True)  # (B, 1)
        return rewards - (sums.sum() - sums) / (numbers.sum() - numbers).clamp(min=1)


class LeaveOneOutBaseline(Baseline):
    """Mean reward of the other captions of the same image (Kool et al. 2019)."""

    min_group_size = 2

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        others = rewards.nansum(1, keepdim=True) - rewards  # (B, G)
        return rewards - others / ((~rewards.isnan()).sum(1, keepdim=True) - 1)


class GroupMeanBaseline(Baseline):
    """Mean reward of all captions of the same image."""

    min_group_size = 2

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        return rewards - rewards.nanmean(1, keepdim=True)


class GroupFloorBaseline(Baseline):
    """Mean reward of all captions of the same image, at least -0.5, before the reward's weight (SLE's code of 2018)."""

    per_reward = True
    min_group_size = 2

    def __call__(self, rewards: Tensor, greedy: Tensor | None = None) -> Tensor:
        return rewards - rewards.nanmean(1, keepdim=True).clamp(min=-0.5)


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
    gather: Callable[[Tensor], Tensor],
    *,
    scale_rewards: str = "none",
) -> tuple[Tensor, Tensor]:
    """Advantages `(N,)` and rewards `(N, R)` of the whole rollout, float64 on the CPU; baselines are updated.

    Rewards that share a baseline are summed before the baseline is subtracted. `greedy` is the rollout of the greedy
    captions, for baselines that need it. `gather` joins the rows of all processes. `scale_rewards` is that of TRL's GRPO.
    """
    values = gather(rewards(context))  # (N, R)
    rewards.refuse_unscored(values)
    grouped = values.view(-1, context.group_size, values.size(1))  # (B, G, R)
    names = [reward.baseline or default for reward in rewards.rewards]
    columns_of = {name: [i for i, other in enumerate(names) if other == name] for name in names}
    compared = [i for i, name in enumerate(names) if baselines[name].needs_greedy]
    greedy_values = gather(rewards(greedy, only=compared)) if greedy is not None and compared else None  # (B, R)
    advantages = torch.zeros(grouped.shape[:2], dtype=values.dtype)
    for name, columns in columns_of.items():
        baseline = baselines[name]
        if baseline.per_reward:
            for column in columns:
                advantages += (rewards.weights[column] * baseline(grouped[..., column])).nan_to_num(0.0)
            continue
        rewards_sum = rewards.total(grouped, columns)  # (B, G)
        greedy_sum = None if greedy_values is None else rewards.total(greedy_values, columns)  # (B,)
        mean = float(rewards_sum.nanmean())  # NaN if none of these rewards scored a caption
        if baseline.update_first and mean == mean:
            baseline.update(mean)
        advantages += baseline(rewards_sum, greedy_sum).nan_to_num(0.0)
        if not baseline.update_first and mean == mean:
            baseline.update(mean)
    if scale_rewards != "none":
        dims = 1 if scale_rewards == "group" else (0, 1)
        advantages = (advantages / (_nanstd(rewards.total(grouped), dims) + _EPSILON)).nan_to_num(0.0)
    return advantages.flatten(), values


def _nanstd(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Standard deviation of the numbers among the values, as in TRL: NaN for fewer than two."""
    square = (values - values.nanmean(dims, keepdim=True)).square().nansum(dims, keepdim=True)
    return (square / ((~values.isnan()).sum(dims, keepdim=True) - 1)).sqrt()
