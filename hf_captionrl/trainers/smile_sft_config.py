"""Configuration of [`SmileSFTTrainer`]."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import SFTConfig

from hf_captionrl.trainers.exact_resume import ExactResumeArguments

__all__ = ["SCOPES", "SmileSFTConfig"]

SCOPES = ("document", "sentence", "window")
"""Scopes of a vocabulary subset."""


@dataclass
class SmileSFTConfig(ExactResumeArguments, SFTConfig):
    r"""Arguments of [`SmileSFTTrainer`]: those of `trl.SFTConfig` and of SMILE.

    Only what differs from `trl.SFTConfig` is listed.
    """

    mle_weight: float = field(
        default=0.0,
        metadata={"help": "lambda of Eq. 4: loss = lambda * MLE + (1 - lambda) * SMILE. 1 is trl.SFTTrainer's loss."},
    )
    first_token: str = field(
        default="mle",
        metadata={
            "help": "The first token of each subset: 'mle' chooses it from the whole vocabulary, 'smile' from the subset."
        },
    )
    subset_scope: str = field(
        default="document",
        metadata={
            "help": "Text whose words form the subset of a token: its 'document' (the paper), its 'sentence', or its 'window' "
            "of window_tokens tokens.",
            "choices": list(SCOPES),
        },
    )
    window_tokens: int = field(
        default=32, metadata={"help": "Supervised tokens of a window, for subset_scope='window'."}
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.mle_weight <= 1.0:
            raise ValueError(f"mle_weight is {self.mle_weight}. Use a number in [0, 1] (lambda of Eq. 4).")
        if self.first_token not in ("mle", "smile"):
            raise ValueError(f"first_token is {self.first_token!r}. Use 'mle' or 'smile'.")
        if self.subset_scope not in SCOPES:
            raise ValueError(f"subset_scope is {self.subset_scope!r}. Use one of {', '.join(map(repr, SCOPES))}.")
        if self.window_tokens < 2:
            raise ValueError(
                f"window_tokens is {self.window_tokens}. Use at least 2: the loss of a subset of one token is 0."
            )
        super().__post_init__()
        if self.mle_weight == 1.0:
            return
        if self.packing_strategy == "wrapped" and (self.packing or self.eval_packing):
            raise ValueError(
                "packing_strategy='wrapped' joins documents without their boundaries, which SMILE's subsets need. Use "
                "packing_strategy='bfd'."
            )
        if self.eval_packing and not (self.packing or self.padding_free):
            raise ValueError(
                "eval_packing=True without packing makes rows of several documents whose boundaries trl does not pass "
                "on. Set packing=True too, or eval_packing=False."
            )
        if self.loss_type != "nll":
            raise ValueError(f"loss_type is {self.loss_type!r}, which is not SMILE. Use 'nll', or mle_weight=1.")
        if self.label_smoothing_factor > 0:
            raise ValueError(
                f"label_smoothing_factor is {self.label_smoothing_factor}, which trl applies to full logits. Use 0, or "
                "mle_weight=1."
            )
