"""Scorer and language model of `captionrl evaluate`, and captions with the features that several tables need."""

from __future__ import annotations

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
    "count_copies",
    "human_captions",
    "load_evaluators",
    "perplexity_by",
    "score_captions",
]

REFERENCES = "references"
"""Name of the human captions."""


def _shown(name: str) -> str:
    """A model's name for tables and published files: only the last part of a folder."""
    return Path(name).name if Path(name).exists() or Path(name).is_absolute() else name


def load_evaluators(
    dataset: str, scorer_name: str | None, language_model_name: str | None
) -> tuple[Any, Any, dict[str, str]]:
    """Load scorer and language model; None stands for the default of the data set.

    Returns the scorer or None, and `(model, tokenizer)` or None. Of two reasons, the more specific one is in the table.
    """
    from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer

    wanted = EvaluationArguments(held_out_scorer_name_or_path=scorer_name, perplexity_name_or_path=language_model_name)
    wanted.resolve(dataset, trains=False)
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
        except ValueError as error:  # transformers lists 200 families
            raise ValueError(
                f"--language_model {name!r} is not a causal language model. Use GPT-2, or 'none'."
            ) from error
    return scorer, language_model, reasons


def score_captions(
    evaluator: Evaluator, name: str, captions: list[list[str]], references: list[list[str]]
) -> ScoredCaptions:
    """Captions with their text features and token counts, computed once for all tables."""
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions
    from hf_captionrl.metrics.suites.suite_row import spoken
    from hf_captionrl.retrieval import TokenScorer

    scored = ScoredCaptions(name, captions, references)
    scorer: Any = evaluator.held_out_scorer
    if scorer is not None:
        texts = spoken(scored.first)
        scored.text = scorer.text_features(texts)
        scored.max_text_tokens, scored.scorer = scorer.max_text_tokens, scorer.signature
        # Other implementations of a scorer need not count tokens.
        scored.tokens = scorer.count_tokens(texts) if isinstance(scorer, TokenScorer) else None
    return scored


def add_clip_features(scored: Sequence[ScoredCaptions], scorer: Any, prefix: str) -> None:
    """Add features for CLIPScore, which the papers compute with a prefix before each caption."""
    from hf_captionrl.metrics.suites.suite_row import spoken

    for source in scored if prefix else ():
        source.clip_prefix = prefix
        source.clip_text = scorer.text_features([prefix + text for text in spoken(source.first)])


def count_copies(image_features: Any) -> int:
    """Number of images in a pool of features `(M, D)` that are copies of an earlier one: false negatives of its captions."""
    from hf_captionrl.retrieval.ranking import duplicate_images

    return sum(first != row for row, first in enumerate(duplicate_images(image_features).tolist()))


def perplexity_by(language_model: tuple[Any, Any] | None) -> Callable[[Sequence[str]], Mapping[str, Any]] | None:
    """Function from captions to their perplexity; `language_model` is `(model, tokenizer)` or None."""
    if language_model is None:
        return None
    from hf_captionrl.metrics import caption_perplexity

    model, tokenizer = language_model
    return lambda captions: caption_perplexity(list(captions), model, tokenizer)


def human_captions(evaluator: Evaluator) -> ScoredCaptions | None:
    """One random reference per image, compared with the others (SMILE, Table 1)."""
    from hf_captionrl.evaluation.evaluator import draw_references

    first, others = draw_references(evaluator.references, evaluator.seed)
    if not all(others):
        return None
    captions = [[caption, *rest] for caption, rest in zip(first, others, strict=True)]
    scored = score_captions(evaluator, REFERENCES, captions, others)
    scored.is_human = True
    return scored
