"""CIDEr-D and plain CIDEr on integer n-grams, with document frequencies that are counted once.

The two are different metrics. CIDEr-D, which pycocoevalcap and most papers call "CIDEr", clips the counts of the candidate
to those of the reference, and multiplies by a Gaussian of the difference in length. Plain CIDEr does neither.

Legend: N candidates, R references, S references of one image, E entries (caption, n-gram) with a count, U n-grams.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hf_captionrl.text.frequencies import EOS, DocumentFrequencies, check_words
from hf_captionrl.text.ngrams import TokenBatch, count_ngrams, encode_words, group_blocks, positions

__all__ = ["CiderScorer"]


class CiderScorer:
    r"""CIDEr-D or CIDEr of captions against references.

    Reference: Vedantam et al. 2015, "CIDEr: Consensus-based Image Description Evaluation".
    With `g_n(c)` the vector of counts times `log M - log max(1, df)` of the n-grams of order n:
    `CIDEr = 10 / (4 R) sum_n sum_r g_n(c) . g_n(r) / (|g_n(c)| |g_n(r)|)`; CIDEr-D replaces the
    first `g_n(c)` by `min(g_n(c), g_n(r))` and multiplies by `exp(-(l(c) - l(r))^2 / (2 sigma^2))`.
    Differs from it by: nothing; as in the authors' code, counts are not divided by the length, and l counts bigrams.

    `sigma` is in words.

    Example:
        >>> refs = [[["a", "red", "cat"]], [["a", "dog", "runs"]]]
        >>> scorer = CiderScorer(DocumentFrequencies.from_references(refs), max_order=2)
        >>> [round(score, 3) for score in scorer([[["a", "red", "cat"]], [["a", "cat"]]], refs).tolist()]
        [10.0, 0.0]
    """

    def __init__(
        self,
        frequencies: DocumentFrequencies,
        *,
        variant: Literal["cider_d", "cider"] = "cider_d",
        sigma: float = 6.0,
        max_order: int = 4,
    ) -> None:
        if variant not in ("cider_d", "cider"):
            raise ValueError(f"variant must be 'cider_d' or 'cider', got {variant!r}.")
        if not 1 <= max_order <= frequencies.max_order:
            raise ValueError(
                f"max_order ({max_order}) must be between 1 and the longest n-gram counted ({frequencies.max_order})."
            )
        if not sigma > 1e-100:  # its square must not underflow
            raise ValueError(f"sigma must be above 0 words, got {sigma}.")
        self.frequencies = frequencies
        self.variant = variant
        self.sigma = sigma
        self.max_order = max_order

    def __call__(
        self, candidates: Sequence[Sequence[Sequence[str]]], references: Sequence[Sequence[Sequence[str]]]
    ) -> Tensor:
        """Score the candidates of each image against its references.

        Returns `(N,)`: float64 scores in [0, 10] of all candidates, image after image; higher is better.
        """
        if self.frequencies.words is None:
            raise ValueError(
                "These frequencies are of token ids. Use score_tokens, or count the words of the references."
            )
        if len(candidates) != len(references):
            raise ValueError(
                f"There are {len(candidates)} images with candidates and {len(references)} with references. Pass both for "
                "every image."
            )
        check_words(candidates, "candidates")
        check_words(references, "references")
        captions = [caption for groups in (candidates, references) for group in groups for caption in group]
        if self.frequencies.eos:
            captions = [[*caption, EOS] for caption in captions]
        images = torch.arange(len(candidates))
        return self.score_tokens(
            encode_words(captions, known=self.frequencies.words),
            torch.repeat_interleave(images, torch.tensor([len(group) for group in candidates])),
            torch.repeat_interleave(images, torch.tensor([len(group) for group in references])),
        )

    def score_tokens(self, batch: TokenBatch, candidate_images: Tensor, reference_images: Tensor) -> Tensor:
        """Score captions given as integers; runs on the device of the batch.

        The batch has N candidates, then R references; `candidate_images` `(N,)` and `reference_images` `(R,)`, sorted,
        are their images. Returns `(N,)`: float64 in [0, 10], higher is better.
        """
        num_candidates, num_references = len(candidate_images), len(reference_images)
        if len(batch) != num_candidates + num_references:
            raise ValueError(
                f"{len(batch)} captions, but {num_candidates} candidates and {num_references} references."
            )
        device = batch.tokens.device
        images = torch.cat([candidate_images, reference_images]).to(device)
        num_images = int(images.max()) + 1
        number = torch.bincount(images[num_candidates:], minlength=num_images)  # (M,) references of each image
        missing = torch.nonzero(number[images[:num_candidates]] == 0).flatten()
        if len(missing):
            raise ValueError(
                f"Candidate {int(missing[0])} belongs to image {int(images[missing[0]])}, which has no reference. Pass at least one per image."
            )
        if num_references > 1 and bool((images[num_candidates + 1 :] < images[num_candidates:-1]).any()):
            raise ValueError("reference_images are not sorted. Sort the references by image.")
        num_slots = int(number.max())
        blocks = group_blocks(batch, images[:num_candidates], images[num_candidates:])
        return torch.cat([self._scores(part, ours, theirs, num_slots) for part, (ours, theirs) in blocks])

    def _scores(self, batch: TokenBatch, candidate_images: Tensor, reference_images: Tensor, num_slots: int) -> Tensor:
        """Scores of a block; S is `num_slots` in every block, so that rounding does not depend on the blocks."""
        num_candidates, num_references = len(candidate_images), len(reference_images)
        device = batch.tokens.device
        images = torch.cat([candidate_images, reference_images])
        number = torch.bincount(reference_images, minlength=int(images.max()) + 1)
        first = torch.cumsum(number, 0) - number
        slots = torch.full_like(images, -1)
        slots[num_candidates:] = torch.arange(num_references, device=device) - first[images[num_candidates:]]

        counts = count_ngrams(batch, self.max_order, images)
        documents = self.frequencies.lookup(counts)
        idf = math.log(self.frequencies.num_documents) - torch.log(documents.clamp(min=1).double())  # (U,)
        width = self.max_order
        squared = (idf * idf).index_select(0, counts.ids)  # (E,)
        segment = counts.rows * width + counts.orders(counts.ids)  # (E,) caption and order in one number
        amount = counts.counts.double()
        norms = torch.bincount(segment, squared * amount * amount, len(batch) * width).sqrt_().view(-1, width)

        # Only n-grams that occur in a reference of the image contribute to the products: a third of all.
        table = counts.table(slots)  # (C, S) counts in each reference
        shared = (table.amax(dim=1) > 0).index_select(0, counts.columns)
        ours = positions((counts.rows < num_candidates) & shared)  # (E',)
        theirs = table.index_select(0, counts.columns.index_select(0, ours))
        theirs = torch.nn.functional.pad(theirs, (0, num_slots - theirs.shape[1]))  # (E', S)
        own = amount.index_select(0, ours)[:, None]
        clipped = torch.minimum(own, theirs) if self.variant == "cider_d" else own
        products = clipped * theirs * squared.index_select(0, ours)[:, None]
        similarity = torch.zeros(num_candidates * width, num_slots, dtype=torch.float64, device=device)
        similarity.index_add_(0, segment.index_select(0, ours), products)
        similarity = similarity.view(num_candidates, width, num_slots)

        # (N, S): the reference in each slot of the candidate's image; slots after the last one are masked.
        image = images[:num_candidates]
        steps = torch.arange(num_slots, device=device)
        there = steps < number[image][:, None]
        at = num_candidates + (first[image][:, None] + steps).clamp(max=num_references - 1)
        scale = norms[:num_candidates, :, None] * norms[at].transpose(1, 2)  # (N, order, S)
        similarity = torch.where(scale > 0, similarity / scale.clamp(min=1e-300), torch.zeros_like(similarity)).mean(
            dim=1
        )
        if self.variant == "cider_d":
            lengths = (counts.lengths - 1).clamp(min=0).double()
            delta = lengths[:num_candidates, None] - lengths[at]
            similarity = similarity * torch.exp(-(delta**2) / (2 * self.sigma**2))
        return 10.0 * (similarity * there).sum(dim=1) / number[image]
