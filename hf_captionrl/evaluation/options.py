"""Which models evaluate captions, and which select checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from hf_captionrl.metrics.clip_scores import score_prefix
from hf_captionrl.retrieval import Scorer, load_scorer
from hf_captionrl.utils.model_files import model_path
from hf_captionrl.utils.options import check_values, documented

logger = logging.getLogger(__name__)

EMBEDDED = ("scenes", "moving_scenes")
"""Data sets of the embedded world."""

_CLIP = "openai/clip-vit-base-patch32"  # the scorer that evaluates in the papers


@dataclass
class EvaluationArguments:
    """Models that evaluate captions."""

    scorer_name_or_path: str | None = documented(
        None,
        "Dual encoder that rewards, or selects checkpoints by retrieval; open_clip:NAME for open_clip. 'none': there is no "
        "scorer, unless held_out_scorer_name_or_path names one.",
        aliases=["--scorer"],
        metavar="NAME",
    )
    held_out_scorer_name_or_path: str | None = documented(
        None,
        "Dual encoder that computes the table; should differ from the one that selects.",
        aliases=["--held_out_scorer"],
        metavar="NAME",
    )
    perplexity_name_or_path: str | None = documented(
        None,
        "Causal language model for perplexity, such as openai-community/gpt2. None: no perplexity, but on the embedded world "
        "that of the shipped model.",
        aliases=["--perplexity_model"],
        metavar="NAME",
    )
    learning_curves: bool = documented(
        False,
        "At each evaluation also measure captions of the test split, for curves of R@1 by both scorers, CIDEr-D, "
        "hallucination and length. They select nothing.",
    )
    clip_prefix: str | None = documented(
        None,
        "Text before each caption for CLIPScore. None: 'A photo depicts ' as in the papers, and none for scorers of "
        "the embedded world, which were trained without it.",
    )
    pool: str | None = documented(
        None,
        "File with COCO names of the images that captions are ranked among (.json, .txt, .npy), such as CapEnrich's "
        "hard pool of SMILE. None: the test images.",
    )
    bags: str | None = documented(
        None,
        "Bags of look-alikes for R@1: a file of `captionrl bags`, JSON of ids by size, or the folder of TrueMatch's "
        "release, whose images of the validation split are captioned too. None: the column bag_id.",
    )
    paper: Literal["discritune", "ndlb", "sle"] | None = documented(
        None,
        "Add the columns of a paper's tables: 'discritune' (P@1 in blocks of 100, BLEU-4, METEOR, SPICE), 'ndlb' "
        "(BLEU-4, ClipSc, vocabulary), 'sle' (METEOR, SPICE). P@1 and ClipSc are also computed with the other scorer, as in the papers.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.pool is not None and (self.held_out_scorer_name_or_path or self.scorer_name_or_path) == "none":
            raise ValueError(
                f"pool is {self.pool!r}, but there is no held-out scorer ('none'), so no caption is ranked. Use "
                "held_out_scorer_name_or_path, or leave pool out."
            )

    @property
    def has_reward_scorer(self) -> bool:
        """Whether another scorer than the held-out one rewards or selects, so that tables show both."""
        return self.scorer_name_or_path not in ("none", self.held_out_scorer_name_or_path)

    def resolve(self, dataset_name: str, *, is_training: bool = True) -> None:
        """Set the defaults: the shipped models on the embedded world, the papers' models elsewhere."""
        embedded = dataset_name in EMBEDDED
        selects, evaluates = ("scenes:clip-reward", "scenes:siglip-held-out") if embedded else (_CLIP, _CLIP)
        if dataset_name == "moving_scenes":  # EMScore needs features of tokens, which a SigLIP does not have
            selects, evaluates = evaluates, selects
        evaluates = "none" if self.scorer_name_or_path == "none" else evaluates
        self.scorer_name_or_path = self.scorer_name_or_path or selects
        self.held_out_scorer_name_or_path = self.held_out_scorer_name_or_path or evaluates
        if is_training and self.scorer_name_or_path == self.held_out_scorer_name_or_path != "none":
            logger.warning(
                "%s both selects checkpoints and evaluates them, which overstates its results. Use another model as "
                "--held_out_scorer_name_or_path.",
                self.held_out_scorer_name_or_path,
            )
        language_model = "scenes:gpt2-perplexity" if embedded else "none"  # others are downloads of half a gigabyte
        self.perplexity_name_or_path = self.perplexity_name_or_path or language_model


def optional_scorer(name: str | None) -> Scorer | None:
    """Load a scorer by a name for `load_scorer`, or a shipped model; None for `"none"`."""
    return None if name in (None, "none") else load_scorer(model_path(str(name)))


def clip_prefix(given: str | None, dataset: str, scorer_name: str | None) -> str:
    """Text before each caption for CLIPScore: the given one, or the paper's, but none for scorers of the embedded world, which
    were trained without; the data set decides if no scorer is named."""
    if given is not None:
        return score_prefix("hessel", given)
    embedded = dataset == "scenes" if scorer_name is None else scorer_name.startswith("scenes:")
    return "" if embedded else score_prefix("hessel")


def load_evaluators(
    dataset: str, scorer_name: str | None, language_model_name: str | None
) -> tuple[Any, Any, dict[str, str]]:
    """Scorer and `(model, tokenizer)`, or None for `"none"`, and the reasons for the tables why a default could not be loaded.

    None as a name stands for the default of the data set. A model that is named must load.
    """
    names: Any = {"held_out_scorer_name_or_path": scorer_name, "perplexity_name_or_path": language_model_name}
    arguments, reasons = EvaluationArguments(**names), dict[str, str]()
    arguments.resolve(dataset, is_training=False)
    scorer = language_model = None
    name = arguments.held_out_scorer_name_or_path
    try:
        scorer = optional_scorer(name)
    except OSError:
        if scorer_name is not None:
            raise
        reasons["no scorer"] = f"the scorer {name} cannot be loaded (--scorer {name} says why)"
    name = str(arguments.perplexity_name_or_path)
    if name != "none":
        from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model

        try:
            language_model = load_language_model(name)
        except ValueError as error:  # transformers lists 200 families
            message = f"--language_model {name!r} is not a causal language model. Use GPT-2, or 'none'."
            raise ValueError(message) from error
    return scorer, language_model, reasons
