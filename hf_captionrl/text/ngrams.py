"""Counting n-grams: the only place that does. BLEU, CIDEr and Div-n of metrics and rewards all start here.

An n-gram gets an integer by chaining: the id of its first n-1 words and its last word make a pair, and equal pairs get equal
ids. Ids are exact (nothing is hashed), and counting is sorting integers: no Python loop over captions. Works alike on the
words of captions and on token ids of a batch on the training device.

Legend: N captions, T tokens, E entries (caption, n-gram) with a count, U distinct n-grams.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

__all__ = ["NgramCounts", "TokenBatch", "count_in_group", "count_ngrams", "distinct_ids", "distinct_share", "encode_words"]


@dataclass(frozen=True)
class TokenBatch:
    """Captions as integers, one after the other without padding.

    Args:
        tokens (`torch.Tensor` of shape `(sum of lengths,)`): int64 word or token ids, not negative.
        lengths (`torch.Tensor` of shape `(N,)`): int64 number of tokens of each caption; may be 0.
    """

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def from_ids(cls, ids: Tensor, mask: Tensor) -> "TokenBatch":
        """Drop the padding of a batch of completions; stays on its device.

        Args:
            ids (`torch.Tensor` of shape `(N, T)`): Token ids.
            mask (`torch.Tensor` of shape `(N, T)`): True (or 1) at the tokens that count: EOS if it is to be scored,
                never padding. Tokens that count must not be negative.
        Returns:
            `TokenBatch`: The tokens kept, in order.
        Raises:
            ValueError: If shapes disagree or a kept id is negative.
        """
        if ids.ndim != 2 or ids.shape != mask.shape:
            raise ValueError(f"ids and mask must both be (N, T), got {tuple(ids.shape)} and {tuple(mask.shape)}.")
        kept = mask.bool()
        tokens = ids[kept].long()
        if len(tokens) and int(tokens.min()) < 0:
            raise ValueError("ids holds a negative id where mask is True (-100 of labels?). Mask it out.")
        return cls(tokens, kept.sum(dim=1))

    def __len__(self) -> int:
        return len(self.lengths)


def encode_words(
    captions: Iterable[Sequence[str]], vocabulary: dict[str, int] | None = None, *, known: Mapping[str, int] | None = None
) -> TokenBatch:
    """Words to integers.

    Args:
        captions: Tokenised captions.
        vocabulary: Word ids given so far; new words are added to it. `None` starts an empty one.
        known: Ids of a fixed vocabulary 0 ... len-1, looked up first; new words in `vocabulary` are numbered after it.
    Returns:
        `TokenBatch`: On the CPU.
    """
    vocabulary = {} if vocabulary is None else vocabulary
    captions = list(captions)
    words = list(chain.from_iterable(captions))
    if known is None:
        found = (vocabulary.setdefault(word, len(vocabulary)) for word in words)
        ids = np.fromiter(found, dtype=np.int64, count=len(words))
    else:
        # One pass in C for the known words, which are nearly all; Python only for the rest.
        ids = np.fromiter(map(known.get, words, repeat(-1)), dtype=np.int64, count=len(words))
        first = len(known)
        for i in np.flatnonzero(ids < 0).tolist():
            ids[i] = vocabulary.setdefault(words[i], first + len(vocabulary))
    lengths = np.fromiter(map(len, captions), dtype=np.int64, count=len(captions))
    return TokenBatch(torch.from_numpy(ids), torch.from_numpy(lengths))


def distinct_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Number equal integers alike.

    Args:
        keys (`torch.Tensor` of shape `(P,)`): int64 integers.
    Returns:
        `tuple` of the sorted distinct keys, of shape `(U,)`, and the position of every key among them, of shape `(P,)`.
    """
    if keys.device.type != "cpu":
        values, inverse = torch.unique(keys, return_inverse=True)
        return values, inverse
    # NumPy sorts plain integers with vector instructions, 4 to 10 times as fast as torch.unique on the CPU; with the
    # position in the low bits one plain sort also tells where each key came from, in half the time of argsort.
    array = keys.numpy()
    bits = max(len(array) - 1, 1).bit_length()
    if len(array) and int(array.min()) >= 0 and int(array.max()) < 2 ** (63 - bits):
        packed = (array << bits) | np.arange(len(array))
        packed.sort()
        order, ordered = packed & ((1 << bits) - 1), packed >> bits
    else:
        order = np.argsort(array)
        ordered = array.take(order)
    starts = np.ones(len(array), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=starts[1:])
    ids = np.empty(len(array), dtype=np.int64)
    ids[order] = np.cumsum(starts) - 1
    return torch.from_numpy(ordered.compress(starts)), torch.from_numpy(ids)


@dataclass(frozen=True)
class NgramCounts:
    """How often each n-gram stands in each caption.

    Args:
        lengths (`torch.Tensor` of shape `(N,)`): Tokens of each caption.
        rows (`torch.Tensor` of shape `(E,)`): Caption of each entry.
        ids (`torch.Tensor` of shape `(E,)`): N-gram of each entry, in [0, U); entries are sorted by row, then id.
        counts (`torch.Tensor` of shape `(E,)`): How often it stands there, at least 1.
        offsets: N-grams of order n (from 1) have the ids `offsets[n-1]` ... `offsets[n] - 1`.
        prefixes (`torch.Tensor` of shape `(U,)`): Id of the n-gram without its last word; -1 for single words.
        words (`torch.Tensor` of shape `(U,)`): Token id of the last word.
    """

    lengths: Tensor
    rows: Tensor
    ids: Tensor
    counts: Tensor
    offsets: tuple[int, ...]
    prefixes: Tensor
    words: Tensor

    @property
    def max_order(self) -> int:
        """The longest n counted."""
        return len(self.offsets) - 1

    @property
    def num_distinct(self) -> int:
        """U, the number of distinct n-grams of all orders."""
        return self.offsets[-1]

    def orders(self) -> Tensor:
        """Order of each entry, from 0 for single words.

        Returns:
            `torch.Tensor` of shape `(E,)`: int64 orders.
        """
        borders = torch.tensor(self.offsets[1:-1], dtype=torch.long, device=self.ids.device)
        return torch.bucketize(self.ids, borders, right=True)

    def totals(self) -> Tensor:
        """N-grams of each caption and order, repeats counted.

        Returns:
            `torch.Tensor` of shape `(N, max_order)`: `max(0, length - n + 1)`.
        """
        steps = torch.arange(self.max_order, device=self.lengths.device)
        return (self.lengths[:, None] - steps).clamp(min=0)


def count_ngrams(batch: TokenBatch, max_order: int = 4) -> NgramCounts:
    """Count all n-grams of all captions.

    Args:
        batch: Captions as integers.
        max_order: Longest n-gram.
    Returns:
        `NgramCounts`: On the device of the batch.
    Raises:
        ValueError: If `max_order` is not positive.
    """
    if max_order < 1:
        raise ValueError(f"max_order must be at least 1, got {max_order}.")
    # index_select throughout: tensor[index] takes four times as long on the CPU.
    tokens, lengths, device = batch.tokens, batch.lengths, batch.tokens.device
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    starts = torch.arange(len(tokens), device=device)
    # How many tokens follow each position in its caption decides which orders start there.
    left = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths) - starts
    words, word = distinct_ids(tokens)
    base = max(len(words), 1)
    ids = word
    all_rows, all_ids, all_prefixes, all_words, offsets = [row], [ids], [torch.full_like(words, -1)], [words], [0, len(words)]
    for order in range(2, max_order + 1):
        fits = torch.nonzero(left >= order).flatten()
        starts, left, row = starts.index_select(0, fits), left.index_select(0, fits), row.index_select(0, fits)
        prefix, last = ids.index_select(0, fits), word.index_select(0, starts + (order - 1))
        keys, ids = distinct_ids(prefix * base + last)
        all_prefixes.append(torch.div(keys, base, rounding_mode="floor") + offsets[-2])
        all_words.append(words.index_select(0, keys % base))
        all_rows.append(row)
        all_ids.append(ids + offsets[-1])
        offsets.append(offsets[-1] + len(keys))
    rows, ids = torch.cat(all_rows), torch.cat(all_ids)
    keys, inverse = distinct_ids(rows * max(offsets[-1], 1) + ids)
    member = torch.empty_like(keys).scatter_(0, inverse, torch.arange(len(ids), device=device))  # any n-gram of each entry
    return NgramCounts(
        lengths=lengths,
        rows=rows.index_select(0, member),
        ids=ids.index_select(0, member),
        counts=torch.bincount(inverse, minlength=len(keys)),
        offsets=tuple(offsets),
        prefixes=torch.cat(all_prefixes),
        words=torch.cat(all_words),
    )


def count_in_group(counts: NgramCounts, groups: Tensor, slots: Tensor, num_entries: int | None = None) -> Tensor:
    """For each n-gram of each caption: how often it stands in the captions of its group.

    Args:
        counts: Counts of all captions, the ones looked at and the ones looked into.
        groups (`torch.Tensor` of shape `(N,)`): Group (image) of each caption.
        slots (`torch.Tensor` of shape `(N,)`): Column of the result a caption is looked into at, unique in its group;
            -1 for captions that are only looked at.
        num_entries: Answer for the first entries only; `None` means all.
    Returns:
        `torch.Tensor` of shape `(E', S)`: float64 counts, S the largest slot + 1; 0 where a group has no such slot.
    """
    num_slots = max(int(slots.max()) + 1, 0) if len(slots) else 0
    group = groups.index_select(0, counts.rows)
    keys, columns = distinct_ids(group * max(counts.num_distinct, 1) + counts.ids)
    # One column more takes what is not looked into: cheaper than picking the others out.
    slot = torch.where(slots < 0, num_slots, slots).index_select(0, counts.rows)
    table = torch.zeros(len(keys), num_slots + 1, dtype=torch.float64, device=keys.device)
    table.view(-1).scatter_(0, columns * (num_slots + 1) + slot, counts.counts.double())
    return table.index_select(0, columns[:num_entries])[:, :num_slots]


def distinct_share(counts: NgramCounts, groups: Tensor, num_groups: int, order: int, *, per: str = "words") -> Tensor:
    """Distinct n-grams of each group of captions over its words (Div-n).

    Args:
        counts: Counts of all captions.
        groups (`torch.Tensor` of shape `(N,)`): Group of each caption, in [0, num_groups).
        num_groups: How many groups there are.
        order: n.
        per: `"words"` divides by the words of the group, as SLE and Div-n's authors do; `"ngrams"` by its n-grams.
    Returns:
        `torch.Tensor` of shape `(num_groups,)`: float64 shares in [0, 1]; 0 for a group without words.
    Raises:
        ValueError: If `per` is neither, or `order` was not counted.
    """
    if per not in ("words", "ngrams"):
        raise ValueError(f"per must be 'words' or 'ngrams', got {per!r}.")
    if not 1 <= order <= counts.max_order:
        raise ValueError(f"order must be between 1 and {counts.max_order}, the longest n-gram counted, got {order}.")
    wanted = (counts.ids >= counts.offsets[order - 1]) & (counts.ids < counts.offsets[order])
    keys, _ = distinct_ids(groups[counts.rows[wanted]] * counts.num_distinct + counts.ids[wanted])
    distinct = torch.bincount(
        torch.div(keys, max(counts.num_distinct, 1), rounding_mode="floor"), minlength=num_groups
    ).double()
    sizes = counts.lengths if per == "words" else counts.totals()[:, order - 1]
    total = torch.zeros(num_groups, dtype=torch.float64, device=distinct.device).index_add_(0, groups, sizes.double())
    return distinct / total.clamp(min=1)
