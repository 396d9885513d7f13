"""Rewards of the words of a caption: CIDEr-D, diversity, and penalties on its form against reward hacking.

Legend: B images, G captions per image (SLE's s), N = B * G captions, R references, T tokens, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.rewards.base import Reward, RewardContext, RewardData
from hf_captionrl.text.bleu import bleu_scores, pairwise_bleu, sibling_bleu
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.ngrams import TokenBatch, count_ngrams, distinct_share
from hf_captionrl.utils.options import Positive, documented

# --- Distances between the captions of one image, and the reward for them --------------------------------------------


def bleu34_distance(ids: Tensor, mask: Tensor, group_size: int) -> Tensor:
    r"""One minus the mean of BLEU-3 and BLEU-4 of every caption against every other one of its image.

    Reference: SLE, Section 4: `d(y_j, y_k) = 1 - (BLEU3(y_j, y_k) + BLEU4(y_j, y_k)) / 2`, y_j as candidate. A caption
    has distance 0 to an equal one, also if it is too short for a 4-gram.

    Args:
        ids (`torch.Tensor` of shape `(N, T)`): Completions; those of one image are consecutive.
        mask (`torch.Tensor` of shape `(N, T)`): True at the tokens that count.
        group_size (`int`): G.

    Returns:
        `torch.Tensor` of shape `(B, G, G)`: float64 in [0, 1].
    """
    scores = pairwise_bleu(TokenBatch.from_ids(ids, mask), group_size)  # (B, G, G, 4)
    distance = 1 - scores[..., 2:].mean(-1)
    tokens = ids.masked_fill(~mask.bool(), -1).view(-1, group_size, ids.size(1))
    equal = (tokens[:, :, None] == tokens[:, None, :]).all(-1)  # (B, G, G)
    return distance.masked_fill(equal, 0.0).clamp(0, 1)


def edit_distance(ids: Tensor, mask: Tensor, group_size: int) -> Tensor:
    r"""Levenshtein distance on tokens over the length of the longer caption.

    SLE, Section 4: without the normalisation the policy generates ever longer captions.

    Args:
        ids (`torch.Tensor` of shape `(N, T)`): Completions; those of one image are consecutive.
        mask (`torch.Tensor` of shape `(N, T)`): True at the tokens that count, the first ones of each row.
        group_size (`int`): G.

    Returns:
        `torch.Tensor` of shape `(B, G, G)`: float64 in [0, 1], symmetric; two empty captions are at distance 0.
    """
    groups, T = len(ids) // group_size, ids.size(1)
    tokens = ids.view(groups, group_size, T)
    lengths = mask.sum(1).view(groups, group_size)
    a, b = torch.triu_indices(group_size, group_size, 1, device=ids.device)
    left, right = tokens[:, a], tokens[:, b]  # (B, P, T), P pairs
    steps = torch.arange(T + 1, device=ids.device)
    # One row of the table for all pairs at once. Insertions along the row are the running minimum of (cost - column).
    row = steps.expand(groups, len(a), T + 1)
    rows = [row]
    for i in range(T):
        change = row[..., :-1] + (right != left[..., i : i + 1])
        best = torch.minimum(change, row[..., 1:] + 1)
        best = torch.cat([torch.full_like(best[..., :1], i + 1), best], dim=-1)
        row = (best - steps).cummin(-1).values + steps
        rows.append(row)
    table = torch.stack(rows, dim=2)  # (B, P, T + 1, T + 1)
    from_, to = lengths[:, a], lengths[:, b]  # (B, P)
    flat = table.flatten(2).gather(2, (from_ * (T + 1) + to).unsqueeze(2)).squeeze(2)
    pairs = flat.double() / torch.maximum(from_, to).clamp(min=1)
    distance = torch.zeros(groups, group_size, group_size, dtype=torch.float64, device=ids.device)
    distance[:, a, b] = distance[:, b, a] = pairs
    return distance


@dataclass
class DiversityOptions:
    """Options of [`PairwiseDiversity`], also of configurations."""

    distance: Literal["bleu34", "edit"] = documented(
        "bleu34", "Distance between captions: 'bleu34' (one minus the mean of BLEU-3 and BLEU-4) or 'edit'."
    )
    diversity: Literal["pairwise", "unbiased", "multi_reference"] = documented(
        "pairwise",
        "Diversity of a caption: 'pairwise', the paper's, whose gradient is (s-1)(s-2)/s^2 of that of the mean distance; "
        "'unbiased', without this factor; or 'multi_reference', that of the code of 2018: minus the BLEU against all "
        "the other captions at once, with a baseline of at least -0.5.",
    )


@dataclass(eq=False)
class PairwiseDiversity(DiversityOptions, Reward):
    r"""SLE's diversity term as a separate reward, to be added to CIDEr, to self-retrieval, or to any other.

    Reference: SLE, Eq. 11-16. Reward of caption j: `(2/s) sum_k d(y_j, y_k)`; its baseline is the mean over the
    captions of the image, `(2/s^2) sum_jk d`, which matches the factor 2.

    The gradient of the mean distance of two samples is `E[(d(y, y') + d(y', y)) grad log p(y)]`. Of a symmetric distance, the
    paper's estimate is (s-1)(s-2)/s^2 of it (0.48 at s = 5): the sums contain `d(y_j, y_j) = 0`, and the baseline depends on
    `y_j`. `diversity="unbiased"` rewards `s/((s-1)(s-2)) sum_k (d(y_j, y_k) + d(y_k, y_j))`, which with the same baseline is
    the estimate with the mean over the pairs of the other captions as baseline, for any distance.

    Args:
        distance: `"bleu34"` or `"edit"`; for another, override `distances`.
        include_eos (`bool`): Count the end token as a word; the paper does not.
    """

    name = "diversity"
    summary = "the diversity of the captions of an image"
    is_standalone = False

    include_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diversity == "multi_reference" and self.distance != "bleu34":
            raise ValueError("diversity='multi_reference' is defined for BLEU only. Leave distance at 'bleu34'.")
        self.baseline = "group_floor" if self.diversity == "multi_reference" else "group_mean"

    def describe(self) -> str:
        if self.diversity == "multi_reference":
            return "the diversity of the captions of an image (BLEU against all others)"
        return f"the diversity of the captions of an image (the {self.distance} distance)"

    def prepare(self, data: RewardData) -> None:
        self._eos = data.eos_token_id

    def distances(self, context: RewardContext) -> Tensor:
        """Distances `(B, G, G)` between the captions of each image."""
        measure = bleu34_distance if self.distance == "bleu34" else edit_distance
        return measure(context.ids, self._counted(context), context.group_size)

    def _counted(self, context: RewardContext) -> Tensor:
        """`(N, T)`: the tokens that count."""
        mask = context.mask.bool()
        return mask if self.include_eos else mask & (context.ids != self._eos)

    def __call__(self, context: RewardContext) -> Tensor:
        if context.group_size < 2:
            raise ValueError(
                f"Diversity compares the captions of one image, got num_generations={context.group_size}. Use 2."
            )
        if self.diversity == "multi_reference":
            groups = torch.arange(len(context.rows), device=context.ids.device).repeat_interleave(context.group_size)
            batch = TokenBatch.from_ids(context.ids, self._counted(context))
            return -bleu_scores(*sibling_bleu(batch, groups))[:, 2:].mean(1)
        size, distances = context.group_size, self.distances(context)  # (B, G, G)
        if self.diversity == "pairwise":
            return (2.0 / size * distances.sum(2)).flatten()
        if size < 3:
            raise ValueError(f"diversity='unbiased' needs num_generations of 3 or more, got {size}.")
        return (size / ((size - 1) * (size - 2)) * (distances.sum(2) + distances.sum(1))).flatten()


# --- CIDEr-D of the completions against the references of their images, on the policy's tokens -----------------------


@dataclass
class CiderOptions:
    """Options of [`CiderReward`], also of configurations."""

    cider_eos: bool = documented(True, "CIDEr-D scores the end token too; without it captions learn to end anywhere.")
    cider_frequencies: Literal["train", "batch"] = documented(
        "train",
        "Document frequencies of CIDEr-D: of the references of all 'train' images, or of the 'batch', as in the code "
        "of No Detail Left Behind, which is another metric.",
    )


@dataclass(eq=False)
class CiderReward(CiderOptions, Reward):
    r"""CIDEr-D with the document frequencies of the training references, counted once.

    References: Vedantam et al. 2015; Rennie et al. 2017 for its use as a reward. N-grams are of the policy's tokens, so
    everything stays on the training device; with a vocabulary of whole words they are words. An image without a token
    in any reference has no reward (NaN, counted). Without the end token about a third of the captions learn to end badly.

    Args:
        variant: `"cider_d"` or `"cider"`.
        baseline (`str`, *optional*): Baseline; None for the trainer's.
    """

    name = "cider"
    summary = "CIDEr-D"

    variant: Literal["cider_d", "cider"] = "cider_d"
    baseline: str | None = None

    def describe(self) -> str:
        name = "CIDEr-D" if self.variant == "cider_d" else "CIDEr"
        counts = " and document frequencies of the batch" if self.cider_frequencies == "batch" else ""
        return f"{name} {'with' if self.cider_eos else 'without'} the end token{counts}"

    def prepare(self, data: RewardData) -> None:
        counts = np.fromiter(map(len, data.references), np.int64, len(data.references))
        number = torch.from_numpy(counts)  # (num_images,)
        without = (number == 0).nonzero().flatten()
        if len(without):
            raise ValueError(
                f"{len(without)} training images have no reference (first: {data.image_ids[int(without[0])]!r}), and CIDEr "
                "needs one. Drop them with check_captions, or use another reward."
            )
        self._eos = data.eos_token_id
        texts = chain.from_iterable(data.references)
        parts = []
        while part := list(islice(texts, 4096)):
            parts.append(TokenBatch.from_ids(*self._scored(*data.encode(part))))
        batch = TokenBatch(torch.cat([p.tokens for p in parts]), torch.cat([p.lengths for p in parts]))
        self._lengths = batch.lengths.to(data.device)  # (R,)
        if int((self._lengths - int(self.cider_eos)).max()) < 1:
            raise ValueError("No reference has a token in the policy's vocabulary. Are these the right captions?")
        documents = torch.repeat_interleave(torch.arange(len(number)), number)
        frequencies = DocumentFrequencies.from_token_batch(batch, documents, eos=self.cider_eos, min_documents=2)
        self._scorer = CiderScorer(frequencies.to(data.device), variant=self.variant)
        self._tokens = batch.tokens.to(data.device)
        self._starts = self._lengths.cumsum(0) - self._lengths  # (R,)
        self._number = number.to(data.device)
        self._first = self._number.cumsum(0) - self._number  # (num_images,)
        has_words = (self._lengths > int(self.cider_eos)).cpu().long()
        self._wordless = (torch.bincount(documents, has_words, len(number)) == 0).to(data.device)  # (num_images,)

    def _scored(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = mask.bool()
        return ids, mask if self.cider_eos else mask & (ids != self._eos)

    def __call__(self, context: RewardContext) -> Tensor:
        device = self._tokens.device
        candidates = TokenBatch.from_ids(*self._scored(context.ids.to(device), context.mask.to(device)))
        rows = context.rows.to(device)
        number = self._number[rows]  # (B,)
        images = torch.repeat_interleave(torch.arange(len(rows), device=device), number)  # (R',)
        within = torch.arange(len(images), device=device) - (number.cumsum(0) - number)[images]
        references = self._first[rows][images] + within  # (R',) of all references
        lengths = self._lengths[references]
        start = torch.repeat_interleave(self._starts[references] - (lengths.cumsum(0) - lengths), lengths)
        tokens = self._tokens[start + torch.arange(len(start), device=device)]
        batch = TokenBatch(torch.cat([candidates.tokens, tokens]), torch.cat([candidates.lengths, lengths]))
        of = torch.arange(len(rows), device=device).repeat_interleave(context.group_size)
        scorer = self._scorer
        if self.cider_frequencies == "batch":
            found = DocumentFrequencies.from_token_batch(TokenBatch(tokens, lengths), images, eos=self.cider_eos)
            scorer = CiderScorer(found.to(device), variant=self.variant)
        scores = scorer.score_tokens(batch, of, images)
        return scores.masked_fill(self._wordless[rows][of], torch.nan)


# --- Penalties on the form of a caption, against reward hacking ------------------------------------------------------


def repeated_share(ids: Tensor, mask: Tensor, order: int = 2) -> Tensor:
    """Share `(N,)` of the n-grams (n is `order`) of each caption that occurred in it before; 0 for captions shorter than n."""
    batch = TokenBatch.from_ids(ids, mask)
    counts = count_ngrams(batch, order, torch.arange(len(batch), device=ids.device))
    share = distinct_share(counts, order, len(batch), per="ngrams")
    return torch.where(counts.totals()[:, order - 1] > 0, 1 - share, 0.0)


@dataclass(eq=False)
class RepetitionPenalty(Reward):
    """Minus the share of a caption's n-grams that occurred in it before, in [-1, 0].

    Args:
        order (`int`): n; 2 also finds a word that occurs three times in a row.
    """

    name = "repetition"
    summary = "the penalty on repetition"
    is_standalone = False

    order: Positive = 2

    def __call__(self, context: RewardContext) -> Tensor:
        return -repeated_share(context.ids, context.mask, self.order)


@dataclass
class LengthOptions:
    """Options of [`LengthPenalty`], also of configurations."""

    max_tokens: Positive = documented(
        30, "Longest caption without a length penalty, in tokens, the end token included."
    )


@dataclass(eq=False)
class LengthPenalty(LengthOptions, Reward):
    """Minus the tokens beyond a limit, as a share of the limit; 0 within it."""

    name = "length"
    summary = "the penalty on tokens beyond max_tokens"
    is_standalone = False

    def describe(self) -> str:
        return f"the penalty on tokens beyond the {self.max_tokens}th"

    def __call__(self, context: RewardContext) -> Tensor:
        return -(context.mask.sum(1) - self.max_tokens).clamp(min=0).double() / self.max_tokens


@dataclass(eq=False)
class TruncationPenalty(Reward):
    """-1 for a caption that the length limit truncated, 0 for one with an end token."""

    name = "truncation"
    summary = "the penalty on truncated captions"
    is_standalone = False

    def __call__(self, context: RewardContext) -> Tensor:
        return -(~context.ended).double()
