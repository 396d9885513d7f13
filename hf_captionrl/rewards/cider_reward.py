r"""CIDEr-D of the completions against the references of their images, on the policy's tokens.

Legend: B images, G captions per image, N = B * G captions, R references, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.rewards.base import Reward, RewardContext, RewardData
from hf_captionrl.rewards.registry import register_reward
from hf_captionrl.text.cider_d import CiderScorer
from hf_captionrl.text.frequencies import DocumentFrequencies
from hf_captionrl.text.ngrams import TokenBatch

__all__ = ["CiderReward"]

_REFERENCES_AT_ONCE = 4096


@register_reward
@dataclass(eq=False)
class CiderReward(Reward):
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

    cider_eos: bool = field(
        default=True,
        metadata={"help": "CIDEr-D scores the end token too; without it captions learn to end anywhere."},
    )
    cider_frequencies: str = field(
        default="train",
        metadata={
            "help": "Document frequencies of CIDEr-D: of the references of all 'train' images, or of the 'batch', as in the code of "
            "No Detail Left Behind, which is another metric."
        },
    )
    variant: Literal["cider_d", "cider"] = "cider_d"
    baseline: str | None = None

    def __post_init__(self) -> None:
        if self.cider_frequencies not in ("train", "batch"):
            raise ValueError(f"cider_frequencies is {self.cider_frequencies!r}. Use 'train' or 'batch'.")

    def describe(self) -> str:
        name = "CIDEr-D" if self.variant == "cider_d" else "CIDEr"
        counts = " and document frequencies of the batch" if self.cider_frequencies == "batch" else ""
        return f"{name} {'with' if self.cider_eos else 'without'} the end token{counts}"

    def prepare(self, data: RewardData) -> None:
        """Encode and count the references of all training images."""
        number = torch.from_numpy(
            np.fromiter(map(len, data.references), np.int64, len(data.references))
        )  # (num_images,)
        without = (number == 0).nonzero().flatten()
        if len(without):
            raise ValueError(
                f"{len(without)} training images have no reference (first: {data.image_ids[int(without[0])]!r}), and CIDEr "
                "needs one. Drop them with check_captions, or use another reward."
            )
        self._eos = data.eos_token_id
        texts = chain.from_iterable(data.references)
        parts = []
        while part := list(islice(texts, _REFERENCES_AT_ONCE)):
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
        scorer = self._scorer if self.cider_frequencies == "train" else self._of_batch(tokens, lengths, images)
        scores = scorer.score_tokens(batch, of, images)
        return scores.masked_fill(self._wordless[rows][of], torch.nan)

    def _of_batch(self, tokens: Tensor, lengths: Tensor, images: Tensor) -> CiderScorer:
        """A scorer with the document frequencies of the references of one batch."""
        references = TokenBatch(tokens, lengths)
        frequencies = DocumentFrequencies.from_token_batch(references, images, eos=self.cider_eos)
        return CiderScorer(frequencies.to(tokens.device), variant=self.variant)
