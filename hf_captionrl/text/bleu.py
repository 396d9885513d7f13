"""BLEU of sentences, of corpora and between the captions of one image, on integer n-grams.

All three equal pycocoevalcap's numbers, including its smoothing constants, with which a sentence without a matching 4-gram
is not exactly 0. Other toolkits use other constants, so their numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_captionrl.text.ngrams import (
    NgramCounts,
    TokenBatch,
    check_references,
    count_ngrams,
    group_blocks,
    positions,
    slots_of,
)

# pycocoevalcap's constants, which prevent division by zero.
_SMALL = 1e-9
_TINY = 1e-15


def bleu_scores(matches: Tensor, totals: Tensor, lengths: Tensor, reference_lengths: Tensor) -> Tensor:
    r"""BLEU-1 ... BLEU-n from counts.

    Reference: Papineni et al. 2002. `BLEU-n = min(1, exp(1 - r/c)) (prod_{k<=n} (m_k + 1e-15) / (t_k + 1e-9))^{1/n}`.

    `matches` and `totals` are `(..., n)`, `lengths` and `reference_lengths` `(...)`. Returns `(..., n)`: float64, in
    [0, 1].
    """
    precisions = (matches.double() + _TINY) / (totals.double() + _SMALL)
    orders = torch.arange(1, precisions.shape[-1] + 1, dtype=torch.float64, device=precisions.device)
    scores = torch.cumprod(precisions, dim=-1) ** (1.0 / orders)
    ratio = (lengths.double() + _TINY) / (reference_lengths.double() + _SMALL)
    penalty = torch.where(ratio < 1, torch.exp(1 - 1 / ratio), torch.ones_like(ratio))
    return scores * penalty[..., None]


def _closest(lengths: Tensor, reference_lengths: Tensor, there: Tensor) -> Tensor:
    """Length of the reference closest in length, the shorter one of two equally close: `(N,)` from `(N,)` and `(N, S)`."""
    far = torch.iinfo(torch.long).max // 4
    distance = (lengths[:, None] - reference_lengths).abs() * 2**20 + reference_lengths
    best = torch.where(there, distance, far).argmin(dim=1, keepdim=True)
    return reference_lengths.gather(1, best)[:, 0]


def _clipped(counts: NgramCounts, limit: Tensor, entries: Tensor) -> Tensor:
    """Matches of each caption and order, `(N, n)`, with its n-gram counts clipped at `limit` (E',)."""
    width = counts.max_order
    segment = counts.rows.index_select(0, entries) * width + counts.orders(counts.ids.index_select(0, entries))
    clipped = torch.minimum(counts.counts.index_select(0, entries).double(), limit)
    return torch.bincount(segment, clipped, len(counts.lengths) * width).view(-1, width)


def bleu_matches(
    batch: TokenBatch, candidate_groups: Tensor, reference_groups: Tensor, max_order: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts of candidates against all references of their image.

    The images `candidate_groups` `(N,)` and `reference_groups` `(R,)`, sorted; every image has a reference. Returns
    the arguments of [`bleu_scores`]: matches and totals `(N, n)`, lengths of captions and of the closest references
    `(N,)`.
    """
    check_references(batch, candidate_groups, reference_groups)
    blocks = group_blocks(batch, candidate_groups, reference_groups)
    return _joined(_reference_matches(part, ours, theirs, max_order) for part, (ours, theirs) in blocks)


def _joined(parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of several blocks of images."""
    matches, totals, lengths, closest = (torch.cat(part) for part in zip(*parts, strict=True))
    return matches, totals, lengths, closest


def _reference_matches(
    batch: TokenBatch, candidate_groups: Tensor, reference_groups: Tensor, max_order: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[`bleu_matches`] of a block."""
    num = len(candidate_groups)
    groups = torch.cat([candidate_groups, reference_groups])
    num_groups = int(groups.max()) + 1
    sizes = torch.bincount(reference_groups, minlength=num_groups)
    slots = torch.full_like(groups, -1)
    slots[num:] = slots_of(reference_groups)
    counts = count_ngrams(batch, max_order, groups)
    most = counts.table(slots).amax(dim=1)  # (C,) of an n-gram in any one reference
    ours = positions(counts.rows < num)
    matches = _clipped(counts, most.index_select(0, counts.columns.index_select(0, ours)), ours)[:num]
    first = torch.cumsum(sizes, 0) - sizes
    steps = torch.arange(int(sizes.max()), device=groups.device)
    at = (num + first[candidate_groups][:, None] + steps).clamp(max=len(batch) - 1)
    there = steps < sizes[candidate_groups][:, None]
    lengths = counts.lengths[:num]
    return matches, counts.totals()[:num], lengths, _closest(lengths, counts.lengths[at], there)


def corpus_bleu(matches: Tensor, totals: Tensor, lengths: Tensor, reference_lengths: Tensor) -> Tensor:
    """BLEU of a whole corpus, from summed counts.

    Takes what [`bleu_matches`] returns, `(N, n)` and `(N,)`. Returns `(n,)`: BLEU-1 ... BLEU-n in [0, 1].
    """
    return bleu_scores(matches.sum(0), totals.sum(0), lengths.sum(), reference_lengths.sum())


def pairwise_bleu(batch: TokenBatch, group_size: int, max_order: int = 4) -> Tensor:
    """BLEU of every caption against each other caption of its image (SLE's distance is one minus it).

    Returns `(B, G, G, n)`: float64; entry (b, j, k) is BLEU-1 ... n of caption j as candidate with caption k as the only
    reference.
    """
    num = len(batch)
    if num == 0 or num % group_size:
        raise ValueError(f"{num} captions cannot be divided into groups of {group_size}. Pass equally many per image.")
    device = batch.tokens.device
    position = torch.arange(num, device=device)
    groups = torch.div(position, group_size, rounding_mode="floor")
    counts = count_ngrams(batch, max_order, groups)
    table = counts.table(position % group_size)  # (C, G)
    # N-grams of a single caption match only themselves, which the totals already contain.
    shared = positions(torch.bincount(counts.columns, minlength=len(table)) > 1)
    part = table.index_select(0, shared)
    both = torch.minimum(part[:, :, None], part[:, None, :]).view(len(shared), group_size**2)
    segment = counts.column_groups[shared] * max_order + counts.orders(counts.column_ids[shared])
    matches = torch.zeros(num // group_size * max_order, group_size**2, dtype=torch.float64, device=device)
    matches.index_add_(0, segment, both)
    matches = matches.view(-1, max_order, group_size, group_size).permute(0, 2, 3, 1).clone()
    totals = counts.totals().view(-1, group_size, max_order)
    own = torch.arange(group_size, device=device)
    matches[:, own, own] = totals.double()
    lengths = counts.lengths.view(-1, group_size)
    shape = (len(lengths), group_size, group_size)
    return bleu_scores(
        matches,
        totals[:, :, None].expand(*shape, max_order),
        lengths[:, :, None].expand(shape),
        lengths[:, None, :].expand(shape),
    )


def sibling_bleu(batch: TokenBatch, groups: Tensor, max_order: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts of each caption with the other captions of its image as references (mBLEU, SLE's reward of 2018).

    `groups` `(N,)` is sorted, with at least two captions per image. Returns what [`bleu_matches`] does.
    """
    sizes = torch.bincount(groups)
    if len(lonely := torch.nonzero(sizes[groups] < 2).flatten()):
        raise ValueError(f"Caption {int(lonely[0])} is the only one of its image. Pass at least two per image.")
    return _joined(_sibling_matches(part, own, max_order) for part, (own,) in group_blocks(batch, groups))


def _sibling_matches(batch: TokenBatch, groups: Tensor, max_order: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[`sibling_bleu`] of a block."""
    sizes = torch.bincount(groups)
    slots = slots_of(groups)
    counts = count_ngrams(batch, max_order, groups)
    table = counts.table(slots)  # (C, S)
    # The largest count in other captions is the row's maximum, or the second largest for the caption with the maximum.
    top = table.topk(2, dim=1)
    slot = slots[counts.rows]
    most = torch.where(
        top.indices[counts.columns, 0] == slot, top.values[counts.columns, 1], top.values[counts.columns, 0]
    )
    matches = _clipped(counts, most, torch.arange(len(counts.rows), device=slot.device))
    first = torch.cumsum(sizes, 0) - sizes
    steps = torch.arange(int(sizes.max()), device=groups.device)
    at = (first[groups][:, None] + steps).clamp(max=len(batch) - 1)
    there = (steps < sizes[groups][:, None]) & (steps != slots[:, None])
    return matches, counts.totals(), counts.lengths, _closest(counts.lengths, counts.lengths[at], there)
