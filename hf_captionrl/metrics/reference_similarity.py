"""Similarity of captions to their references: BLEU, ROUGE-L, CIDEr and CIDEr-D, without Java.

All use the tokenizer of [`hf_captionrl.text.tokenize`] and equal pycocoevalcap's numbers to 1e-4 or better.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics.caption_checks import checked_pairs
from hf_captionrl.metrics.signature import signature
from hf_captionrl.text.bleu import bleu_matches, bleu_scores, corpus_bleu
from hf_captionrl.text.cider_d import CiderScorer
from hf_captionrl.text.encoding import encode_captions
from hf_captionrl.text.frequencies import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize

__all__ = ["bleu", "cider", "cider_d", "reference_matches", "rouge_l"]

_MAX_BETA = 1e6  # from here on only recall counts


def _cider(
    candidates: Any, references: Any, frequencies: DocumentFrequencies | None, eos: bool, sigma: float, variant: str
) -> dict[str, Any]:
    ours, theirs = checked_pairs(candidates, references)
    source = "corpus" if frequencies is None else "given"
    if frequencies is None:
        words: dict[str, int] = {}
        others, of = encode_captions(theirs, words, eos=eos)
        # Only the scores are needed, and they do not depend on n-grams of one image.
        frequencies = DocumentFrequencies.from_token_batch(others, of, words=words, eos=eos, min_documents=2)
        own, images = encode_captions(ours, known=words, eos=eos)
    elif frequencies.eos != eos:
        raise ValueError(
            f"eos is {eos} but the frequencies were counted with eos={frequencies.eos}. Use the same value for both."
        )
    elif frequencies.words is None:
        raise ValueError("These frequencies are of token ids. Count the words of the references.")
    else:
        unknown: dict[str, int] = {}
        own, images = encode_captions(ours, unknown, known=frequencies.words, eos=eos)
        others, of = encode_captions(theirs, unknown, known=frequencies.words, eos=eos)
    scorer = CiderScorer(frequencies, variant="cider_d" if variant == "cider_d" else "cider", sigma=sigma)
    scores = scorer.score_tokens(own.followed_by(others), images, of)
    return {
        variant: float(scores.mean()),
        "per_sample": scores.numpy(),
        "signature": signature(
            metric=variant,
            tok="ptb",
            df=source,
            documents=frequencies.num_documents,
            n=4,
            sigma=sigma if variant == "cider_d" else None,
            eos=eos,
        ),
    }


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
    Raises:
        ValueError: If the numbers of texts differ, a text is invalid (its index is named), or eos differs from that of frequencies.
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
    Raises:
        ValueError: If the numbers of texts differ, a text is invalid (its index is named), or eos differs from that of frequencies.
    """
    return _cider(candidates, references, frequencies, eos, 6.0, "cider")


def reference_matches(
    candidates: Iterable[Sequence[str]], references: Iterable[Sequence[str]], max_order: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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
        `dict`: `bleu_1` ... `bleu_<max_order>` of the corpus in [0, 1]; `per_sample`, an array (captions, orders) of
        sentence BLEU; `signature`.
    Raises:
        ValueError: If the numbers of texts differ or a text is invalid (its index is named).
    """
    counts = reference_matches(*checked_pairs(candidates, references), max_order)
    result: dict[str, Any] = {f"bleu_{n}": float(score) for n, score in enumerate(corpus_bleu(*counts), start=1)}
    return result | {
        "per_sample": bleu_scores(*counts).numpy(),
        "signature": signature(metric="bleu", tok="ptb", ref_length="closest", smooth="pycocoevalcap"),
    }


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
    Raises:
        ValueError: If the numbers of texts differ, a text is invalid (its index is named), or beta is negative.
    """
    if not 0 <= beta <= _MAX_BETA:
        raise ValueError(f"beta must be 0 or more, got {beta}. Use at most {_MAX_BETA:g}.")
    scores = []
    for group, texts in zip(*checked_pairs(candidates, references), strict=True):
        others = [ptb_tokenize(text) for text in texts]
        for caption in map(ptb_tokenize, group):
            # pycocoevalcap treats a caption of only punctuation as one empty word.
            words = caption or [""]
            common = [(_common(words, other or [""]), len(other or [""])) for other in others]
            precision = max(c for c, _ in common) / len(words)
            recall = max(c / size for c, size in common)
            scores.append(
                (1 + beta**2) * precision * recall / (recall + beta**2 * precision) if precision and recall else 0.0
            )
    return {
        "rouge_l": float(np.mean(scores)),
        "per_sample": np.array(scores),
        "signature": signature(metric="rouge_l", tok="ptb", beta=beta),
    }


def _common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence: one integer addition per word (Hyyro's bit-parallel algorithm)."""
    where: dict[str, int] = {}
    for i, word in enumerate(a):
        where[word] = where.get(word, 0) | 1 << i
    everything = (1 << len(a)) - 1
    state = everything
    for word in b:
        hit = state & where.get(word, 0)
        state = (state + hit | state - hit) & everything
    return len(a) - state.bit_count()
