r"""Statistics of rollouts: logged, checked by the guard, and shown as tables of completions.

Legend: N captions of this process, G captions per image, R rewards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import datasets
import torch
from torch import Tensor

from hf_captionrl.data import open_still
from hf_captionrl.reports.completion_log import log_completions, print_completions
from hf_captionrl.rewards import FunctionReward, RewardContext, SelfRetrieval, WeightedRewards
from hf_captionrl.trainers.reward_hacking import RewardHackingGuard

__all__ = ["RolloutMonitor", "completion_rows"]


def completion_rows(
    context: RewardContext, rewards: Tensor, advantages: Tensor, names: Sequence[str], number: int
) -> list[dict[str, Any]]:
    """The first captions of a rollout with rewards `(N, R)` and advantages `(N,)`, as rows for `print_completions`."""
    rows = []
    for n in range(min(number, len(context.captions))):
        image = n // context.group_size
        rows.append(
            {
                "image_id": context.image_ids[image],
                "caption": context.captions[n],
                "reference": next(iter(context.references[image]), ""),
                "rewards": dict(zip(names, rewards[n].tolist(), strict=True)),
                "advantage": float(advantages[n]),
                "rank": None if context.ranks is None else int(context.ranks[n]),
                "extra": {name: values[n] for name, values in context.extra.items()},
            }
        )
    return rows


class RolloutMonitor:
    """Collects the statistics of rollouts until they are logged, and passes each rollout to the guard.

    `held_out` is not a reward; its share of images found is compared with that of the reward scorer.
    """

    def __init__(
        self,
        rewards: WeightedRewards,
        means_over_processes: Callable[[list[float]], list[float]],
        guard: RewardHackingGuard | None = None,
        held_out: SelfRetrieval | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.rewards = rewards
        self.means_over_processes = means_over_processes
        self.guard = guard
        self.held_out = held_out
        self.gather = gather
        self._values: dict[str, list[float]] = defaultdict(list)
        self._last: tuple[RewardContext, Tensor, Tensor] | None = None

    def note(self, named: Mapping[str, Any]) -> dict[str, float]:
        """Keep the means over processes for the next log."""
        names = sorted(named)
        means = dict(zip(names, self.means_over_processes([float(named[n]) for n in names]), strict=True))
        for name, value in means.items():
            self._values[name].append(value)
        return means

    def record(self, context: RewardContext, rewards: Tensor, advantages: Tensor) -> dict[str, float]:
        """Record one rollout with rewards `(N, R)` and advantages `(N,)`."""
        total = rewards @ torch.tensor(self.rewards.weights, dtype=rewards.dtype)
        named: dict[str, Any] = {
            "reward": total.mean(),
            "reward_std": total.std(correction=0),
            "advantage_std": advantages.std(correction=0),
            "completions/mean_length": context.mask.sum(1).double().mean(),
            "completions/empty": context.is_empty.double().mean(),
            "completions/clipped_ratio": (~context.ended).double().mean(),
            **context.statistics,
        }
        for index, name in enumerate(self.rewards.names):
            named[f"rewards/{name}/mean"] = rewards[:, index].mean()
        if context.bag_size:
            named["bag_size"] = context.bag_size
        self._last = (context, rewards, advantages)
        means = self.note(named)
        self._note_metrics(context, means)
        # The guard averages over processes itself.
        for name, value in self._watch(context).items():
            self._values[name].append(value)
        return means

    def _note_metrics(self, context: RewardContext, known: Mapping[str, float]) -> None:
        """Keep what reward functions logged; these names may differ between processes."""
        if not any(isinstance(reward, FunctionReward) for reward in self.rewards.rewards):
            return
        mine = {name: (math.fsum(values), len(values)) for name, values in context.metrics.items()}
        everyone = [mine] if self.gather is None else self.gather(mine)
        for name in sorted({name for one in everyone for name in one}):
            if name in known:
                raise ValueError(
                    f"log_metric({name!r}, ...): the trainer logs a number of this name. Use another name."
                )
            sums, counts = zip(*(one[name] for one in everyone if name in one), strict=True)
            self._values[name].append(math.fsum(sums) / sum(counts))

    def _watch(self, context: RewardContext) -> dict[str, float]:
        if self.guard is None:
            return {}
        statistics = context.statistics
        held_out_scorer = None
        if self.held_out is not None and "recall_at_1" in statistics:
            accuracy = self.held_out(replace(context, statistics={}))  # (N,)
            held_out_scorer = float(accuracy.nan_to_num(0.0).mean())
        return self.guard.observe(
            context.captions,
            ended=context.ended,
            truncated_by_scorer=statistics.get("completions/truncated_by_scorer"),
            # Shares of images found, not log-probabilities, whose scales differ between scorers.
            reward=statistics.get("recall_at_1") if held_out_scorer is not None else None,
            held_out_scorer=held_out_scorer,
            mean_over_processes=self.means_over_processes,
        )

    def drain(self) -> dict[str, float]:
        """Means since the last call."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items() if values}
        self._values.clear()
        return means

    def show(
        self,
        dataset: datasets.Dataset,
        number: int,
        *,
        step: int,
        report_to: Any = None,
        tensorboard_writer: Any | None = None,
    ) -> None:
        """Print the first captions of the last rollout, and send them with their images to the trackers."""
        if self._last is None:
            return
        context, rewards, advantages = self._last
        rows = completion_rows(context, rewards, advantages, self.rewards.names, number)
        print_completions(rows, step=step)
        if report_to:
            shown = [int(context.rows[n // context.group_size]) for n in range(len(rows))]
            images = [open_still(dataset[row]) for row in shown]
            log_completions(rows, images, step=step, report_to=report_to, tensorboard_writer=tensorboard_writer)
