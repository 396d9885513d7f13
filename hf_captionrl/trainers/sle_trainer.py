"""Sequence-level exploration: rewards for captions that match the references and differ from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.rewards import RewardContext, RewardLike
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLTrainer
from hf_captionrl.trainers.sle_config import SLEConfig
from hf_captionrl.trainers.smile_trainer import SmileObjective

__all__ = ["SLETrainer"]


class SLETrainer(CaptionRLTrainer):
    r"""Finetunes a captioner with CIDEr-D and the distances between its samples.

    Reference: Chen and Jin 2020, "Better Captioning with Sequence-Level Exploration", Eq. 14-16 and Algorithm 1. Of s
    captions of an image, caption j adds
    `-alpha (CIDEr(y_j) - CIDEr(greedy)) log p(y_j) - (1 - alpha) (2/s) (sum_k d(y_j, y_k) - 1/s sum_ik d(y_i, y_k)) log p(y_j)`.
    The first `rl_start_epoch` epochs train by cross-entropy on the references instead.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`): The policy.
        args ([`SLEConfig`], *optional*): Configuration. None: the defaults, in `{model name}-SLE`.
        train_dataset (`datasets.Dataset`, *optional*): Columns `image`, `image_id` and `captions`.
        eval_dataset (`datasets.Dataset`, *optional*): The same columns.
        distance (`Callable`, *optional*): Instead of `args.distance`: from a [`RewardContext`] to distances
            `(B, s, s)`.
        text_encoder (`Callable`, *optional*): From captions to vectors `(N, D)`, for `args.distance="embedding"`; by
            default the text tower of `scorer`.
        reward_funcs (*optional*): Instead of the configured rewards; as for [`CaptionRLTrainer`].
        kwargs: For [`CaptionRLTrainer`]: `scorer`, `held_out_scorer`, `peft_config`, `model_init`, `compute_metrics`, ...

    Raises:
        ValueError: If arguments contradict each other; before any training.

    Example:
        >>> trainer = SLETrainer("Salesforce/blip-image-captioning-base", SLEConfig("out"), train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SLEConfig
    config_class = SLEConfig
    method_name = "SLE"

    def __init__(
        self,
        model: Captioner | Any | None,
        args: SLEConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | None = None,
        *,
        distance: Callable[[RewardContext], Tensor] | None = None,
        text_encoder: Callable[[list[str]], Tensor] | None = None,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        args = self._resolve_args(model, args)
        if reward_funcs is None:
            reward_funcs = args.make_rewards(distance=distance or args.distance, text_encoder=text_encoder)
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
                f"xe_learning_rate needs a schedule that is a function of the step, and lr_scheduler_type is "
                f"{self.args.lr_scheduler_type!r}. Use 'constant', or xe_learning_rate=None."
            )
        ratio = rate / self.args.learning_rate

        def before(schedule: Callable[[int], float]) -> Callable[[int], float]:
            return lambda step: schedule(step) * (ratio if step < switch else 1.0)

        schedules = [before(schedule) for schedule in scheduler.lr_lambdas]
        self.lr_scheduler = LambdaLR(scheduler.optimizer, schedules)  # type: ignore[arg-type]
        return self.lr_scheduler

    def begin_step(self) -> None:
        """Make a rollout, or keep the references of the step before the switch."""
        if self.state.global_step >= self.rl_start_step:
            super().begin_step()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        # Eq. 15 of a micro-batch of rollouts, or the cross-entropy of a micro-batch of references.
        if "advantages" in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {name: value for name, value in inputs.items() if name != "rows"}
        self.check_supervised(model, inputs)
        outputs = model(**inputs, head_objective=SmileObjective(mle_weight=1.0))
        loss = self.token_mean(outputs["loss"], inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss
