"""Arguments shared by the reinforcement-learning trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_captionrl.data.bag_curriculum import parse_bag_schedule
from hf_captionrl.losses.policy_gradient import LOSS_TYPES
from hf_captionrl.rewards import BASELINES, make_baseline
from hf_captionrl.rewards.advantages import AGGREGATIONS, REWARD_SCALES
from hf_captionrl.trainers.argument_support import RL_FIELDS, Support
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.reward_hacking import GUARD_ACTIONS

__all__ = ["REWARD_METRIC", "CaptionRLConfig"]

REWARD_METRIC = "reward_recall_at_1"
"""Default metric for the best model: R@1 by the reward scorer, because the held-out scorer must not select."""


_ONLY_IN_TRL = ("cispo", "luspo", "sapo", "vespo")
"""Values of `loss_type` in TRL that are not implemented here."""


@dataclass
class CaptionRLConfig(CaptionConfig):
    r"""Arguments of [`CaptionRLTrainer`], with TRL's names where TRL has them.

    One optimizer step is one rollout: `per_device_train_batch_size * gradient_accumulation_steps * processes` images, all
    of them distractors of each other, and `num_generations` captions each. `per_device_train_batch_size` is the number
    of images in one forward pass.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*CaptionConfig._VALID_DICT_FIELDS, "generation_kwargs", "bag_schedule"]
    field_support: ClassVar[Mapping[str, Support]] = RL_FIELDS

    num_generations: int = field(default=1, metadata={"help": "G, captions generated for each image in training."})
    do_sample: bool = field(default=True, metadata={"help": "Sample captions in training; False: greedy decoding."})
    temperature: float = field(
        default=1.0, metadata={"help": "Sampling temperature. Log-probabilities are those of the same distribution."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; 1 keeps every token."})
    top_k: int = field(default=0, metadata={"help": "Sample only from this many tokens; 0 keeps every token."})
    max_completion_length: int = field(
        default=40, metadata={"help": "Longest caption generated in training, in tokens, the end token included."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "More arguments of generate in training, e.g. {'min_new_tokens': 3}."}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each reward, in the order of reward_funcs. None: 1 each."}
    )
    baseline: str | None = field(
        default="running_mean",
        metadata={
            "help": f"Baseline that is subtracted from rewards: one of {sorted(BASELINES)}. A reward may have another."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Divide advantages by the standard deviation of the rewards: of the captions of an image ('group' or True), "
            "of all captions of a step ('batch'), or not ('none' or False). GRPO: 'group' with baseline='group_mean'."
        },
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "Several rewards: their weighted sum is compared with the baseline and scaled ('sum_then_normalize'), or "
            "each is centred and scaled within its group, and the weighted sum within the step ('normalize_then_sum', GDPO)."
        },
    )
    loss_type: str = field(
        default="grpo",
        metadata={
            "help": "Loss of a step from its tokens: 'grpo', the mean over the tokens of each caption; 'dapo', the sum divided by "
            "all tokens of the step; 'dr_grpo', the sum divided by captions times max_completion_length; 'sum', the sum "
            "divided by captions, as the papers print it."
        },
    )
    entropy_weight: float = field(
        default=0.0, metadata={"help": "Bonus for the entropy of each token's distribution, in nats."}
    )
    beta: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the KL divergence from the initial captioner; with 0 no reference model is kept."
        },
    )
    num_iterations: int = field(
        default=1, metadata={"help": "Optimizer steps for each rollout; above 1 with an importance ratio."}
    )
    epsilon: float = field(default=0.2, metadata={"help": "The importance ratio is clipped to [1 - eps, 1 + eps]."})
    bag_schedule: dict[Any, int] | str | None = field(
        default=None,
        metadata={
            "help": "Bag sizes, with neighbours given to the trainer: {last epoch: size}, 'paper', 'adaptive', or a number."
        },
    )
    bag_distractors: str = field(
        default="nearest",
        metadata={"help": "Images of a bag: the 'nearest' images, or 'random' ones in bags of the same sizes."},
    )
    bag_recall_threshold: float = field(
        default=0.8,
        metadata={
            "help": "bag_schedule='adaptive' continues with the next size when the training R@1 of an epoch reaches this."
        },
    )
    guard: str = field(
        default="warn",
        metadata={
            "help": "Action when captions degenerate: 'off', 'warn', 'stop', or 'rollback' to the last good checkpoint. Unless "
            "it is 'off', an evaluation with degenerate captions selects no checkpoint, and a recipe delivers no model whose captions "
            "have collapsed."
        },
    )

    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "Schedule of the learning rate; constant in the papers."}
    )

    metric_for_best_model: str | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Metric of load_best_model_at_end. None: reward_recall_at_1, by the reward scorer; recall_at_1 if there is "
            "only one scorer."
        },
    )

    def __post_init__(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = REWARD_METRIC
        super().__post_init__()
        self.check()

    @property
    def is_exploring(self) -> bool:
        """Whether training generates other captions than greedy ones: samples, or beam search."""
        beams = self.generation_kwargs.get("num_beams", 1) if isinstance(self.generation_kwargs, dict) else 1
        return bool(self.do_sample) or beams > 1

    def check(self) -> None:
        """Refuse values that contradict each other; also for a copy with changed fields.

        Raises:
            ValueError: Naming the value and the remedy.
        """
        if self.num_generations < 1:
            raise ValueError(f"num_generations is {self.num_generations}. Use 1 or more captions per image.")
        if not self.do_sample and self.num_generations > 1:
            raise ValueError(
                f"do_sample=False writes the same caption {self.num_generations} times. Set do_sample=True or "
                "num_generations=1."
            )
        if self.do_sample and not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}. Use a positive number, or do_sample=False.")
        if self.do_sample and (not 0 < self.top_p <= 1 or self.top_k < 0):
            raise ValueError(f"top_p is {self.top_p} and top_k {self.top_k}. Use 0 < top_p <= 1 and top_k >= 0.")
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length is {self.max_completion_length}. Use at least 1 token.")
        if self.beta < 0 or self.entropy_weight < 0:
            raise ValueError(f"beta is {self.beta} and entropy_weight {self.entropy_weight}. Use 0 or more.")
        if self.num_iterations < 1:
            raise ValueError(f"num_iterations is {self.num_iterations}. Use 1 or more.")
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon is {self.epsilon}. Use a number between 0 and 1.")
        if self.guard not in GUARD_ACTIONS:
            raise ValueError(f"guard is {self.guard!r}. Use one of {GUARD_ACTIONS}.")
        if self.bag_distractors not in ("nearest", "random"):
            raise ValueError(f"bag_distractors is {self.bag_distractors!r}. Use 'nearest' or 'random'.")
        if not 0 < self.bag_recall_threshold <= 1:
            raise ValueError(f"bag_recall_threshold is {self.bag_recall_threshold}. Use a share above 0, at most 1.")
        self.baseline = self.baseline or "none"
        make_baseline(self.baseline, self.num_generations, do_sample=self.is_exploring)
        self._check_objective()
        self.bag_schedule = parse_bag_schedule(self.bag_schedule, ("paper", "adaptive"))  # type: ignore[assignment]

    def _check_objective(self) -> None:
        """Refuse ways of forming advantages and the loss that are unknown or contradict each other."""
        if self.loss_type == "bnpo":
            raise ValueError(
                "loss_type is 'bnpo', which divides by the tokens of each micro-batch, so that the gradient depends on how a "
                "step is split. Use 'dapo', which divides by the tokens of the whole step."
            )
        if self.loss_type in _ONLY_IN_TRL:
            raise ValueError(
                f"loss_type is {self.loss_type!r}, which TRL has and this trainer does not. Use one of {LOSS_TYPES}, or "
                "SelfRetrievalGRPOTrainer, which trains with TRL's losses."
            )
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type is {self.loss_type!r}. Use one of {LOSS_TYPES}.")
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)  # type: ignore[call-overload]
        if self.scale_rewards not in REWARD_SCALES:
            raise ValueError(f"scale_rewards is {self.scale_rewards!r}. Use one of {REWARD_SCALES}, True or False.")
        if self.scale_rewards == "group" and self.num_generations < 2:
            raise ValueError(
                "scale_rewards='group' divides by the standard deviation of the captions of an image, and num_generations is "
                f"{self.num_generations}. Use num_generations=2 or more, or scale_rewards='batch'."
            )
        if self.multi_objective_aggregation not in AGGREGATIONS:
            raise ValueError(
                f"multi_objective_aggregation is {self.multi_objective_aggregation!r}. Use one of {AGGREGATIONS}."
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            if self.scale_rewards != "none":
                raise ValueError(
                    f"multi_objective_aggregation='normalize_then_sum' scales each reward itself, so scale_rewards="
                    f"{self.scale_rewards!r} would have no effect. Use scale_rewards='none'."
                )
            if self.baseline != "group_mean":
                raise ValueError(
                    "multi_objective_aggregation='normalize_then_sum' subtracts the mean of the captions of an image, and "
                    f"baseline is {self.baseline!r}. Use baseline='group_mean'."
                )
