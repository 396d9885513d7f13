"""Captions compared with references: BLEU, ROUGE-L, CIDEr, CIDEr-D, METEOR and SPICE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_groups
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import check_tokenize, ptb_tokenize, split_characters

_WITHOUT_JAVA = ("bleu", "rouge_l", "cider", "cider_d")
_ALL = (*_WITHOUT_JAVA, "meteor", "spice")


def compute(
    predictions: Sequence[Any],
    references: Sequence[Sequence[str]],
    *,
    which: str | Sequence[str] = _WITHOUT_JAVA,
    frequencies: Any = None,
    eos: bool = False,
    sigma: float = 6.0,
    max_order: int = 4,
    beta: float = 1.2,
    tokenize: str = "ptb",
) -> dict[str, Any]:
    """Call the chosen metrics and join their results; a metric whose Java program is missing becomes a reason."""
    names = list(_ALL) if which == "all" else [which] if isinstance(which, str) else list(dict.fromkeys(which))
    if not names or not set(names) <= set(_ALL):
        raise ValueError(f"which must be some of {list(_ALL)}, or 'all', got {which!r}.")
    by_character = check_tokenize(tokenize, predictions)
    if by_character:
        predictions, references = split_characters(predictions), split_characters(references)
    if isinstance(frequencies, str | os.PathLike):
        frequencies = DocumentFrequencies.load(frequencies)
    elif frequencies is not None and not isinstance(frequencies, DocumentFrequencies):
        groups = check_groups(split_characters(frequencies) if by_character else frequencies, "frequencies")
        words = [[ptb_tokenize(text) for text in group] for group in groups]
        frequencies = DocumentFrequencies.from_references(words, eos=eos)
    options: dict[str, dict[str, Any]] = {
        "bleu": {"max_order": max_order},
        "rouge_l": {"beta": beta},
        "cider": {"frequencies": frequencies, "eos": eos},
        "cider_d": {"frequencies": frequencies, "eos": eos, "sigma": sigma},
    }
    result: dict[str, Any] = {}
    per_sample: dict[str, Any] = {}
    signatures = []
    for name in names:
        try:
            one = getattr(metrics, name)(predictions, references, **options.get(name, {}))
        except RuntimeError as error:
            result |= {name: None, f"{name}_reason": str(error)}
            continue
        signatures.append(one.pop("signature"))
        values = one.pop("per_sample")
        per_sample |= values if isinstance(values, dict) else {name: values}
        if name == "spice":
            result["spice_subsets"] = one.pop("subsets")
        result |= one
    joined = " + ".join(signatures) or signature(metric="caption_nlg", ran="none")
    return result | {"per_sample": per_sample, "signature": joined.replace("tok:ptb", f"tok:{tokenize}")}


class CaptionNlg(metric.CaptionMetric):
    """Caption NLG: BLEU, ROUGE-L, CIDEr, CIDEr-D."""

    about, function = DESCRIPTIONS["caption_nlg"], staticmethod(compute)
