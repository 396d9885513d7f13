"""Arguments of sequence-level exploration."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from hf_captionrl.rewards import CiderReward, PairwiseDiversity, Reward
from hf_captionrl.rewards.arguments import reward_arguments
from hf_captionrl.trainers.caption_rl_config import CaptionRLConfig

__all__ = ["SLEConfig"]

_RewardFields: Any = reward_arguments([CiderReward, PairwiseDiversity], weights=False)  # alpha weighs both


@dataclass
class SLEConfig(_RewardFields, CaptionRLConfig):
    r"""Arguments of [`SLETrainer`]; defaults are those of Chen and Jin 2020, Section 5.1, where the paper names them.

    `alpha=1` is self-critical sequence training (the paper's SLL), with `entropy_weight` SLL-ME. Only what differs from
    [`CaptionRLConfig`] is listed; `cider_eos`, `distance` and `diversity` are those of [`CiderReward`] and
    [`PairwiseDiversity`]. Where the paper and the authors' code differ, a field names both.
    """

    alpha: float = field(
        default=0.75,
        metadata={"help": "Weight of CIDEr-D in Eq. 8; 1 - alpha is that of diversity. The paper: 0.25, 0.5 or 0.75."},
    )
    rl_start_epoch: int = field(
        default=0,
        metadata={"help": "M of Algorithm 1: epochs of cross-entropy on the references before the rewards."},
    )
    xe_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the epochs of cross-entropy. None: learning_rate."}
    )

    num_generations: int = field(default=5, metadata={"help": "s, captions sampled for each image in training."})
    baseline: str | None = field(
        default="greedy",
        metadata={"help": "Baseline of CIDEr-D; diversity has another, the mean over the captions."},
    )
    loss_type: str = field(
        default="dapo",
        metadata={
            "help": "'dapo' (the code): summed over captions and tokens, divided by all tokens of the batch; 'sum': "
            "Eq. 16 as printed."
        },
    )
    learning_rate: float = field(
        default=1e-6,
        metadata={"help": "Learning rate. The paper gives none; this is No Detail Left Behind's for CIDEr."},
    )
    num_train_epochs: float = field(
        default=10, metadata={"help": "N of Algorithm 1: all epochs, cross-entropy included."}
    )
    per_device_train_batch_size: int = field(
        default=20, metadata={"help": "Images per device and step; s captions are sampled for each."}
    )
    generation_num_beams: int = field(default=5, metadata={"help": "Number of beams in evaluation."})

    def reward_weight(self, reward: type[Reward]) -> float:
        return {CiderReward: self.alpha, PairwiseDiversity: 1.0 - self.alpha}[reward]

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(
                f"alpha is {self.alpha}. Eq. 8 weights CIDEr-D by alpha and diversity by 1 - alpha. Use a number in [0, 1]."
            )
        if self.alpha < 1.0 and self.num_generations < 2:
            raise ValueError(
                f"Diversity compares the captions of one image, and num_generations is {self.num_generations}. Use 2 or "
                "more (the paper: 5), or alpha=1 for CIDEr-D alone."
            )
        self.check_rewards()
        if self.alpha < 1.0 and self.num_generations == 2 and self.diversity == "pairwise":
            warnings.warn(
                "With num_generations=2 both captions of an image are equally far from each other, so each is its own "
                "baseline and the diversity advantage is 0 ('bleu34': wherever both are equally long). Use 3 or more.",
                stacklevel=2,
            )
        if self.rl_start_epoch < 0:
            raise ValueError(f"rl_start_epoch is {self.rl_start_epoch}. Use 0 or more epochs of cross-entropy.")
        if self.xe_learning_rate is not None and not self.xe_learning_rate > 0:
            raise ValueError(f"xe_learning_rate is {self.xe_learning_rate}. Use a positive number, or None.")
        if self.rl_start_epoch and self.num_iterations > 1:
            raise ValueError(
                f"num_iterations={self.num_iterations} would repeat every batch of cross-entropy too. Use num_iterations=1, "
                "or a separate run of cross-entropy and rl_start_epoch=0 here."
            )
        super().__post_init__()
