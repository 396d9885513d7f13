"""Similarity of captions to their references: BLEU, ROUGE-L, CIDEr and CIDEr-D without Java; BLEURT and entailment by models.

The first four use the tokenizer of [`hf_captionrl.text.tokenize`] and equal pycocoevalcap's numbers to 1e-4 or better.
Legend: N captions, R pairs of a caption and a reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_captions, check_groups, checked_pairs
from hf_captionrl.text.bleu import bleu_matches, bleu_scores, corpus_bleu
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.tokenize import encode_captions, ptb_tokenize
from hf_captionrl.utils.io import check_unicode


def _cider(
    candidates: Any, references: Any, frequencies: DocumentFrequencies | None, eos: bool, sigma: float, variant: Any
) -> dict[str, Any]:
    ours, theirs = checked_pairs(candidates, references)
    counted: dict[str, Any] = {"df": "corpus" if frequencies is None else "given"}
    if frequencies is None:
        words: dict[str, int] = {}
        others, of = encode_captions(theirs, words, eos=eos)
        # Only the scores are needed, and they do not depend on n-grams of one image.
        frequencies = DocumentFrequencies.from_token_batch(others, of, words=words, eos=eos, min_documents=2)
        own, images = encode_captions(ours, known=words, eos=eos)
    elif frequencies.eos != eos:
        raise ValueError(f"eos is {eos}, but the frequencies were counted with {frequencies.eos}. Use the same.")
    elif frequencies.words is None:
        raise ValueError("These frequencies are of token ids. Count the words of the references.")
    else:
        unknown: dict[str, int] = {}
        own, images = encode_captions(ours, unknown, known=frequencies.words, eos=eos)
        others, of = encode_captions(theirs, unknown, known=frequencies.words, eos=eos)
    scorer = CiderScorer(frequencies, variant=variant, sigma=sigma)
    scores = scorer.score_tokens(own.followed_by(others), images, of)
    counted |= {"documents": frequencies.num_documents, "n": 4, "sigma": sigma if variant == "cider_d" else None}
    named = signature(metric=variant, tok="ptb", **counted, eos=eos)
    return {variant: float(scores.mean()), "per_sample": scores.numpy(), "signature": named}


def cider_d(
    candidates: Any,
    references: Any,
    *,
    frequencies: DocumentFrequencies | None = None,
    eos: bool = False,
    sigma: float = 6.0,
) -> dict[str, Any]:
    """CIDEr-D, the metric that pycocoevalcap and most papers call "CIDEr".

    Reference: Vedantam et al. 2015, Section 6. See [`hf_captionrl.text.cider_d.CiderScorer`] for the formula.

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
        frequencies: Document frequencies of a training set; `None`: those of `references`, as in pycocoevalcap;
            every score of a single image is then 0.
        eos: Whether to add an end-of-sequence word to every caption, so that endings are scored.
        sigma: Width of the length penalty, in words.
    Returns:
        `dict`: `cider_d`, the mean in [0, 10] (papers multiply it by 100); `per_sample`; `signature`.
    """
    return _cider(candidates, references, frequencies, eos, sigma, "cider_d")


def cider(
    candidates: Any, references: Any, *, frequencies: DocumentFrequencies | None = None, eos: bool = False
) -> dict[str, Any]:
    """Plain CIDEr, without clipped counts and length penalty. Papers that report "CIDEr" use [`cider_d`].

    Reference: Vedantam et al. 2015, Section 5 (without stemming, as in the authors' Python code).

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
        frequencies: Document frequencies of a training set; `None`: those of `references`.
        eos: Whether to add an end-of-sequence word to every caption.
    Returns:
        `dict`: `cider`, the mean in [0, 10]; `per_sample`; `signature`.
    """
    return _cider(candidates, references, frequencies, eos, 6.0, "cider")


def reference_matches(
    candidates: Iterable[Sequence[str]], references: Iterable[Sequence[str]], max_order: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[`hf_captionrl.text.bleu.bleu_matches`] of texts that are checked or valid."""
    words: dict[str, int] = {}
    ours, images = encode_captions(candidates, words)
    theirs, of = encode_captions(references, words)
    return bleu_matches(ours.followed_by(theirs), images, of, max_order)


def bleu(candidates: Any, references: Any, *, max_order: int = 4) -> dict[str, Any]:
    """BLEU-1 to BLEU-4 against all references of an image, closest reference length.

    Reference: Papineni et al. 2002, with pycocoevalcap's constants; equal to sacrebleu without smoothing to 1e-6.

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
        max_order: Longest n-gram.
    Returns:
        `dict`: `bleu_1` ... `bleu_<max_order>` of the corpus in [0, 1]; `per_sample`, sentence BLEU of each order by the
        same names; `signature`.
    """
    counts = reference_matches(*checked_pairs(candidates, references), max_order)
    result: dict[str, Any] = {f"bleu_{n}": float(score) for n, score in enumerate(corpus_bleu(*counts), start=1)}
    named = signature(metric="bleu", tok="ptb", ref_length="closest", smooth="pycocoevalcap")
    sentences = dict(zip(result, bleu_scores(*counts).numpy().T, strict=True))
    return result | {"per_sample": sentences, "signature": named}


def rouge_l(candidates: Any, references: Any, *, beta: float = 1.2) -> dict[str, Any]:
    r"""ROUGE-L: the longest common subsequence with the references.

    Reference: Lin and Och 2004; `F = (1 + beta^2) P R / (R + beta^2 P)` with the best P and the best R over
    references.

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
        beta: Weight of recall.
    Returns:
        `dict`: `rouge_l`, the mean in [0, 1]; `per_sample`; `signature`.
    """
    if not 0 <= beta <= 1e6:  # from there on only recall counts
        raise ValueError(f"beta must be 0 or more, got {beta}. Use at most 1e+06.")
    scores = []
    for group, texts in zip(*checked_pairs(candidates, references), strict=True):
        others = [ptb_tokenize(text) for text in texts]
        for caption in map(ptb_tokenize, group):
            # pycocoevalcap treats a caption of only punctuation as one empty word.
            words = caption or [""]
            common = [(_common(words, other or [""]), len(other or [""])) for other in others]
            precision = max(c for c, _ in common) / len(words)
            recall = max(c / size for c, size in common)
            below = recall + beta**2 * precision
            scores.append((1 + beta**2) * precision * recall / below if precision and recall else 0.0)
    named = signature(metric="rouge_l", tok="ptb", beta=beta)
    return {"rouge_l": float(np.mean(scores)), "per_sample": np.array(scores), "signature": named}


def _common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence: one integer addition per word (Hyyro's bit-parallel algorithm)."""
    where: dict[str, int] = {}
    for i, word in enumerate(a):
        where[word] = where.get(word, 0) | 1 << i
    everything = state = (1 << len(a)) - 1
    for word in b:
        hit = state & where.get(word, 0)
        state = (state + hit | state - hit) & everything
    return len(a) - state.bit_count()


# --- By trained models -----------------------------------------------------------------------------------------------

BLEURT, NLI = "Elron/bleurt-large-512", "FacebookAI/roberta-large-mnli"
"""Models of the code of No Detail Left Behind. They must be in the Hub's cache, or be folders."""

PairModel = tuple[Any, Any]
"""A model for sequence classification of pairs of texts, and its tokenizer."""


def load_pair_model(name: str) -> PairModel:
    """Model and tokenizer for `bleurt` or `entailment`, from a folder or a name on the Hub; RuntimeError without weights."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        remedy = "Use a folder with the model, or download it first."
        raise RuntimeError(f"not run: the weights of {name!r} cannot be loaded ({said}). {remedy}") from error
    return model.eval(), tokenizer


def _best(
    candidates: Any,
    references: Any,
    named: str | PairModel,
    key: str,
    swap: bool,
    score: Callable[[Any, Tensor], Tensor],
) -> dict[str, Any]:
    """The best score over the references of each caption, and its mean; 16 pairs at once."""
    texts = check_captions(candidates, "candidates")
    groups = check_groups(references, "references", len(texts))
    model, tokenizer = load_pair_model(named) if isinstance(named, str) else named
    name = named if isinstance(named, str) else Path(model.name_or_path).name
    for text in [*texts, *itertools.chain.from_iterable(groups)]:
        check_unicode(text, f"The caption {text!a}")
    pairs = [(text, other) for text, group in zip(texts, groups, strict=True) for other in group]
    found = []
    with torch.no_grad():
        for start in range(0, len(pairs), 16):
            first, second = map(list, zip(*pairs[start : start + 16], strict=True))
            both = (second, first) if swap else (first, second)
            batch = tokenizer(*both, padding=True, truncation=True, return_tensors="pt")
            found.append(score(model, model(**batch.to(model.device)).logits).double().cpu())
    values = np.array([float(scores.max()) for scores in torch.cat(found).split(list(map(len, groups)))])
    return {key: float(values.mean()), "per_sample": values, "signature": signature(metric=key, model=name)}


def bleurt(candidates: Any, references: Any, *, model: str | PairModel = BLEURT) -> dict[str, Any]:
    """BLEURT (Sellam et al. 2020) of each caption with its best reference: `bleurt`, the mean; `per_sample`; `signature`."""
    return _best(candidates, references, model, "bleurt", False, lambda _, logits: logits[:, 0])


def entailment(
    candidates: Any, references: Any, *, model: str | PairModel = NLI, reverse: bool = False
) -> dict[str, Any]:
    """Probability that a reference follows from the caption (`reverse`: the caption from it), for the best reference.

    The code of No Detail Left Behind reads column 1 of the probabilities, which is "neutral" in `roberta-large-mnli`; here the
    column is the label that is called entailment. Returns `entailment`, the mean, in [0, 1]; `per_sample`; `signature`.
    """

    def probability(loaded: Any, logits: Tensor) -> Tensor:
        labels = {str(label).lower(): int(i) for i, label in loaded.config.id2label.items()}
        if "entailment" not in labels:
            name = loaded.name_or_path
            raise ValueError(f"{name!r} has the labels {sorted(labels)}. Use a model with the label entailment.")
        return logits.softmax(1)[:, labels["entailment"]]

    return _best(candidates, references, model, "entailment", reverse, probability)
