"""What the reward of self-retrieval is told, whichever trainer asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from hf_captionrl.rewards.self_retrieval import DistractorScope, Kind

__all__ = ["SelfRetrievalArguments"]


@dataclass
class SelfRetrievalArguments:
    """The reward; defaults are DiscriTune's. Where the papers and their code differ, a field names both."""

    reward_kind: str = field(
        default="log_prob", metadata={"help": "Reward: 'log_prob', 'cosine' or 'accuracy' (DiscriTune, Table 9)."}
    )
    similarity_scale: str = field(
        default="code",
        metadata={"help": "Factor on cosines: 'code' is the scorer's own logit scale, 'paper' is 1, or a number."},
    )
    distractor_scope: str = field(
        default="batch",
        metadata={"help": "Whom the own image is told from: the 'batch', its 'bag', or 'hard' ones of the batch."},
    )
    num_hard_distractors: int = field(
        default=10, metadata={"help": "Images most similar to the own one, for distractor_scope='hard'."}
    )
    scorer_ensemble: str = field(
        default="mean", metadata={"help": "Of several scorers: their 'mean', or 'alternate' from step to step."}
    )
    retrieval_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the self-retrieval reward; 0 leaves it out (CIDEr alone, with cider_weight=1)."},
    )
    allow_truncation_captions: bool = field(
        default=False, metadata={"help": "Let the policy write more tokens than the scorer reads."}
    )
    cider_weight: float = field(
        default=0.0,
        metadata={
            "help": "lambda of R = SR + lambda * CIDEr-D (No Detail Left Behind, Section 4.8: 0.5); 0: SR alone."
        },
    )
    cider_eos: bool = field(default=True, metadata={"help": "CIDEr-D scores the end token too."})
    repetition_weight: float = field(
        default=0.0, metadata={"help": "Weight of the penalty on n-grams that a caption has said already."}
    )
    length_weight: float = field(default=0.0, metadata={"help": "Weight of the penalty on tokens beyond max_tokens."})
    max_tokens: int = field(default=30, metadata={"help": "Longest caption without a length penalty, in tokens."})
    truncation_weight: float = field(
        default=0.0, metadata={"help": "Weight of the penalty on captions that the length limit cut."}
    )

    def check_reward(self) -> None:
        """Refuse what makes no reward.

        Raises:
            ValueError: Naming the value and what to do.
        """
        if self.reward_kind not in get_args(Kind):
            raise ValueError(f"reward_kind is {self.reward_kind!r}. Use one of {get_args(Kind)}.")
        if self.distractor_scope not in get_args(DistractorScope):
            raise ValueError(f"distractor_scope is {self.distractor_scope!r}. Use one of {get_args(DistractorScope)}.")
        if self.num_hard_distractors < 1:
            raise ValueError(f"num_hard_distractors is {self.num_hard_distractors}. Use 1 or more.")
        for name in ("retrieval_weight", "cider_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}. Use 0 or more.")
        if not self.retrieval_weight and not self.cider_weight:
            raise ValueError(
                "retrieval_weight and cider_weight are both 0, so that nothing is rewarded. Set one of them above 0."
            )
        _ = self.scale  # refused now, not at the first step

    @property
    def scale(self) -> float | None:
        """Factor on the cosines; None for the scorer's own."""
        named = {"code": None, "paper": 1.0}
        if self.similarity_scale in named:
            return named[self.similarity_scale]
        try:
            value = float(self.similarity_scale)
        except (TypeError, ValueError):
            value = 0.0
        if not 0 < value < float("inf"):
            raise ValueError(
                f"similarity_scale is {self.similarity_scale!r}. Use 'code', 'paper' or a positive number."
            )
        return value
