"""CIDEr-D and plain CIDEr on integer n-grams, with document frequencies that are counted once.

The two are different metrics. CIDEr-D, which pycocoevalcap and most papers call "CIDEr", clips the counts of the candidate
to those of the reference, and multiplies by a Gaussian of the difference in length. Plain CIDEr does neither.

Legend: N candidates, R references, S references of one image, E entries (caption, n-gram) with a count, U n-grams.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hf_captionrl.text.ngrams import (
    NgramCounts,
    TokenBatch,
    check_references,
    count_documents,
    count_ngrams,
    encode_words,
    group_blocks,
    positions,
    slots_of,
)
from hf_captionrl.utils.io import atomic_write_bytes

EOS = "<eos>"
_FORMAT = "hf_captionrl.document_frequencies.1"


@dataclass(frozen=True)
class DocumentFrequencies:
    """Number of images (documents) whose references contain each n-gram.

    Count those of all training references, not of one batch: frequencies of a batch give a different metric (1.157
    instead of 1.075 on one batch), and with those of a single image every score is 0.
    """

    num_documents: int  # number of images
    words: dict[str, int] | None  # ids 0 ... W-1 of words; `None` if n-grams consist of token ids.
    # Per order, sorted int64 tensor of `prefix * base + word`, `prefix` being the position of the n-gram without its
    # last word among the keys of the order before.
    keys: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]  # per order, the number of documents of each key
    base: int  # multiplier in the keys, larger than any word id
    eos: bool  # whether every caption was counted with an end-of-sequence word

    @classmethod
    def from_references(
        cls, references: Sequence[Sequence[Sequence[str]]], *, eos: bool = False, max_order: int = 4
    ) -> DocumentFrequencies:
        """Count the references of all images."""
        _check_words(references, "references")
        words: dict[str, int] = {}
        end = [EOS] if eos else []
        batch = encode_words([[*caption, *end] for captions in references for caption in captions], words)
        sizes = torch.tensor([len(captions) for captions in references])
        documents = torch.repeat_interleave(torch.arange(len(references)), sizes)
        return cls.from_token_batch(batch, documents, words=words, eos=eos, max_order=max_order)

    @classmethod
    def from_token_batch(
        cls,
        batch: TokenBatch,
        documents: Tensor,
        *,
        words: dict[str, int] | None = None,
        eos: bool = False,
        max_order: int = 4,
        min_documents: int = 1,
    ) -> DocumentFrequencies:
        """Count references given as integers, such as the token ids of a captioner.

        `documents` `(N,)` is the image of each reference, 0 ... M-1. N-grams of fewer than `min_documents` images are left
        out. With 2, CIDEr's scores are equal: n-grams of no image and of one image have the same weight.
        """
        if len(batch) == 0:
            raise ValueError("There are no references. Pass at least one.")
        base = int(batch.tokens.max()) + 1 if len(batch.tokens) else 1
        found = count_documents(batch, documents, max_order, min_documents)
        keys, counts = zip(*((key.cpu(), count.to(torch.int32).cpu()) for key, count in found), strict=True)
        return cls(int(documents.max()) + 1, words, keys, counts, base, eos)

    @property
    def max_order(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device | str) -> DocumentFrequencies:
        keys, counts = tuple(k.to(device) for k in self.keys), tuple(c.to(device) for c in self.counts)
        return replace(self, keys=keys, counts=counts)

    def lookup(self, counts: NgramCounts) -> Tensor:
        """Number of documents that contain each distinct n-gram. Returns `(U,)`: int64, 0 for unknown n-grams."""
        found = torch.zeros_like(counts.words)
        position = torch.full_like(counts.words, -1)  # of each n-gram among the keys of its order
        for n in range(counts.max_order):
            keys, frequency = self.keys[n].to(found.device), self.counts[n].to(found.device)
            here = slice(counts.offsets[n], counts.offsets[n + 1])
            word = counts.words[here]
            prefix = position.index_select(0, counts.prefixes[here]) if n else torch.zeros_like(word)
            # An n-gram is known only if its prefix is; the requested keys and the stored keys are both ascending.
            maybe = positions((prefix >= 0) & (word < self.base))
            key = prefix.index_select(0, maybe) * self.base + word.index_select(0, maybe)
            if len(keys) == 0 or len(key) == 0:
                continue
            # If every word id occurs, as with words, an id is its position.
            dense = n == 0 and len(keys) == self.base
            at = key if dense else torch.searchsorted(keys, key).clamp_(max=len(keys) - 1)
            right = positions(keys.index_select(0, at) == key)
            at, maybe = at.index_select(0, right), maybe.index_select(0, right) + counts.offsets[n]
            position.index_copy_(0, maybe, at)
            found.index_copy_(0, maybe, frequency.index_select(0, at).long())
        return found

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file atomically."""
        tensors = {f"keys_{n}": keys.cpu().contiguous() for n, keys in enumerate(self.keys)}
        tensors |= {f"counts_{n}": counts.cpu().contiguous() for n, counts in enumerate(self.counts)}
        if self.words is not None:
            # Words contain no line breaks, so they are stored as lines.
            text = "\n".join(self.words).encode()
            tensors["words"] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()
        metadata = {"format": _FORMAT, "num_documents": str(self.num_documents), "base": str(self.base)}
        metadata["eos"] = json.dumps(self.eos)
        metadata["max_order"] = str(self.max_order)
        atomic_write_bytes(path, save(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: str | os.PathLike) -> DocumentFrequencies:
        """Read what [`DocumentFrequencies.save`] wrote; nothing in the file is executed."""
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {_FORMAT!r}")
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not a file of document frequencies: {error}. Count them again."
            ) from error
        orders = range(int(metadata["max_order"]))
        words = None
        if "words" in tensors:
            text = bytes(tensors["words"].numpy()).decode()
            words = {word: i for i, word in enumerate(text.split("\n"))} if text else {}
        return cls(
            num_documents=int(metadata["num_documents"]),
            words=words,
            keys=tuple(tensors[f"keys_{n}"] for n in orders),
            counts=tuple(tensors[f"counts_{n}"] for n in orders),
            base=int(metadata["base"]),
            eos=json.loads(metadata["eos"]),
        )


def _check_words(groups: Sequence[Sequence[Sequence[str]]], name: str) -> None:
    """Refuse strings where lists of words belong, whose characters would be counted as words, and images without captions."""
    if len(groups) == 0:
        raise ValueError(f"There are no {name}. Pass one list per image.")
    for i, captions in enumerate(groups):
        if isinstance(captions, str) or len(captions) == 0:
            raise ValueError(f"{name}[{i}] is {captions!r}. Pass a list of at least one tokenised caption per image.")
        for j, caption in enumerate(captions):
            if isinstance(caption, str):
                raise ValueError(f"{name}[{i}][{j}] is a string. Tokenise it first.")


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
        if max_order > frequencies.max_order:
            raise ValueError(f"max_order is {max_order}, but n-grams were counted up to {frequencies.max_order}.")
        if not sigma > 1e-100:  # its square must not underflow
            raise ValueError(f"sigma is {sigma} words, but must be above 0.")
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
            raise ValueError("These frequencies are of token ids. Use score_tokens, or count the words of references.")
        if len(candidates) != len(references):
            raise ValueError(
                f"{len(candidates)} images have candidates and {len(references)} references. Pass both for every image."
            )
        _check_words(candidates, "candidates")
        _check_words(references, "references")
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
        device = batch.tokens.device
        candidate_images, reference_images = candidate_images.to(device), reference_images.to(device)
        check_references(batch, candidate_images, reference_images)
        num_slots = int(torch.bincount(reference_images).max())
        blocks = group_blocks(batch, candidate_images, reference_images)
        return torch.cat([self._scores(part, ours, theirs, num_slots) for part, (ours, theirs) in blocks])

    def _scores(self, batch: TokenBatch, candidate_images: Tensor, reference_images: Tensor, num_slots: int) -> Tensor:
        """Scores of a block; S is `num_slots` in every block, so that rounding does not depend on the blocks."""
        num_candidates, num_references = len(candidate_images), len(reference_images)
        device = batch.tokens.device
        images = torch.cat([candidate_images, reference_images])
        number = torch.bincount(reference_images, minlength=int(images.max()) + 1)
        first = torch.cumsum(number, 0) - number
        slots = torch.full_like(images, -1)
        slots[num_candidates:] = slots_of(reference_images)

        counts = count_ngrams(batch, self.max_order, images)
        documents = self.frequencies.lookup(counts)
        idf = math.log(self.frequencies.num_documents) - torch.log(documents.clamp(min=1).double())  # (U,)
        width = self.max_order
        squared = (idf * idf).index_select(0, counts.ids)  # (E,)
        segment = counts.rows * width + counts.orders(counts.ids)  # (E,) caption and order in one number
        amount = counts.counts.double()
        # Of captions without any word, bincount gives integers.
        norms = torch.bincount(segment, squared * amount * amount, len(batch) * width).double().sqrt_().view(-1, width)

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
        cosines = torch.where(scale > 0, similarity / scale.clamp(min=1e-300), torch.zeros_like(similarity))
        similarity = cosines.mean(dim=1)
        if self.variant == "cider_d":
            lengths = (counts.lengths - 1).clamp(min=0).double()
            delta = lengths[:num_candidates, None] - lengths[at]
            similarity = similarity * torch.exp(-(delta**2) / (2 * self.sigma**2))
        return 10.0 * (similarity * there).sum(dim=1) / number[image]
