"""Counts n-grams for BLEU, CIDEr and Div-n, in metrics and rewards.

The id of an n-gram is derived from a pair: the id of its first n-1 words, and its last word. Equal pairs get equal ids. Ids
are exact (there are no hashes), and counting is sorting of integers, without a Python loop over captions. It works on words
of captions and on token ids on the training device.

Legend: N captions, T tokens, U distinct n-grams, E entries (caption, n-gram), C columns (group, n-gram), S slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

import numpy as np
import torch
from torch import Tensor

# Captions whose n-grams are counted together if images do not depend on each other: about 50 MiB.
_CAPTIONS_AT_ONCE = 8192


@dataclass(frozen=True)
class TokenBatch:
    """Captions as integers, concatenated without padding."""

    tokens: Tensor  # (sum of lengths,): word or token ids, not negative; int64, or int32 to hold many captions
    lengths: Tensor  # (N,): int64 number of tokens of each caption; may be 0

    @classmethod
    def from_ids(cls, ids: Tensor, mask: Tensor) -> TokenBatch:
        """Drop the padding of `(N, T)` completions; the mask is True at the tokens to score, possibly EOS."""
        if ids.ndim != 2 or ids.shape != mask.shape:
            raise ValueError(f"ids and mask must both be (N, T), got {tuple(ids.shape)} and {tuple(mask.shape)}.")
        kept = mask.bool()
        tokens = ids[kept].long()
        if len(tokens) and int(tokens.min()) < 0:
            raise ValueError("ids contains a negative id where mask is True (-100 from labels?). Mask it out.")
        return cls(tokens, kept.sum(dim=1))

    def __len__(self) -> int:
        return len(self.lengths)

    def followed_by(self, other: TokenBatch) -> TokenBatch:
        return TokenBatch(torch.cat([self.tokens, other.tokens]), torch.cat([self.lengths, other.lengths]))


def encode_words(
    captions: Iterable[Sequence[str]],
    vocabulary: dict[str, int] | None = None,
    *,
    known: Mapping[str, int] | None = None,
) -> TokenBatch:
    """Words to integers."""
    vocabulary = {} if vocabulary is None else vocabulary
    captions = list(captions)
    words = list(chain.from_iterable(captions))
    if known is None:
        found = (vocabulary.setdefault(word, len(vocabulary)) for word in words)
        ids = np.fromiter(found, dtype=np.int64, count=len(words))
    else:
        # One pass in C for the known words, which are almost all; a Python loop for the others.
        ids = np.fromiter(map(known.get, words, repeat(-1)), dtype=np.int64, count=len(words))
        first = len(known)
        for i in np.flatnonzero(ids < 0).tolist():
            ids[i] = vocabulary.setdefault(words[i], first + len(vocabulary))
    lengths = np.fromiter(map(len, captions), dtype=np.int64, count=len(captions))
    return TokenBatch(torch.from_numpy(ids), torch.from_numpy(lengths))


def _sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in ascending order, and their previous positions."""
    if keys.device.type != "cpu":
        return torch.sort(keys)
    # NumPy sorts integers with vector instructions, 3 to 10 times as fast as torch on the CPU. With the positions in the
    # low bits, one sort also gives the permutation, in half the time of argsort.
    array = keys.numpy()
    bits = max(len(array) - 1, 1).bit_length()
    if len(array) and int(array.min()) >= 0 and int(array.max()) < 2 ** (63 - bits):
        packed = (array << bits) | np.arange(len(array))
        packed.sort()
        return torch.from_numpy(packed >> bits), torch.from_numpy(packed & ((1 << bits) - 1))
    order = np.argsort(array)
    return torch.from_numpy(array.take(order)), torch.from_numpy(order)


def positions(mask: Tensor) -> Tensor:
    """Positions at which a mask `(P,)` is true."""
    if mask.device.type != "cpu":
        return torch.nonzero(mask).flatten()
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # a fifth of torch.nonzero's time


def _heads(ordered: Tensor) -> Tensor:
    """True at the first of each run of equal values."""
    head = torch.ones(len(ordered), dtype=torch.bool, device=ordered.device)
    torch.ne(ordered[1:], ordered[:-1], out=head[1:])
    return head


def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of keys, equal for equal keys and in ascending order, and the position of one key for each id."""
    ordered, order = _sort(keys)
    head = _heads(ordered)
    ids = torch.empty_like(keys).scatter_(0, order, torch.cumsum(head, 0) - 1)
    return ids, order.index_select(0, positions(head))


@dataclass(frozen=True)
class NgramCounts:
    """Counts of each n-gram in each caption, and which captions of a group (an image) share it.

    An entry is a caption and one of its n-grams; entries are sorted by (group, n-gram, caption). All entries of one
    group and n-gram make a column.
    """

    lengths: Tensor  # (N,): tokens of each caption
    groups: Tensor  # (N,): group of each caption
    rows: Tensor  # (E,): caption of each entry
    ids: Tensor  # (E,): N-gram of each entry, in [0, U)
    counts: Tensor  # (E,): occurrences in the caption, at least 1
    columns: Tensor  # (E,): column of each entry, in [0, C), ascending
    column_ids: Tensor  # (C,): N-gram of each column
    column_groups: Tensor  # (C,): group of each column, ascending
    offsets: tuple[int, ...]  # N-grams of order n (from 1) have the ids `offsets[n-1]` ... `offsets[n] - 1`.
    prefixes: Tensor  # (U,): id of the n-gram without its last word; -1 for single words
    words: Tensor  # (U,): token id of the last word

    @property
    def max_order(self) -> int:
        return len(self.offsets) - 1

    def orders(self, ids: Tensor) -> Tensor:
        borders = torch.tensor(self.offsets[1:-1], dtype=torch.long, device=ids.device)
        return torch.bucketize(ids, borders, right=True)

    def totals(self) -> Tensor:
        """Number of n-grams of each caption and order, `(N, max_order)`, including repetitions."""
        steps = torch.arange(self.max_order, device=self.lengths.device)
        return (self.lengths[:, None] - steps).clamp(min=0)

    def table(self, slots: Tensor) -> Tensor:
        """Counts of every column in the captions of its group.

        `slots` `(N,)`: position of each caption in the rows of its group, unique in the group; -1 leaves a caption
        out. Returns `(C, S)`: float64, S is the largest slot + 1; 0 if a group has no such slot.
        """
        num_slots = max(int(slots.max()) + 1, 0) if len(slots) else 0
        # Captions that are left out go to an additional slot, which is faster than selecting the others.
        slot = torch.where(slots < 0, num_slots, slots).index_select(0, self.rows)
        table = torch.zeros(len(self.column_ids), num_slots + 1, dtype=torch.float64, device=slot.device)
        table.view(-1).scatter_(0, self.columns * (num_slots + 1) + slot, self.counts.double())
        return table[:, :num_slots]


def count_ngrams(batch: TokenBatch, max_order: int = 4, groups: Tensor | None = None) -> NgramCounts:
    """Count all n-grams of all captions; `groups` `(N,)` are not negative (None: one group)."""
    tokens, lengths, device = batch.tokens.long(), batch.lengths, batch.tokens.device
    groups = torch.zeros_like(lengths) if groups is None else groups.to(device)
    # index_select everywhere, because tensor[index] takes four times as long on the CPU.
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    starts = torch.arange(len(tokens), device=device)
    # The number of tokens that follow in the caption decides which orders start at a position.
    left = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths) - starts
    ids, examples = _distinct(tokens)
    word, base = ids, max(len(examples), 1)
    all_rows, all_ids, offsets = [row], [ids], [0, len(examples)]
    all_prefixes, all_words = [torch.full_like(examples, -1)], [tokens.index_select(0, examples)]
    for order in range(2, max_order + 1):
        fits = positions(left >= order)
        starts, left, row = starts.index_select(0, fits), left.index_select(0, fits), row.index_select(0, fits)
        prefix, last = ids.index_select(0, fits), starts + (order - 1)
        ids, examples = _distinct(prefix * base + word.index_select(0, last))
        all_prefixes.append(prefix.index_select(0, examples) + offsets[-2])
        all_words.append(tokens.index_select(0, last.index_select(0, examples)))
        all_rows.append(row)
        all_ids.append(ids + offsets[-1])
        offsets.append(offsets[-1] + len(examples))
    rows, ids = torch.cat(all_rows), torch.cat(all_ids)
    column = groups.index_select(0, rows) * max(offsets[-1], 1) + ids
    if (int(groups.max()) + 1 if len(groups) else 1) * max(offsets[-1], 1) * len(lengths) >= 2**63:
        column, _ = _distinct(column)  # millions of images: smaller ids in the same order
    ordered, where = _sort(column * max(len(lengths), 1) + rows)
    first = positions(_heads(ordered))  # (E,) where each entry begins
    where = where.index_select(0, first)
    rows, ids = rows.index_select(0, where), ids.index_select(0, where)
    head = _heads(column.index_select(0, where))
    heads = positions(head)  # (C,) the first entry of each column
    return NgramCounts(
        lengths=lengths,
        groups=groups,
        rows=rows,
        ids=ids,
        counts=torch.diff(first, append=first.new_tensor([len(ordered)])),
        columns=torch.cumsum(head, 0) - 1,
        column_ids=ids.index_select(0, heads),
        column_groups=groups.index_select(0, rows.index_select(0, heads)),
        offsets=tuple(offsets),
        prefixes=torch.cat(all_prefixes),
        words=torch.cat(all_words),
    )


def _is_sorted(values: Tensor) -> bool:
    return len(values) < 2 or not bool((values[1:] < values[:-1]).any())


def slots_of(groups: Tensor) -> Tensor:
    """Index of each caption in its group, from 0; groups are sorted."""
    sizes = torch.bincount(groups)
    return torch.arange(len(groups), device=groups.device) - (torch.cumsum(sizes, 0) - sizes)[groups]


def check_references(batch: TokenBatch, candidates: Tensor, references: Tensor) -> None:
    """Refuse images of candidates that have no reference, and references that are not sorted by image."""
    if len(batch) != len(candidates) + len(references):
        raise ValueError(f"{len(batch)} captions, but {len(candidates)} candidates and {len(references)} references.")
    sizes = torch.bincount(references, minlength=int(candidates.max()) + 1)
    if len(missing := torch.nonzero(sizes[candidates] == 0).flatten()):
        image = int(candidates[missing[0]])
        raise ValueError(f"Image {image} of candidate {int(missing[0])} has no reference. Pass one or more per image.")
    if not _is_sorted(references):
        raise ValueError("The images of the references are not sorted. Sort the references by image.")


def group_blocks(batch: TokenBatch, *groups: Tensor) -> Iterator[tuple[TokenBatch, tuple[Tensor, ...]]]:
    """Divide captions into blocks of whole groups (images), because counting takes 7 kB per caption.

    The batch has the captions of each tensor of `groups`, one tensor after the other; a tensor `(N,)` contains the group of
    each of its captions. Yields blocks in the order of the groups, with their groups numbered from 0; blocks without a
    caption of the first tensor are left out. Few captions, or groups that are not sorted, are one block.
    """
    number = max((int(own.max()) + 1 for own in groups if len(own)), default=0)
    at_once = max(_CAPTIONS_AT_ONCE * number // max(len(batch), 1), 1)
    if at_once >= number or not len(groups[0]) or not all(map(_is_sorted, groups)):
        yield batch, groups
        return
    device = batch.lengths.device
    edges = torch.arange(0, number + at_once, at_once, device=device)
    first = 0
    rows = []  # (edges,) for each tensor, the caption where each block begins
    for own in groups:
        rows.append((first + torch.searchsorted(own, edges)).tolist())
        first += len(own)
    ends = torch.cumsum(batch.lengths, 0)
    for block, edge in enumerate(edges[:-1].tolist()):
        parts = [slice(begin[block], begin[block + 1]) for begin in rows]
        if parts[0].start == parts[0].stop:
            continue
        lengths = torch.cat([batch.lengths[part] for part in parts])
        tokens = torch.cat([batch.tokens[_tokens_of(ends, part)] for part in parts])
        offsets = [0, *np.cumsum([len(own) for own in groups]).tolist()]
        owners = (
            own[part.start - offset : part.stop - offset] - edge
            for own, part, offset in zip(groups, parts, offsets, strict=False)
        )
        yield TokenBatch(tokens, lengths), tuple(owners)


def _tokens_of(ends: Tensor, captions: slice) -> slice:
    """Tokens of consecutive captions, from the end of each caption."""
    bounds = (captions.start, captions.stop)
    return slice(*(int(ends[caption - 1]) if caption else 0 for caption in bounds))


def count_documents(
    batch: TokenBatch, documents: Tensor, max_order: int = 4, min_documents: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """For each order the n-grams that occur in at least `min_documents` documents, and in how many.

    `documents` `(N,)` is the document of each caption. Returns keys `(K,)`, int64 in ascending order, and counts `(K,)`, int64,
    on the device of the batch. A key is `prefix * base + word`: the position of the n-gram without its last word among the
    keys of the order before (0 for words), the largest token id plus 1, and the last token.

    An n-gram occurs in no more documents than its prefix, so a longer n-gram is only counted if its prefix is kept.
    """
    base = int(batch.tokens.max()) + 1 if len(batch.tokens) else 1
    blocks = [
        _DocumentBlock(part, owners) for part, (owners,) in group_blocks(batch, documents.to(batch.tokens.device))
    ]
    found = []
    for order in range(1, max_order + 1):
        parts = [block.count(order, base) for block in blocks]
        keys, counts = _sums(torch.cat([keys for keys, _ in parts]), torch.cat([counts for _, counts in parts]))
        if min_documents > 1:
            kept = positions(counts >= min_documents)
            keys, counts = keys.index_select(0, kept), counts.index_select(0, kept)
        found.append((keys, counts))
        for block, (own, _) in zip(blocks, parts, strict=True):
            block.advance(own, keys)
    return found


class _DocumentBlock:
    """Captions of some documents, and the n-grams that begin at each of their tokens."""

    def __init__(self, batch: TokenBatch, documents: Tensor) -> None:
        self.batch, self.documents = batch, documents
        self.prefixes = torch.zeros(len(batch.tokens), dtype=torch.int32, device=batch.tokens.device)  # (T,) or -1
        self.starts = self.ids = self.prefixes

    def count(self, order: int, base: int) -> tuple[Tensor, Tensor]:
        """Distinct keys of an order, ascending, and the number of documents of each."""
        tokens, lengths = self.batch.tokens, self.batch.lengths
        place = torch.arange(len(tokens), device=tokens.device)
        left = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths) - place
        starts = positions((left >= order) & (self.prefixes >= 0))
        prefixes, last = self.prefixes.index_select(0, starts), tokens.index_select(0, starts + (order - 1))
        key = prefixes.long() * base + last.long()
        ids, examples = _distinct(key)
        document = torch.repeat_interleave(self.documents, lengths).index_select(0, starts)
        number = int(self.documents.max()) + 1
        ordered, _ = _sort(ids * number + document)  # each n-gram and document once
        once = ordered.index_select(0, positions(_heads(ordered)))
        self.starts, self.ids = starts.int(), ids.int()
        counts = torch.bincount(torch.div(once, number, rounding_mode="floor"), minlength=len(examples))
        return key.index_select(0, examples), counts

    def advance(self, own: Tensor, keys: Tensor) -> None:
        """Let the counted n-grams be the prefixes of the next order; `own` are their keys, `keys` those of all blocks."""
        self.prefixes = torch.full_like(self.prefixes, -1)
        if len(keys):
            at = torch.searchsorted(keys, own).clamp_(max=len(keys) - 1)
            at = torch.where(keys.index_select(0, at) == own, at, -1).int()
            self.prefixes[self.starts.long()] = at.index_select(0, self.ids)


def _sums(keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct keys in ascending order, and the sum of the counts of each."""
    ordered, order = _sort(keys)
    first = positions(_heads(ordered))
    totals = torch.cumsum(counts.index_select(0, order), 0)
    before = torch.cat([totals.new_zeros(1), totals]).index_select(0, first)
    return ordered.index_select(0, first), torch.diff(before, append=totals[-1:])


def distinct_share(
    counts: NgramCounts, order: int, num_groups: int, *, per: Literal["words", "ngrams"] = "words"
) -> Tensor:
    """Distinct n-grams of each group of captions divided by its words (Div-n).

    Returns `(num_groups,)`: float64 shares in [0, 1]; 0 for a group without words.
    """
    wanted = (counts.column_ids >= counts.offsets[order - 1]) & (counts.column_ids < counts.offsets[order])
    distinct = torch.bincount(counts.column_groups[wanted], minlength=num_groups).double()
    sizes = counts.lengths if per == "words" else counts.totals()[:, order - 1]
    return distinct / torch.bincount(counts.groups, sizes.double(), num_groups).clamp(min=1)
