"""Arguments of self-retrieval training."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_captionrl.trainers.caption_rl_config import CaptionRLConfig
from hf_captionrl.trainers.self_retrieval_arguments import SelfRetrievalArguments

__all__ = ["SelfRetrievalConfig"]


@dataclass
class SelfRetrievalConfig(SelfRetrievalArguments, CaptionRLConfig):
    r"""Arguments of [`SelfRetrievalTrainer`]; defaults are DiscriTune's on COCO.

    Only what differs from [`CaptionRLConfig`] and [`SelfRetrievalArguments`] is listed.
    """

    do_sample: bool | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Sample captions in training; False: greedy decoding. None: greedy (DiscriTune), but sampled with CIDEr "
            "in the reward, whose baseline is greedy, or with several captions per image."
        },
    )
    baseline: str | None = field(
        default=None,
        metadata={
            "help": "Baseline that is subtracted from rewards. None: 'running_mean' (DiscriTune), 'greedy' with CIDEr in the reward."
        },
    )
    learning_rate: float = field(
        default=1e-7, metadata={"help": "Learning rate; DiscriTune's for the whole language model."}
    )
    num_train_epochs: float = field(default=20, metadata={"help": "Number of epochs."})
    per_device_train_batch_size: int = field(
        default=100, metadata={"help": "Images per device and step: one target and 99 distractors."}
    )
    generation_num_beams: int = field(default=5, metadata={"help": "Number of beams in evaluation."})

    def __post_init__(self) -> None:
        if self.do_sample is None:
            self.do_sample = self.cider_weight > 0 or self.num_generations > 1
        if self.baseline is None:
            self.baseline = "greedy" if self.cider_weight > 0 else "running_mean"
        super().__post_init__()

    def check(self) -> None:
        self.check_rewards()
        if not self.retrieval_weight and self.bag_schedule == "adaptive":
            raise ValueError(
                "bag_schedule='adaptive' follows the share of images found, which is not measured with retrieval_weight=0. Use "
                "another schedule, or a retrieval_weight above 0."
            )
        super().check()
