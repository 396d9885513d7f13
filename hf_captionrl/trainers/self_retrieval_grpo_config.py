"""Arguments of self-retrieval for chat models, in addition to those of TRL's GRPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from hf_captionrl.data.bag_curriculum import parse_bag_schedule
from hf_captionrl.trainers.exact_resume import ExactResumeArguments
from hf_captionrl.trainers.self_retrieval_arguments import SelfRetrievalArguments

__all__ = ["SelfRetrievalGRPOConfig"]


@dataclass
class SelfRetrievalGRPOConfig(ExactResumeArguments, SelfRetrievalArguments, GRPOConfig):
    r"""Arguments of [`SelfRetrievalGRPOTrainer`].

    Only what differs from [`SelfRetrievalArguments`] and TRL's `GRPOConfig` is listed. The reward ranks the
    `generation_batch_size / num_generations` images of a rollout; DiscriTune's "1 of 100" are 100 images. With
    `distractor_scope="bank"` a rollout may be one image.
    """

    prompt: str = field(
        default="Briefly describe the content of the image.",
        metadata={"help": "Text of the user's message beside the image."},
    )
    contrastive_distractors: int = field(
        default=0,
        metadata={
            "help": "Add the first captions of this many neighbours to the prompt and ask what is different, as `captionrl album "
            "--contrastive` does. 0: none."
        },
    )
    bag_schedule: Any = field(
        default=None,
        metadata={
            "help": "Bag sizes, with neighbours given to the trainer: 'paper', one size, or {last epoch: size}. None: "
            "the paper's."
        },
    )
    feature_cache_dir: str | None = field(
        default=None, metadata={"help": "Folder of the scorer's cached image features. None: the default one."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Rewards need the columns of the data."})

    def __post_init__(self) -> None:
        self.check_rewards()
        self.bag_schedule = parse_bag_schedule(self.bag_schedule)
        if self.contrastive_distractors < 0:
            raise ValueError(f"contrastive_distractors is {self.contrastive_distractors}. Use 0 (none) or more.")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns is True, but rewards need the columns of the data. Use False.")
        super().__post_init__()
