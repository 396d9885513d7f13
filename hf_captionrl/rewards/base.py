r"""The interface of rewards, what they see of a rollout, and their weighted sum.

Legend: B images of this process, G captions per image, N = B * G captions, R rewards, T tokens, C images of the whole rollout.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.rewards.async_rewards import run_together

__all__ = ["Reward", "RewardContext", "RewardData", "WeightedRewards"]

logger = logging.getLogger(__name__)


@dataclass
class RewardData:
    """The training data, passed to rewards once before the first step.

    Args:
        image_ids (`Sequence[str]`): Id of each training image.
        references (`Sequence[list[str]]`): Human captions of each training image.
        image_features (`Callable`): From a scorer to its features `(num_images, D)` of all training images, cached.
        encode (`Callable`): From captions to ids and mask, both `(R, T)`, as the policy would generate them: without start
            token and prompt, with the end token.
        eos_token_id (`int`): The policy's end token.
        device (`torch.device`): Device of the training.
        scorer (`Scorer`, *optional*): The trainer's scorer, for rewards that have none.
        max_completion_length (`int`, *optional*): Longest caption in the policy's tokens, the end token included.
        has_bags (`bool`): Whether batches consist of bags.
        columns (`Sequence[str]`): Names of the columns of the training data.
    """

    image_ids: Sequence[str]
    references: Sequence[list[str]]
    image_features: Callable[[Any], Tensor]
    encode: Callable[[Sequence[str]], tuple[Tensor, Tensor]]
    eos_token_id: int
    device: torch.device
    scorer: Any | None = None
    max_completion_length: int | None = None
    has_bags: bool = False
    columns: Sequence[str] = ()


@dataclass
class RewardContext:
    """One rollout of this process; `candidates` and `bag_size` cover all processes.

    Args:
        captions (`list[str]`): N captions; the G captions of an image are adjacent.
        ids (`torch.Tensor` of shape `(N, T)`): Completions, right-padded.
        mask (`torch.Tensor` of shape `(N, T)`): True at the tokens of the caption, the end token included.
        ended (`torch.Tensor` of shape `(N,)`): False where the length limit truncated the caption.
        rows (`torch.Tensor` of shape `(B,)`): Rows of the training data, one per image.
        image_ids (`list[str]`): B ids.
        references (`list[list[str]]`): Human captions of the B images.
        candidates (`torch.Tensor` of shape `(C,)`): Rows of all images of the rollout on all processes: targets and distractors.
        positions (`torch.Tensor` of shape `(B,)`): Positions of the targets among the candidates.
        bag_size (`int`): Every `bag_size` consecutive candidates form a bag of similar images; 0 without bags.
        step (`int`): Optimizer step.
        statistics (`dict[str, float]`): Numbers that rewards log, e.g. counts of captions without a reward.
        ranks (`torch.Tensor` of shape `(N,)`, *optional*): Rank of the target among all candidates for each caption, 1 is
            best; set by a reward that ranks.
        columns (`Mapping[str, Sequence]`): Columns of the data, B values each, one per image.
        prompts (`list`, *optional*): N prompts; text, or messages in a trainer of chat models.
        completions (`list`, *optional*): N completions as lists of messages; only in a trainer of chat models.
        completion_ids (`list[list[int]]`, *optional*): Token ids of the completions, where they are known as lists.
        trainer_state (`TrainerState`, *optional*): State of the trainer.
        metrics (`dict[str, list[float]]`): Values passed to `log_metric`.
        extra (`dict[str, list]`): Columns passed to `log_extra`.
    """

    captions: list[str]
    ids: Tensor
    mask: Tensor
    ended: Tensor
    rows: Tensor
    image_ids: list[str]
    references: list[list[str]]
    candidates: Tensor
    positions: Tensor
    bag_size: int = 0
    step: int = 0
    statistics: dict[str, float] = field(default_factory=dict)
    ranks: Tensor | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    prompts: list[Any] | None = None
    completions: list[Any] | None = None
    completion_ids: list[list[int]] | None = None
    trainer_state: Any | None = None
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number with the rewards: its mean over calls, processes and the steps between two logs.

        Args:
            name (`str`): Name of the metric.
            value (`float`): Its value for this rollout.
        """
        self.metrics[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the table of completions.

        Args:
            column (`str`): Its name.
            values (`Sequence`): N values.

        Raises:
            ValueError: If there is not one value per caption.
        """
        if len(values) != len(self.captions):
            raise ValueError(
                f"log_extra({column!r}, ...) was given {len(values)} values for {len(self.captions)} captions. Pass one per "
                "caption."
            )
        self.extra[str(column)] = list(values)

    @property
    def group_size(self) -> int:
        """G, captions per image."""
        return len(self.captions) // max(len(self.rows), 1)

    @cached_property
    def is_empty(self) -> Tensor:
        """`(N,)`: captions without a letter or digit."""
        return torch.tensor([not any(c.isalnum() for c in caption) for caption in self.captions], dtype=torch.bool)


class Reward(ABC):
    """A number for each caption of a rollout; higher is better.

    The rewards of this package are dataclasses under [`register_reward`]. Their weight, and every field with a help text
    in its metadata, become arguments of [`SelfRetrievalConfig`] and [`SelfRetrievalGRPOConfig`].

    Attributes:
        name: Name in the logs.
        baseline: Name of the baseline that is subtracted; None for the trainer's. See `BASELINES`.
        summary: What is rewarded, as a noun phrase, for help texts and model cards.
        default_weight: Weight in a configuration that does not set it.
        weight_argument: Configuration argument that holds the weight; by default `{name}_weight`.
        is_standalone: Whether it may be the only reward. False for penalties, which alone would teach empty captions.
    """

    name: str = "reward"
    baseline: str | None = None
    summary: str = ""
    default_weight: float = 0.0
    weight_argument: str = ""
    is_standalone: bool = True

    def describe(self) -> str:
        """The rewards of these arguments.

        Returns:
            `str`: A noun phrase for the model card.
        """
        return self.summary or f"the reward {self.name!r}"

    def prepare(self, data: RewardData) -> None:  # noqa: B027  (most rewards need nothing)
        """Read and check the training data once, before the first step.

        Args:
            data ([`RewardData`]): The training data.
        """

    @abstractmethod
    def __call__(self, context: RewardContext) -> Tensor:
        """Reward a rollout.

        Args:
            context ([`RewardContext`]): The rollout.

        Returns:
            `torch.Tensor` of shape `(N,)`: NaN where the reward does not apply.
        """

    def undefined(self, context: RewardContext) -> float:
        """Substitute for rewards that are NaN or infinite, which are counted.

        Args:
            context ([`RewardContext`]): The rollout.

        Returns:
            `float`: 0 unless the reward has another floor.
        """
        return 0.0


class WeightedRewards:
    """A weighted sum of rewards, each logged under its name.

    Args:
        rewards (`Sequence[Reward]`): The rewards.
        weights (`Sequence[float]`, *optional*): One per reward; 1 by default.

    Raises:
        ValueError: If there is no reward, the numbers of rewards and weights differ, a weight is not finite, or two
            rewards have the same name.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
        self.rewards = list(rewards)
        self.weights = [1.0] * len(self.rewards) if weights is None else [float(weight) for weight in weights]
        if not self.rewards:
            raise ValueError("There is no reward. Pass reward_funcs, e.g. reward_funcs='self_retrieval'.")
        if len(self.weights) != len(self.rewards):
            raise ValueError(
                f"{len(self.weights)} reward weights for {len(self.rewards)} rewards. Pass one per reward."
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"The reward weights are {self.weights}. Use finite numbers.")
        self._has_warned = False
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(
                f"Two rewards have the same name: {names}. Set the attribute `name` of one of them; for a function use "
                "FunctionReward(function, name=...) or CompletionReward(function, name=...)."
            )

    @property
    def names(self) -> list[str]:
        """Names in order."""
        return [reward.name for reward in self.rewards]

    def describe(self) -> str:
        """The rewards with a weight other than 0.

        Returns:
            `str`: Noun phrases with weights, for the model card.
        """
        return ", plus ".join(
            reward.describe() if weight == 1 else f"{weight:g} times {reward.describe()}"
            for reward, weight in zip(self.rewards, self.weights, strict=True)
            if weight
        )

    def prepare(self, data: RewardData) -> None:
        """Let every reward read the training data.

        Args:
            data ([`RewardData`]): The training data.
        """
        for reward in self.rewards:
            reward.prepare(data)

    def __call__(self, context: RewardContext, only: Sequence[int] | None = None) -> Tensor:
        """All rewards of a rollout, unweighted.

        Args:
            context ([`RewardContext`]): The rollout.
            only (`Sequence[int]`, *optional*): Compute these; the other columns are 0.

        Returns:
            `torch.Tensor` of shape `(N, R)`: float64 on the CPU, finite.

        Raises:
            ValueError: If a reward does not return one number per caption.
        """
        columns, missing, has_infinite = [], [], False
        found = self._values(context, range(len(self.rewards)) if only is None else only)
        for index, reward in enumerate(self.rewards):
            if index not in found:
                columns.append(torch.zeros(len(context.captions), dtype=torch.float64))
                continue
            values = found[index].detach().double().cpu()
            if values.shape != (len(context.captions),):
                raise ValueError(
                    f"The reward {reward.name!r} returned shape {tuple(values.shape)} for {len(context.captions)} "
                    "captions. Return one number per caption."
                )
            bad = ~values.isfinite()
            has_infinite |= bool(values.isinf().any())
            if bad.any():
                values = torch.where(bad, reward.undefined(context), values)
            context.statistics[f"rewards/{reward.name}/undefined"] = float(bad.sum())
            columns.append(values)
            missing.append(bad)
        if only is None:
            self._check_rewarded(
                context, torch.stack(missing, dim=1).all(1), "None, NaN or infinity" if has_infinite else "None or NaN"
            )
        return torch.stack(columns, dim=1)

    def _values(self, context: RewardContext, wanted: Sequence[int]) -> dict[int, Tensor]:
        """What the rewards return, by index; asynchronous functions run concurrently, after the others."""
        later = [i for i in wanted if getattr(self.rewards[i], "is_async", False)]
        found = {i: self.rewards[i](context) for i in wanted if i not in later}
        functions: list[Any] = [self.rewards[i] for i in later]
        answers = run_together([function.call(context) for function in functions])
        return found | {i: f.read(answer) for i, f, answer in zip(later, functions, answers, strict=True)}

    def _check_rewarded(self, context: RewardContext, unrewarded: Tensor, returned: str) -> None:
        """Warn about captions without a number from any reward, `(N,)`; only once if that is every caption of a rollout."""
        has_floor = any(type(reward).undefined is not Reward.undefined for reward in self.rewards)
        if has_floor or not unrewarded.any():
            return
        if unrewarded.all():
            # As in TRL: with several tasks, a process may hold images of a task without a reward.
            if not self._has_warned:
                logger.warning(
                    "No reward returned a number for any of the %d captions of this rollout: %s returned %s for all of them. "
                    "They count as 0, from which nothing is learned. Return a number for at least one caption. This warning "
                    "is not repeated.",
                    len(unrewarded),
                    self.names,
                    returned,
                )
            self._has_warned = True
            return
        first = int(unrewarded.nonzero()[0])
        image = context.image_ids[first // context.group_size]
        logger.warning(
            "%d of %d captions got %s from every reward (%s) and count as 0; the first is %r of the image %r.",
            int(unrewarded.sum()),
            len(unrewarded),
            returned,
            ", ".join(self.names),
            context.captions[first],
            image,
        )
