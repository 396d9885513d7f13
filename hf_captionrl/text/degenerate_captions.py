"""Detects degenerate captions, which repeat phrases or words.

Legend: N captions, T words of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_ngrams, distinct_share, encode_words
from hf_captionrl.text.tokenize import ptb_tokenize_all

_PHRASE = 3  # words; two words are also repeated in ordinary captions: "a man next to a man"
_MIN_WORDS = 6  # shorter captions have too few words to judge how many differ
_MIN_DISTINCT_WORDS = 0.5
_CHUNK = 20_000  # captions at once: memory is captions x words of the longest one


def caption_words(captions: Sequence[str]) -> TokenBatch:
    """Words of captions by the rules of the Penn Treebank, without punctuation and in lower case."""
    return encode_words(ptb_tokenize_all(captions))


def count_words(batch: TokenBatch) -> NgramCounts:
    """Words and word pairs of each caption."""
    return count_ngrams(batch, 2, torch.arange(len(batch)))


def find_repeats(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Length in words of the longest repeated phrase of each caption `(N,)`, and whether a word is doubled `(N,)`.

    Compares the caption with itself column by column, as for the longest common substring. This takes 20 ms for 500
    captions with repetitions; counting n-grams of every length takes 150 ms.
    """
    lengths = batch.lengths.numpy()
    width = int(lengths.max(initial=0))
    longest: np.ndarray = np.zeros(len(lengths), dtype=np.int32)
    doubled: np.ndarray = np.zeros(len(lengths), dtype=bool)
    # Padding differs from every word and between columns, so that it is never a repetition.
    words = np.broadcast_to(-1 - np.arange(width), (len(lengths), width)).copy()  # (N, T)
    words[np.arange(width) < lengths[:, None]] = batch.tokens.numpy()
    words = np.ascontiguousarray(words.T)  # (T, N)
    # run[j] after column i: number of equal words up to and including i and j, for j > i.
    run: np.ndarray = np.zeros((width, len(lengths)), dtype=np.int32)
    for i in range(width - 1):
        same = words[i + 1 :] == words[i]  # (T - 1 - i, N)
        doubled |= same[0]
        run = (run[: width - 1 - i] + 1) * same
        np.maximum(longest, run.max(axis=0), out=longest)
    return torch.from_numpy(longest).long(), torch.from_numpy(doubled)


def mark_degenerate(counts: NgramCounts, repeats: Tensor, doubled: Tensor) -> Tensor:
    """Degenerate captions, `(N,)` booleans, from the results of `count_words` and `find_repeats`."""
    few = distinct_share(counts, 1, len(counts.lengths)) <= _MIN_DISTINCT_WORDS
    return (repeats >= _PHRASE) | doubled | (few & (counts.lengths >= _MIN_WORDS))


def degenerate(captions: Sequence[str]) -> list[bool]:
    """Which captions are degenerate.

    A caption is degenerate if a phrase of three or more words occurs twice, if a word occurs twice in a row, or if it has
    six or more words and at most half of them differ. Words follow the rules of the Penn Treebank, without punctuation and
    in lower case.

    Example:
        >>> degenerate(["a cat on a blue background on a blue background", "a man and a woman and a dog on a beach"])
        [True, False]
    """
    found: list[bool] = []
    for start in range(0, len(captions), _CHUNK):
        batch = caption_words(captions[start : start + _CHUNK])
        found += mark_degenerate(count_words(batch), *find_repeats(batch)).tolist()
    return found
