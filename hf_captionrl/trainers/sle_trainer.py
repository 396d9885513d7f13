"""Sequence-level exploration: rewards for captions that match the references and differ from each other."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import datasets
import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.losses.policy_gradient import LossType
from hf_captionrl.rewards import CiderReward, PairwiseDiversity, Reward, RewardLike
from hf_captionrl.rewards.base import make_reward
from hf_captionrl.rewards.text_rewards import CiderOptions, DiversityOptions
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLConfig, CaptionRLTrainer
from hf_captionrl.trainers.smile_trainer import SmileObjective
from hf_captionrl.utils.options import Fraction, NotNegative, Range, check_values, documented


@dataclass
class SLEConfig(DiversityOptions, CiderOptions, CaptionRLConfig):
    r"""Arguments of [`SLETrainer`]; defaults are those of Chen and Jin 2020, Section 5.1, where the paper names them.

    `alpha=1` is self-critical sequence training (the paper's SLL), with `entropy_weight` SLL-ME. Only what differs from
    [`CaptionRLConfig`] is listed. Where the paper and the authors' code differ, a field names both.
    """

    alpha: Fraction = documented(
        0.75, "Weight of CIDEr-D in Eq. 8; 1 - alpha is that of diversity. The paper: 0.25, 0.5 or 0.75."
    )
    rl_start_epoch: NotNegative = documented(
        0, "M of Algorithm 1: epochs of cross-entropy on the references before the rewards."
    )
    xe_learning_rate: Annotated[float, Range(above=0)] | None = documented(
        None, "Learning rate of the epochs of cross-entropy. None: learning_rate."
    )

    num_generations: int = documented(5, "s, captions sampled for each image in training.")
    baseline: str | None = documented(
        "greedy", "Baseline of CIDEr-D; diversity has another, the mean over the captions."
    )
    loss_type: LossType = documented(
        "dapo",
        "'dapo' (the code): summed over captions and tokens, divided by all tokens of the batch; 'sum': Eq. 16 as "
        "printed.",
    )
    learning_rate: float = documented(
        1e-5, "Learning rate, measured on photographs. The paper gives none; No Detail Left Behind has 1e-6 for CIDEr."
    )
    num_train_epochs: float = documented(10, "N of Algorithm 1: all epochs, cross-entropy included.")
    per_device_train_batch_size: int = documented(20, "Images per device and step; s captions are sampled for each.")
    generation_num_beams: int = documented(5, "Number of beams in evaluation.")

    def make_rewards(self) -> list[tuple[Reward, float]]:
        """CIDEr-D and diversity with a weight above 0."""
        diversity = make_reward(PairwiseDiversity, self)
        rewards = [(make_reward(CiderReward, self), self.alpha), (diversity, 1.0 - self.alpha)]
        return [(reward, weight) for reward, weight in rewards if weight]

    def __post_init__(self) -> None:
        check_values(self)
        least = 3 if self.diversity == "unbiased" else 2
        if self.alpha < 1.0 and self.num_generations < least:
            raise ValueError(
                f"num_generations is {self.num_generations}. Use {least} or more (the paper: 5), or alpha=1."
            )
        self.make_rewards()
        if self.alpha < 1.0 and self.num_generations == 2 and self.diversity == "pairwise":
            warnings.warn(
                "With num_generations=2 both captions of an image are equally far from each other, so the diversity "
                "advantage is 0 ('bleu34': wherever both are equally long). Use 3 or more.",
                stacklevel=2,
            )
        if self.rl_start_epoch and self.num_iterations > 1:
            raise ValueError(
                f"num_iterations={self.num_iterations} would repeat the batches of rl_start_epoch. Use 1, or a separate run."
            )
        super().__post_init__()


class SLETrainer(CaptionRLTrainer):
    r"""Finetunes a captioner with CIDEr-D and the distances between its samples.

    Reference: Chen and Jin 2020, "Better Captioning with Sequence-Level Exploration", Eq. 14-16 and Algorithm 1. Of s
    captions of an image, caption j adds
    `-alpha (CIDEr(y_j) - CIDEr(greedy)) log p(y_j) - (1 - alpha) (2/s) (sum_k d(y_j, y_k) - 1/s sum_ik d(y_i, y_k)) log p(y_j)`.
    The first `rl_start_epoch` epochs train by cross-entropy on the references instead.

    The arguments are those of [`CaptionRLTrainer`], with a [`SLEConfig`], and:

    Args:
        reward_funcs (*optional*): Instead of the configured rewards.

    Example:
        >>> trainer = SLETrainer("Salesforce/blip-image-captioning-base", SLEConfig("out"), train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SLEConfig
    config_class = SLEConfig
    method_name = "SLE"

    def __init__(
        self,
        model: Captioner | Any | None = None,
        args: SLEConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | None = None,
        *,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        args = self._resolve_args(model, args)
        if reward_funcs is None:
            reward_funcs = args.make_rewards()
        super().__init__(model, reward_funcs, args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)

    # Cross-entropy first

    @property
    def rl_start_step(self) -> int:
        """First optimizer step with rewards; the same in a resumed run."""
        return self.args.rl_start_epoch * len(self.batch_sampler) if self.args.rl_start_epoch else 0

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        # xe_learning_rate replaces learning_rate before the switch.
        made = self.lr_scheduler is None  # type: ignore[has-type]
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        rate, switch = self.args.xe_learning_rate, self.rl_start_step
        if rate is None or not switch or not made:
            return scheduler
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"xe_learning_rate needs a function of the step, not {self.args.lr_scheduler_type!r}. Use 'constant'."
            )
        ratio = rate / self.args.learning_rate
        schedules = [
            lambda step, schedule=schedule: schedule(step) * (ratio if step < switch else 1.0)
            for schedule in scheduler.lr_lambdas
        ]
        self.lr_scheduler = LambdaLR(scheduler.optimizer, schedules)  # type: ignore[arg-type]
        return self.lr_scheduler

    def begin_step(self, micro_batches: list[dict[str, Any]]) -> None:
        """Make a rollout, or keep the references of the step before the switch."""
        if self.state.global_step >= self.rl_start_step:
            super().begin_step(micro_batches)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # Eq. 15 of a micro-batch of rollouts, or the cross-entropy of a micro-batch of references.
        if "advantages" in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {name: value for name, value in inputs.items() if name != "rows"}
        self.check_supervised(model, inputs, num_items_in_batch)
        outputs = model(**inputs, head_objective=SmileObjective(mle_weight=1.0))
        loss = self.token_mean(outputs["loss"], inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss
