"""Detects degenerate captions, which repeat phrases, words or characters.

Legend: N captions, W words of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_ngrams, distinct_share, encode_words
from hf_captionrl.text.tokenize import ptb_tokenize_all

_PHRASE = 3  # words; two words are also repeated in ordinary captions: "a man next to a man"
_MIN_WORDS = 6  # shorter captions have too few words to judge how many differ
_MIN_DISTINCT_WORDS = 0.5
_RUN = re.compile(r"(.{1,40}?)\1{5,}", re.DOTALL)  # the same characters six times without a blank
_CHUNK = 20_000  # captions at once, to limit the memory


def caption_words(captions: Sequence[str]) -> TokenBatch:
    """Words of captions by the rules of the Penn Treebank, without punctuation and in lower case."""
    return encode_words(ptb_tokenize_all(captions))


def count_words(batch: TokenBatch) -> NgramCounts:
    """Words and word pairs of each caption."""
    return count_ngrams(batch, 2, torch.arange(len(batch)))


def find_repeats(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Length in words of the longest repeated phrase of each caption `(N,)`, and whether a word is doubled `(N,)`.

    Every phrase of 1, 2, 4, ... words gets a number, the pair of those of its halves, as long as one occurs twice; the longest
    one then follows from its binary digits. A caption of W words takes W log W steps.
    """
    lengths, tokens = batch.lengths.numpy(), batch.tokens.numpy()
    row: np.ndarray = np.repeat(np.arange(len(lengths)), lengths)  # (W,) caption of each word
    left = np.cumsum(lengths)[row] - np.arange(len(row))  # (W,) words from here to the end of the caption
    doubled: np.ndarray = np.zeros(len(lengths), dtype=bool)
    doubled[row[:-1][(tokens[1:] == tokens[:-1]) & (left[:-1] > 1)]] = True
    longest: np.ndarray = np.zeros(len(lengths), dtype=np.int64)
    if not len(row):
        return torch.from_numpy(longest), torch.from_numpy(doubled)

    def phrases(start: np.ndarray, rest: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Numbers of the phrases of `start`, of `size` words, followed by `rest`; -1 if the caption ends before."""
        found = np.full(len(row), -1)
        at = np.flatnonzero(left > size)
        at = at[rest[at + size[at]] >= 0]
        pairs = start[at] * np.int64(len(row) + 1) + rest[at + size[at]]
        found[at] = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        return found

    def repeated(phrase: np.ndarray) -> np.ndarray:
        """The captions in which a phrase occurs twice."""
        at = np.flatnonzero(phrase >= 0)
        captions: np.ndarray = np.zeros(len(lengths), dtype=bool)
        captions[row[at][np.bincount(phrase[at])[phrase[at]] > 1]] = True
        return captions

    none: np.ndarray = np.zeros(len(row), dtype=np.int64)
    levels = [phrases(row, np.unique(tokens, return_inverse=True)[1].reshape(-1), none)]
    while repeated(levels[-1]).any():
        levels.append(phrases(levels[-1], levels[-1], none + 2 ** (len(levels) - 1)))
    phrase = row
    for power in range(len(levels) - 2, -1, -1):
        longer = phrases(phrase, levels[power], longest[row])
        more = repeated(longer)
        phrase = np.where(more[row], longer, phrase)
        longest += more * 2**power
    return torch.from_numpy(longest), torch.from_numpy(doubled)


def is_empty(caption: str) -> bool:
    """Whether a caption has no letter or digit; vowel signs of Hindi follow a letter."""
    return not any(map(str.isalnum, caption))


def _is_run(caption: str) -> bool:
    """Whether a caption has characters but no letter or digit, or consists half of runs of the same characters."""
    if is_empty(caption):
        return bool(caption.strip())
    pieces = caption.split()
    runs = (sum(len(run[0]) for run in _RUN.finditer(piece)) for piece in pieces if len(piece) >= _MIN_WORDS)
    return 2 * max(runs, default=0) >= sum(map(len, pieces))


def mark_degenerate(captions: Sequence[str], counts: NgramCounts, repeats: Tensor, doubled: Tensor) -> Tensor:
    """Degenerate captions, `(N,)` booleans, from the results of `count_words` and `find_repeats`."""
    few = distinct_share(counts, 1, len(counts.lengths)) <= _MIN_DISTINCT_WORDS
    runs = torch.tensor(list(map(_is_run, captions)), dtype=torch.bool)
    return runs | (repeats >= _PHRASE) | doubled | (few & (counts.lengths >= _MIN_WORDS))


def degenerate(captions: Sequence[str]) -> list[bool]:
    """Which captions are degenerate.

    A caption is degenerate if a phrase of three or more words occurs twice, if a word occurs twice in a row, or if it has
    six or more words and at most half of them differ. Words follow the rules of the Penn Treebank, without punctuation and
    in lower case. So is a caption that is not blank but has no letter or digit ("..."), or that consists half of the same
    characters six or more times without a blank ("aaaaaa").

    Example:
        >>> degenerate(["a cat on a blue background on a blue background", "a man and a woman and a dog on a beach"])
        [True, False]
    """
    found: list[bool] = []
    for start in range(0, len(captions), _CHUNK):
        texts = captions[start : start + _CHUNK]
        batch = caption_words(texts)
        found += mark_degenerate(texts, count_words(batch), *find_repeats(batch)).tolist()
    return found
