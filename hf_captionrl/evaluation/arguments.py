"""Which models evaluate captions, and which select checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from hf_captionrl.retrieval import Scorer, load_scorer
from hf_captionrl.scenes.models import model_path

__all__ = ["EMBEDDED", "EvaluationArguments", "optional_scorer"]

logger = logging.getLogger(__name__)

EMBEDDED = ("scenes", "moving_scenes")
"""Data sets of the embedded world."""

_CLIP = "openai/clip-vit-base-patch32"  # evaluates in the papers
_GPT2 = "openai-community/gpt2"  # and their language model


@dataclass
class EvaluationArguments:
    """Models that evaluate captions."""

    scorer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Dual encoder that selects checkpoints by retrieval; open_clip:NAME for open_clip, 'none'."},
    )
    held_out_scorer_name_or_path: str | None = field(
        default=None, metadata={"help": "Dual encoder that evaluates the table; better not the one that selects."}
    )
    perplexity_name_or_path: str | None = field(
        default=None, metadata={"help": "Causal language model for perplexity, or 'none'."}
    )
    learning_curves: bool = field(
        default=False,
        metadata={
            "help": "At each evaluation also measure captions of the test split, for curves of R@1 by both scorers, CIDEr-D, "
            "hallucination and length. They select nothing."
        },
    )
    gallery_size: int = field(default=48, metadata={"help": "Images shown in gallery.html."})
    push_gallery: bool = field(
        default=False,
        metadata={"help": "With push_to_hub, also upload gallery.html where it shows images of this machine."},
    )

    def resolve(self, dataset_name: str, *, trains: bool = True) -> None:
        """Set the defaults: the shipped models on the embedded world, the papers' models elsewhere.

        Args:
            dataset_name: Data set of the run.
            trains: Whether checkpoints will be selected; warns if one scorer both selects and evaluates.
        """
        embedded = dataset_name in EMBEDDED
        selects, evaluates = ("scenes:clip-reward", "scenes:siglip-held-out") if embedded else (_CLIP, _CLIP)
        if dataset_name == "moving_scenes":  # EMScore needs features of tokens, which a SigLIP does not have
            selects, evaluates = evaluates, selects
        self.scorer_name_or_path = self.scorer_name_or_path or selects
        self.held_out_scorer_name_or_path = self.held_out_scorer_name_or_path or evaluates
        if trains and self.scorer_name_or_path == self.held_out_scorer_name_or_path != "none":
            logger.warning(
                "%s both selects checkpoints and evaluates them, which overstates its results. Use another model as "
                "--held_out_scorer_name_or_path.",
                self.held_out_scorer_name_or_path,
            )
        self.perplexity_name_or_path = self.perplexity_name_or_path or (
            "scenes:gpt2-perplexity" if embedded else _GPT2
        )


def optional_scorer(name: str | None) -> Scorer | None:
    """Load a scorer by name.

    Args:
        name: A name for `load_scorer`, a shipped model, or `"none"`.

    Returns:
        [`Scorer`] or None: None for `"none"`.
    """
    return None if name in (None, "none") else load_scorer(model_path(str(name)))
