"""Statistics of rollouts: logged, checked by the guard, and shown as tables of completions.

Legend: N captions, G captions per image, R rewards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from torch import Tensor

import hf_captionrl.data as caption_data
from hf_captionrl.rewards import RewardContext, SelfRetrieval, WeightedRewards
from hf_captionrl.trainers.guard import GuardCallback, over_processes, show_completions


class RolloutMonitor:
    """Collects the statistics of rollouts until they are logged, and passes each rollout to the guard.

    `held_out` is not a reward; its share of images found is compared with that of the reward scorer.
    """

    def __init__(
        self,
        rewards: WeightedRewards,
        guard: GuardCallback | None = None,
        held_out: SelfRetrieval | None = None,
    ) -> None:
        self.rewards, self.guard, self.held_out = rewards, guard, held_out
        self._values: dict[str, list[float]] = defaultdict(list)  # of each rollout, over all processes
        self._sums: dict[str, tuple[float, int]] = {}  # of this process, and the number of captions
        self._last: tuple[RewardContext, Tensor, Tensor] | None = None

    def note(self, sums: Mapping[str, float], number: int) -> None:
        """Add sums over a number of captions of this process, whose mean over captions is logged."""
        for name, value in sums.items():
            total, captions = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, captions + number)

    def record(self, context: RewardContext, rewards: Tensor, advantages: Tensor) -> dict[str, float]:
        """Record one rollout with the rewards `(N, R)` and advantages `(N,)` of all processes; returns its statistics."""
        columns = (context.captions, context.ended.tolist(), context.mask.sum(1).tolist(), context.is_empty.tolist())
        captions, ended, lengths, empty = map(list, zip(*gather_object(list(zip(*columns, strict=True))), strict=True))
        statistics = context.statistics
        if self.guard is not None and self.held_out is not None and "recall_at_1" in statistics:
            accuracies = self.held_out(replace(context, statistics={})).nan_to_num(0.0)  # (N,)
            statistics = {**statistics, "held_out": accuracies.tolist()}
        statistics = over_processes(statistics)
        accuracy = statistics.pop("held_out", None)
        total = self.rewards.total(rewards)
        step = {
            "reward": float(total.nanmean()),
            "reward_std": float(total[~total.isnan()].std(correction=0)),
            "advantage_std": float(advantages.std(correction=0)),
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/empty": sum(empty) / len(empty),
            "completions/clipped_ratio": 1 - sum(ended) / len(ended),
            **statistics,
        }
        means = zip(self.rewards.names, rewards.nanmean(0).tolist(), strict=True)
        step |= {f"rewards/{name}/mean": mean for name, mean in means if mean == mean}  # JSON has no NaN
        if context.bag_size:
            step["bag_size"] = float(context.bag_size)
        self._last = (context, rewards, advantages)
        if self.guard is not None:
            step |= self.guard.observe(
                captions,
                ended=torch.tensor(ended),
                truncated_by_scorer=statistics.get("completions/truncated_by_scorer"),
                # Shares of images found, not log-probabilities, whose scales differ between scorers.
                reward=None if accuracy is None else statistics["recall_at_1"],
                held_out_scorer=accuracy,
            )
        for name, value in step.items():
            self._values[name].append(value)
        return step

    def drain(self) -> dict[str, float]:
        """Means since the last call."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items()}
        means |= over_processes(self._sums)
        self._values.clear()
        self._sums.clear()
        return means

    def show(self, dataset: datasets.Dataset, number: int, **log: Any) -> None:
        """Print the first captions of the last rollout, and send them with their images to the trackers."""
        if self._last is None:
            return
        context, rewards, advantages = self._last
        shown = slice(min(number, len(context.captions)))
        images = [n // context.group_size for n in range(shown.stop)]
        columns = {
            "image_id": [context.image_ids[image] for image in images],
            "caption": context.captions[shown],
            "reference": [next(iter(context.references[image]), "") for image in images],
            **{f"extra/{name}": values[shown] for name, values in context.extra.items()},
            **{f"rewards/{name}": rewards[shown, r].tolist() for r, name in enumerate(self.rewards.names)},
            "advantage": advantages[shown].tolist(),
        }
        columns |= {} if context.ranks is None else {"rank": context.ranks[shown].tolist()}
        pictures = [caption_data.open_still(dataset[int(context.rows[image])]) for image in images]
        show_completions(columns, pictures, tag="completions", **log)
