"""Diversity of captions: of the captions of an image, and of a whole set.

Legend: B images, G captions per image, N captions.
"""

import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_captionrl.metrics.caption_checks import as_sequence, check_captions, checked_captions, checked_groups
from hf_captionrl.metrics.signature import signature
from hf_captionrl.text.bleu import bleu_scores, corpus_bleu, sibling_bleu
from hf_captionrl.text.encoding import encode_captions
from hf_captionrl.text.ngrams import TokenBatch, count_ngrams, distinct_share, group_blocks
from hf_captionrl.text.tokenize import ptb_tokenize

__all__ = ["caption_diversity", "caption_statistics", "vocabulary_size"]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def caption_statistics(captions: Any) -> dict[str, Any]:
    """Length and lexical diversity of a set of captions, as defined in SMILE.

    Reference: Yue et al. 2023, Section 4.1: the five COCO reference sets give 3.7 to 4.2 (the paper says 4.1).

    Args:
        captions: One caption per image.
    Returns:
        `dict`: `length`, mean number of whitespace-separated words; `lexical_diversity`, distinct words in thousands, case kept
        and punctuation removed; `per_sample`, the lengths; `signature`.
    Raises:
        ValueError: If captions is one string or empty, or a caption is invalid (its index is named).
    """
    lengths: list[int] = []
    words: set[str] = set()
    for text in checked_captions(captions):
        lengths.append(len(text.split()))
        words.update(text.translate(_NO_PUNCTUATION).split())
    return {
        "length": sum(lengths) / len(lengths),
        "lexical_diversity": len(words) / 1000,
        "per_sample": lengths,
        "signature": signature(metric="caption_statistics", words="whitespace", case="kept", punctuation="removed"),
    }


def vocabulary_size(words: Iterable[Sequence[str]], min_frequency: int) -> int:
    """Number of words that occur at least `min_frequency` times."""
    _check_min_frequency(min_frequency)
    frequency = Counter(word for caption in words for word in caption)
    return sum(count >= min_frequency for count in frequency.values())


def _check_min_frequency(min_frequency: int) -> None:
    if min_frequency < 1:
        raise ValueError(f"min_frequency must be at least 1, got {min_frequency}.")


def caption_diversity(
    captions: Any,
    *,
    training_captions: Iterable[str] | None = None,
    min_frequency: int = 5,
    max_order: int = 4,
) -> dict[str, Any]:
    """Diversity of several captions per image.

    Reference: Chen and Jin 2020 (SLE), Table 4; Shetty et al. 2017. Div-n divides distinct n-grams by *words* (other
    toolkits divide by n-grams: 0.792 instead of 0.722 on the same captions). mBLEU-4 compares each caption with the other
    captions of its image as references; lower is more diverse.

    Args:
        captions: Captions of each image, at least two.
        training_captions: Captions of the training set, needed for `novel_captions`.
        min_frequency: Number of occurrences from which a word counts for `vocabulary_size`.
        max_order: Longest n-gram of mBLEU.
    Returns:
        `dict`, shares in [0, 1]: `div_1`, `div_2`, means over images; `mbleu_1` ... `mbleu_4` of the corpus (the k-th
        captions of all images against the others, mean over k); `mbleu_1_per_image` ... (mean sentence BLEU over
        captions); `unique_captions`, distinct captions divided by captions; `length`, `lexical_diversity` as in
        [`caption_statistics`]; `vocabulary_size`; `novel_captions` (only with `training_captions`); `per_image`,
        arrays of `div_1`, `div_2` and `mbleu_<max_order>`; `signature`.
    Raises:
        ValueError: If an image has fewer than two captions or a caption is invalid (its index is named).
    """
    groups = as_sequence(captions, "captions")
    batch, images = encode_captions(checked_groups(groups, "captions", minimum=2))
    _check_min_frequency(min_frequency)
    vocabulary = int((torch.bincount(batch.tokens) >= min_frequency).sum())
    sizes = torch.bincount(images)
    slot = torch.arange(len(batch)) - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    shares = [
        [distinct_share(counts, n, int(own.max()) + 1) for n in (1, 2)]
        for part, (own,) in group_blocks(batch, images)
        for counts in [count_ngrams(part, 2, own)]
    ]
    div = {f"div_{n}": torch.cat(found) for n, found in zip((1, 2), zip(*shares, strict=True), strict=True)}
    siblings = sibling_bleu(batch, images, max_order)
    sentence = bleu_scores(*siblings)  # (N, n)
    per_image = (
        torch.zeros(len(groups), max_order, dtype=torch.float64).index_add_(0, images, sentence) / sizes[:, None]
    )
    corpus = torch.stack([corpus_bleu(*(part[slot == k] for part in siblings)) for k in range(int(sizes.max()))]).mean(
        0
    )
    result: dict[str, Any] = {name: float(share.mean()) for name, share in div.items()}
    result |= {f"mbleu_{n}": float(score) for n, score in enumerate(corpus, start=1)}
    result |= {f"mbleu_{n}_per_image": float(score) for n, score in enumerate(per_image.mean(0), start=1)}
    result["unique_captions"] = _num_distinct(batch) / len(batch)
    basic = caption_statistics(caption for group in groups for caption in group)
    result |= {"length": basic["length"], "lexical_diversity": basic["lexical_diversity"]}
    result["vocabulary_size"] = vocabulary
    if training_captions is not None:
        known = {" ".join(ptb_tokenize(caption)) for caption in check_captions(training_captions, "training_captions")}
        texts = (" ".join(ptb_tokenize(caption)) for group in groups for caption in group)
        result["novel_captions"] = sum(text not in known for text in texts) / len(batch)
    result["per_image"] = {name: share.numpy() for name, share in div.items()}
    result["per_image"][f"mbleu_{max_order}"] = per_image[:, -1].numpy()
    result["signature"] = signature(
        metric="caption_diversity",
        tok="ptb",
        div="distinct/words",
        mbleu="corpus",
        captions="-".join(map(str, sizes.unique().tolist())),
        vocabulary=f">={min_frequency}",
    )
    return result


def _num_distinct(batch: TokenBatch) -> int:
    """Number of different captions, those of one length after the other."""
    lengths = batch.lengths
    starts = torch.cumsum(lengths, 0) - lengths
    found = 0
    for length in lengths.unique().tolist():
        places = starts[lengths == length][:, None] + torch.arange(length)
        found += len({row.tobytes() for row in batch.tokens[places].numpy()})
    return found
