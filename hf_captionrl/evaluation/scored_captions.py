"""Who judges captions in `captionrl evaluate`, and what they say that several tables need."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions

__all__ = [
    "REFERENCES",
    "add_clip_features",
    "clip_prefix",
    "count_copies",
    "human_captions",
    "load_evaluators",
    "perplexity_by",
    "score_captions",
]

REFERENCES = "references"
"""What the human captions are called."""


def _shown(name: str) -> str:
    """A model's name for tables and files that leave this machine: of a folder only the last part."""
    return Path(name).name if Path(name).exists() or Path(name).is_absolute() else name


def load_evaluators(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, str]]:
    """The scorer and the language model that the arguments name.

    Returns:
        `tuple`: Scorer or None; `(model, tokenizer)` or None; and for a table's reason the better one, where something
    """
    from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer

    wanted = EvaluationArguments(
        held_out_scorer_name_or_path=arguments.scorer, perplexity_name_or_path=arguments.language_model
    )
    wanted.resolve(arguments.dataset, trains=False)
    reasons: dict[str, str] = {}
    scorer = language_model = None
    name = str(wanted.held_out_scorer_name_or_path)
    try:
        scorer = optional_scorer(name)
    except OSError as error:
        reasons["no scorer"] = f"the scorer {_shown(name)} cannot be loaded"
        print(f"captionrl evaluate: {' '.join(str(error).split())}", file=sys.stderr)
    name = str(wanted.perplexity_name_or_path)
    if name != "none":
        from hf_captionrl.evaluate_modules.inputs import load_language_model

        try:
            language_model = load_language_model(name)
        except OSError as error:
            reasons["no language model"] = f"the language model {_shown(name)} cannot be loaded"
            print(f"captionrl evaluate: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        except ValueError as error:  # transformers lists all two hundred families that it knows
            raise ValueError(
                f"--language_model {name!r} is no causal language model. Use GPT-2, or 'none'."
            ) from error
    return scorer, language_model, reasons


def score_captions(
    evaluator: Evaluator, name: str, captions: list[list[str]], references: list[list[str]]
) -> ScoredCaptions:
    """Captions with what the scorer says of them, computed once for all tables."""
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions
    from hf_captionrl.metrics.suites.suite_row import spoken
    from hf_captionrl.retrieval import TokenScorer

    scored = ScoredCaptions(name, captions, references)
    scorer: Any = evaluator.held_out_scorer
    if scorer is not None:
        texts = spoken(scored.first)
        scored.text = scorer.text_features(texts)
        scored.max_text_tokens, scored.scorer = scorer.max_text_tokens, scorer.signature
        # A scorer that is not ours need not tell.
        scored.tokens = scorer.count_tokens(texts) if isinstance(scorer, TokenScorer) else None
    return scored


def clip_prefix(arguments: argparse.Namespace) -> str:
    """What to put before each caption for CLIPScore: what was asked for, or what the scorer has read in training."""
    from hf_captionrl.metrics.clip_scores import score_prefix

    if arguments.clip_prefix is not None:
        return score_prefix("hessel", str(arguments.clip_prefix))
    embedded = arguments.dataset == "scenes" if arguments.scorer is None else arguments.scorer.startswith("scenes:")
    return "" if embedded else score_prefix("hessel")


def add_clip_features(scored: Sequence[ScoredCaptions], scorer: Any, prefix: str) -> None:
    """Make features for CLIPScore, which papers take of captions after a prefix."""
    from hf_captionrl.metrics.suites.suite_row import spoken

    for source in scored if prefix else ():
        source.clip_prefix = prefix
        source.clip_text = scorer.text_features([prefix + text for text in spoken(source.first)])


def count_copies(image_features: Any) -> int:
    """How many images of the pool are copies of an earlier one: false negatives of its captions.

    Args:
        image_features (`torch.Tensor` of shape `(M, D)`): Features of the pool.
    """
    from hf_captionrl.retrieval.ranking import duplicate_images

    return sum(first != row for row, first in enumerate(duplicate_images(image_features).tolist()))


def perplexity_by(language_model: tuple[Any, Any] | None) -> Callable[[Sequence[str]], Mapping[str, Any]] | None:
    """What measures perplexity.

    Args:
        language_model: `(model, tokenizer)`, or None.
    """
    if language_model is None:
        return None
    from hf_captionrl.metrics import caption_perplexity

    model, tokenizer = language_model
    return lambda captions: caption_perplexity(list(captions), model, tokenizer)


def human_captions(evaluator: Evaluator) -> ScoredCaptions | None:
    """One reference of each image, drawn at random, held against the others (SMILE, Table 1)."""
    from hf_captionrl.evaluation.evaluator import draw_references

    first, others = draw_references(evaluator.references, evaluator.seed)
    if not all(others):
        return None
    captions = [[caption, *rest] for caption, rest in zip(first, others, strict=True)]
    scored = score_captions(evaluator, REFERENCES, captions, others)
    scored.is_human = True
    return scored
