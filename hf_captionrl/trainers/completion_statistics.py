r"""What the captions of a step look like, in a few numbers, and which of them nobody would write.

Legend: N captions, T words of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_ngrams, distinct_share, encode_words
from hf_captionrl.text.tokenize import ptb_tokenize_all

__all__ = ["caption_flags", "caption_words", "completion_statistics", "degenerate", "describe_completions"]

_PHRASE = 3  # words; people do say two words twice: "a man next to a man"
_MIN_WORDS = 6  # shorter captions have too few words to judge how many differ
_MIN_DISTINCT_WORDS = 0.5


def caption_words(captions: Sequence[str]) -> TokenBatch:
    """Words of captions, by the Penn Treebank's rules, without punctuation and in lower case."""
    return encode_words(ptb_tokenize_all(captions))


def _count(batch: TokenBatch) -> NgramCounts:
    """Words and pairs, with each caption a group of its own."""
    return count_ngrams(batch, 2, torch.arange(len(batch)))


def _repeats(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """What each caption says again: words of the longest stretch that stands twice in it, and whether a word doubles.

    One column of the caption against itself after the other, as for the longest common substring: with n-grams of
    every length a step of 500 captions that loop took 150 ms, so 20.

    Returns:
        `(N,)` int64, 0 where no word stands twice, and `(N,)` booleans.
    """
    lengths = batch.lengths.numpy()
    width = int(lengths.max(initial=0))
    longest: np.ndarray = np.zeros(len(lengths), dtype=np.int32)
    doubled: np.ndarray = np.zeros(len(lengths), dtype=bool)
    # Padding differs from every word, and each column of it from the others, so it repeats nothing.
    words = np.broadcast_to(-1 - np.arange(width), (len(lengths), width)).copy()  # (N, T)
    words[np.arange(width) < lengths[:, None]] = batch.tokens.numpy()
    words = np.ascontiguousarray(words.T)  # (T, N)
    # run[j] after column i: how many words before i and before j, these included, are the same; j > i only.
    run: np.ndarray = np.zeros((width, len(lengths)), dtype=np.int32)
    for i in range(width - 1):
        same = words[i + 1 :] == words[i]  # (T - 1 - i, N)
        doubled |= same[0]
        run = (run[: width - 1 - i] + 1) * same
        np.maximum(longest, run.max(axis=0), out=longest)
    return torch.from_numpy(longest).long(), torch.from_numpy(doubled)


def _degenerate(counts: NgramCounts, repeats: Tensor, doubled: Tensor) -> Tensor:
    """Degenerate captions, `(N,)` booleans."""
    few = distinct_share(counts, 1, len(counts.lengths)) <= _MIN_DISTINCT_WORDS
    return (repeats >= _PHRASE) | doubled | (few & (counts.lengths >= _MIN_WORDS))


def degenerate(captions: Sequence[str]) -> list[bool]:
    """Which captions nobody would write.

    A caption is degenerate if it says three words or more twice, says a word twice in a row, or has six words or more of
    which at most half differ. Words are those of the Penn Treebank's rules, without punctuation and in lower case.

    Example:
        >>> degenerate(["a cat on a blue background on a blue background", "a man and a woman and a dog on a beach"])
        [True, False]
    """
    batch = caption_words(captions)
    return _degenerate(_count(batch), *_repeats(batch)).tolist()


def caption_flags(name: str, values: Any, number: int) -> Tensor:
    """Yes or no for each caption.

    Args:
        values (`torch.Tensor` of shape `(N,)`, or a sequence): The answers.

    Returns:
        `torch.Tensor` of shape `(N,)`: Booleans on the CPU.
    """
    flags = torch.as_tensor(values).detach().cpu().bool()
    if flags.shape != (number,):
        raise ValueError(f"{name} has shape {tuple(flags.shape)}. Give one for each of the {number} captions.")
    return flags


def describe_completions(captions: Sequence[str], ended: Any) -> tuple[dict[str, float], Tensor, Tensor]:
    """[`completion_statistics`], and what it knows of each caption.

    Args:
        ended (`torch.Tensor` of shape `(N,)`, or a sequence, *optional*): False where the length limit cut a caption.

    Returns:
        The statistics, which captions are degenerate `(N,)`, and how many words each has `(N,)`.
    """
    if not len(captions):
        raise ValueError("There are no captions. Describe a step that wrote at least one.")
    batch = caption_words(captions)
    counts = _count(batch)
    number, lengths = len(batch), batch.lengths
    repeats, doubled = _repeats(batch)
    bad = _degenerate(counts, repeats, doubled)
    p10, p50, p90 = torch.quantile(lengths.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    statistics = {"length_p10": p10, "length_p50": p50, "length_p90": p90}
    for order in (1, 2):
        long_enough = lengths >= order
        shares = distinct_share(counts, order, number, per="ngrams")[long_enough]
        # Nothing was said, so nothing was repeated; the share of empty captions tells.
        statistics[f"distinct_{order}"] = float(shares.mean()) if len(shares) else 1.0
    statistics |= {
        "distinct_captions": len(set(captions)) / number,
        "longest_repeat_max": float(repeats.max()),
        "longest_repeat_mean": float(repeats.double().mean()),
        "degenerate": float(bad.double().mean()),
        "empty": float((lengths == 0).double().mean()),
    }
    if ended is not None:
        statistics["clipped_ratio"] = float((~caption_flags("ended", ended, number)).double().mean())
    return statistics, bad, lengths


def completion_statistics(captions: Sequence[str], *, ended: Any | None = None) -> dict[str, float]:
    """Describe what was written in one step.

    Args:
        ended (`torch.Tensor` of shape `(N,)`, or a sequence, *optional*): False where the length limit cut a caption.

    Returns:
        longest n-gram that stands twice in a caption (the two may overlap); shares in [0, 1] that are `degenerate`,
    """
    return describe_completions(captions, ended)[0]
