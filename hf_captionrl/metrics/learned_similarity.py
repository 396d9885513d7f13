"""Similarity to the references by trained models: BLEURT and entailment (NLI).

Legend: N captions, R pairs of a caption and a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.metrics.signature import signature

__all__ = ["PairModel", "bleurt", "entailment", "load_pair_model"]

BLEURT, NLI = "Elron/bleurt-large-512", "FacebookAI/roberta-large-mnli"
"""Models of the code of No Detail Left Behind. They must be in the Hub's cache, or be folders."""


PairModel = tuple[Any, Any]
"""A model for sequence classification of pairs of texts, and its tokenizer."""


def load_pair_model(name: str) -> PairModel:
    """Load a model for `bleurt` or `entailment`.

    Args:
        name: A folder or a name on the Hub.

    Returns:
        `tuple`: Model and tokenizer.

    Raises:
        RuntimeError: If the weights are missing.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise RuntimeError(
            f"not run: the weights of {name!r} cannot be loaded ({said}). Use a folder with the model, or download it first."
        ) from error
    return model.eval(), tokenizer


def _scored(pairs: Sequence[tuple[str, str]], model: Any, tokenizer: Any, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Score of each pair, `(R,)`; 16 pairs at once."""
    found = []
    with torch.no_grad():
        for start in range(0, len(pairs), 16):
            first, second = map(list, zip(*pairs[start : start + 16], strict=True))
            batch = tokenizer(first, second, padding=True, truncation=True, return_tensors="pt")
            found.append(score(model(**batch.to(model.device)).logits).double().cpu())
    return torch.cat(found)


def _best(
    candidates: Any, references: Any, named: str | PairModel, key: str, score_of: Any, swap: bool
) -> dict[str, Any]:
    """The best score over the references of each caption, and its mean."""
    texts, groups = check_captions(candidates, "candidates"), check_groups(references, "references", 1)
    if len(texts) != len(groups):
        raise ValueError(
            f"There are {len(texts)} captions and {len(groups)} groups of references. Pass one per caption."
        )
    model, tokenizer = load_pair_model(named) if isinstance(named, str) else named
    name = named if isinstance(named, str) else Path(model.name_or_path).name
    pairs = [(text, other) for text, group in zip(texts, groups, strict=True) for other in group]
    scores = _scored([(b, a) for a, b in pairs] if swap else pairs, model, tokenizer, score_of(model)).split(
        [len(group) for group in groups]
    )
    values = np.array([float(group.max()) for group in scores])
    return {key: float(values.mean()), "per_sample": values, "signature": signature(metric=key, model=name)}


def bleurt(candidates: Any, references: Any, *, model: str | PairModel = BLEURT) -> dict[str, Any]:
    """BLEURT (Sellam et al. 2020) of each caption with its best reference.

    Args:
        candidates: N captions.
        references: Their references.
        model: A BLEURT model for sequence classification: a folder, a name on the Hub, or what `load_pair_model` returns.

    Returns:
        `dict`: `bleurt`, the mean; `per_sample` `(N,)`; `signature`.
    """
    return _best(candidates, references, model, "bleurt", lambda _: lambda logits: logits[:, 0], False)


def entailment(
    candidates: Any, references: Any, *, model: str | PairModel = NLI, reverse: bool = False
) -> dict[str, Any]:
    """Probability that a reference follows from the caption, for the best reference.

    The code of No Detail Left Behind reads column 1 of the probabilities, which is "neutral" in `roberta-large-mnli`; here the
    column is the label that is called entailment.

    Args:
        candidates: N captions.
        references: Their references.
        model: A model for natural language inference: a folder, a name on the Hub, or what `load_pair_model` returns.
        reverse: Whether the caption follows from the reference instead.

    Returns:
        `dict`: `entailment`, the mean, in [0, 1]; `per_sample` `(N,)`; `signature`.
    """

    def column(loaded: Any) -> Callable[[Tensor], Tensor]:
        labels = {str(label).lower(): int(i) for i, label in loaded.config.id2label.items()}
        if "entailment" not in labels:
            raise ValueError(
                f"{loaded.name_or_path!r} has the labels {sorted(labels)}. Use a model with the label entailment."
            )
        return lambda logits: logits.softmax(1)[:, labels["entailment"]]

    return _best(candidates, references, model, "entailment", column, reverse)
