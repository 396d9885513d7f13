"""Scorer and language model of `captionrl evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

__all__ = ["held_out_scorer_name", "load_evaluators"]


def _shown(name: str) -> str:
    """A model's name for tables and published files: only the last part of a folder."""
    return Path(name).name if Path(name).exists() or Path(name).is_absolute() else name


def held_out_scorer_name(dataset: str, name: str | None) -> str:
    """The scorer that evaluates; None stands for the default of the data set."""
    from hf_captionrl.evaluation.arguments import EvaluationArguments

    wanted = EvaluationArguments(held_out_scorer_name_or_path=name)
    wanted.resolve(dataset, is_training=False)
    return str(wanted.held_out_scorer_name_or_path)


def load_evaluators(
    dataset: str, scorer_name: str | None, language_model_name: str | None
) -> tuple[Any, Any, dict[str, str]]:
    """Load scorer and language model; None stands for the default of the data set.

    Returns the scorer or None, `(model, tokenizer)` or None, and the reasons why one could not be loaded, for the tables.
    """
    from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer

    wanted = EvaluationArguments(held_out_scorer_name_or_path=scorer_name, perplexity_name_or_path=language_model_name)
    wanted.resolve(dataset, is_training=False)
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
