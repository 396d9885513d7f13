"""CIDEr-D and plain CIDEr on integer n-grams, with document frequencies that are counted once and kept.

The two are different metrics. CIDEr-D (what pycocoevalcap and most papers call "CIDEr") clips the candidate's counts
at the reference's and multiplies by a Gaussian of the difference in length; plain CIDEr does neither.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_ngrams, encode_words, positions

__all__ = ["EOS", "CiderScorer", "DocumentFrequencies"]

EOS = "<eos>"
_FORMAT = "hf_captionrl.document_frequencies.1"


@dataclass(frozen=True)
class DocumentFrequencies:
    """In how many images (documents) each n-gram of the references stands.

    Make one with [`DocumentFrequencies.from_references`] from the words of the training references (or with
    `from_token_batch` from token ids), never from the batch at hand: frequencies of one batch are another metric
    (1.157 against 1.075 on one batch), and those of one image alone make every score 0.

    Args:
        num_documents: Images counted.
        words: Ids of words 0 ... W-1; `None` where n-grams are of token ids.
        keys: Per order, sorted int64 tensor of `prefix * base + word`, `prefix` being the position of the n-gram
            without its last word among the keys of the order before.
        counts: Per order, the documents of each key.
        base: Multiplier in the keys, larger than any word id.
        eos: Whether every caption was counted with an end-of-sequence word.
    """

    num_documents: int
    words: dict[str, int] | None
    keys: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    base: int
    eos: bool

    @classmethod
    def from_references(
        cls, references: Sequence[Sequence[Sequence[str]]], *, eos: bool = False, max_order: int = 4
    ) -> "DocumentFrequencies":
        """Count the references of all images.

        Args:
            references: For each image its references, each a list of words.
            eos: Whether to end every reference with an end-of-sequence word, so that endings are scored too.
            max_order: Longest n-gram.
        Returns:
            `DocumentFrequencies`: On words.
        Raises:
            ValueError: If there is no image, an image has no reference, or a reference is a string.
        """
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
    ) -> "DocumentFrequencies":
        """Count references that are integers already, such as the token ids of a captioner.

        Args:
            batch: The references, EOS included if it is to be scored.
            documents (`torch.Tensor` of shape `(N,)`): Image of each reference, 0 ... M-1.
            words: Ids of the words, where ids stand for words.
            eos: Whether the references end with EOS, for the record.
            max_order: Longest n-gram.
        Returns:
            `DocumentFrequencies`: On the CPU.
        Raises:
            ValueError: If there is no reference.
        """
        if len(batch) == 0:
            raise ValueError("There is no reference to count.")
        counts = count_ngrams(batch, max_order, documents)
        frequency = torch.bincount(counts.column_ids, minlength=counts.num_distinct).cpu()
        base = int(batch.tokens.max()) + 1 if len(batch.tokens) else 1
        prefixes, last = counts.prefixes.cpu(), counts.words.cpu()
        keys, found = [], []
        for n in range(max_order):
            here = slice(counts.offsets[n], counts.offsets[n + 1])
            # Ids of an order are sorted by (prefix, word), and so are these keys.
            keys.append((prefixes[here] - (counts.offsets[n - 1] if n else -1)) * base + last[here])
            found.append(frequency[here].to(torch.int32))
        return cls(int(documents.max()) + 1, words, tuple(keys), tuple(found), base, eos)

    @property
    def max_order(self) -> int:
        """Longest n-gram counted."""
        return len(self.keys)

    def to(self, device: torch.device | str) -> "DocumentFrequencies":
        """Move the tables.

        Args:
            device: Where to.
        Returns:
            `DocumentFrequencies`: With its tables on that device.
        """
        keys, counts = tuple(k.to(device) for k in self.keys), tuple(c.to(device) for c in self.counts)
        return DocumentFrequencies(self.num_documents, self.words, keys, counts, self.base, self.eos)

    def lookup(self, counts: NgramCounts) -> Tensor:
        """Documents that hold each distinct n-gram.

        Args:
            counts: Counts whose words have the ids of this object.
        Returns:
            `torch.Tensor` of shape `(U,)`: int64, 0 for n-grams never seen.
        Raises:
            ValueError: If longer n-grams are asked for than were counted.
        """
        if counts.max_order > self.max_order:
            raise ValueError(
                f"n-grams of order {counts.max_order} asked for, but {self.max_order} is the longest counted."
            )
        found, position = [], torch.zeros_like(counts.words[:0])
        for n in range(counts.max_order):
            here = slice(counts.offsets[n], counts.offsets[n + 1])
            keys, frequency = self.keys[n].to(position.device), self.counts[n].to(position.device)
            word = counts.words[here]
            if len(keys) == 0:
                found.append(torch.zeros_like(word))
                position = torch.full_like(word, -1)
                continue
            # Positions of this order's prefixes among the keys; an unseen prefix (-1) makes a negative key, which is
            # not found, and so would a word past the base be taken for another one: it is masked.
            prefix = position.index_select(0, counts.prefixes[here] - counts.offsets[n - 1]) if n else 0
            key = torch.where(word < self.base, prefix * self.base + word, -1)
            # Where every word id occurs, as with words, an id is its own position.
            at = key if n == 0 and len(keys) == self.base else torch.searchsorted(keys, key)
            at = at.clamp(min=0, max=len(keys) - 1)
            known = keys.index_select(0, at) == key
            position = torch.where(known, at, -(self.base + 1))
            found.append(torch.where(known, frequency.index_select(0, at).long(), 0))
        return torch.cat(found)

    def of(self, ngram: str) -> int:
        """Documents that hold one n-gram, for a look by hand.

        Args:
            ngram: Words with blanks between them.
        Returns:
            `int`: 0 if it was never seen.
        Raises:
            ValueError: If frequencies are of token ids, or the n-gram is empty or longer than was counted.
        """
        words = ngram.split()
        if self.words is None:
            raise ValueError("These frequencies are of token ids, not of words.")
        if not 1 <= len(words) <= self.max_order:
            raise ValueError(f"{ngram!r} has {len(words)} words; 1 to {self.max_order} were counted.")
        counts = count_ngrams(encode_words([words], known=self.words), len(words))
        return int(self.lookup(counts)[counts.offsets[-2]])

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file, whole or not at all.

        Args:
            path: The file.
        """
        tensors = {f"keys_{n}": keys.cpu().contiguous() for n, keys in enumerate(self.keys)}
        tensors |= {f"counts_{n}": counts.cpu().contiguous() for n, counts in enumerate(self.counts)}
        if self.words is not None:
            # A word has no line break in it, so lines are a safe list.
            text = "\n".join(self.words).encode()
            tensors["words"] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()
        metadata = {"format": _FORMAT, "num_documents": str(self.num_documents), "base": str(self.base)}
        metadata["eos"] = json.dumps(self.eos)
        metadata["max_order"] = str(self.max_order)
        partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "DocumentFrequencies":
        """Read what [`DocumentFrequencies.save`] wrote; nothing in the file is executed.

        Args:
            path: The file.
        Returns:
            `DocumentFrequencies`: Equal to the saved one.
        Raises:
            ValueError: If the file is not one, is cut or is of another version.
        """
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a file of document frequencies: {error}. Count them anew."
            ) from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{os.fspath(path)} has the format {metadata.get('format')!r}, not {_FORMAT!r}. Count them anew."
            )
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
    if len(groups) == 0:
        raise ValueError(f"There are no {name}. Pass a list for each image.")
    for i, captions in enumerate(groups):
        if isinstance(captions, str):
            raise ValueError(
                f"{name}[{i}] is a string, not a list of captions. Pass [[...], ...], a list for each image."
            )
        if len(captions) == 0:
            raise ValueError(f"{name}[{i}] is empty: every image needs at least one.")
        for j, caption in enumerate(captions):
            if isinstance(caption, str):
                raise ValueError(
                    f"{name}[{i}][{j}] is a string; its characters would be counted as words. Tokenise it first."
                )


class CiderScorer:
    r"""CIDEr-D or CIDEr of captions against references.

    Reference: Vedantam et al. 2015, "CIDEr: Consensus-based Image Description Evaluation".
    With `g_n(c)` the vector of counts times `log M - log max(1, df)` of the n-grams of order n:
    `CIDEr = 10 / (4 R) sum_n sum_r g_n(c) . g_n(r) / (|g_n(c)| |g_n(r)|)`; CIDEr-D puts `min(g_n(c), g_n(r))` for the
    first `g_n(c)` and multiplies by `exp(-(l(c) - l(r))^2 / (2 sigma^2))`.
    Differs from it by: nothing; as in the authors' code, counts are not divided by the length, and l counts bigrams.

    Args:
        frequencies: Document frequencies; those of the training references for rewards, of the corpus for evaluation.
        variant: `"cider_d"` or `"cider"`.
        sigma: Width of the length penalty of CIDEr-D, in words.
        max_order: Longest n-gram, averaged with all shorter ones.
    Raises:
        ValueError: If the variant is neither, or frequencies of shorter n-grams are given.

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
        self.frequencies = frequencies
        self.variant = variant
        self.sigma = sigma
        self.max_order = max_order

    def __call__(
        self, candidates: Sequence[Sequence[Sequence[str]]], references: Sequence[Sequence[Sequence[str]]]
    ) -> Tensor:
        """Score the candidates of each image against its references.

        Args:
            candidates: For each image, its candidates as lists of words.
            references: For each image, its references as lists of words.
        Returns:
            `torch.Tensor` of shape `(N,)`: float64 scores in [0, 10] of all candidates, image after image; higher is
        better.
        Raises:
            ValueError: If the numbers of images disagree, an image has no candidate or no reference, or frequencies
                are of token ids.
        """
        if self.frequencies.words is None:
            raise ValueError(
                "These frequencies are of token ids. Use score_tokens, or count the words of the references."
            )
        if len(candidates) != len(references):
            raise ValueError(
                f"{len(candidates)} images with candidates and {len(references)} with references. Pass one each."
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
        """Score captions that are integers already; runs on the device of the batch.

        Args:
            batch: The N candidates, then the R references.
            candidate_images (`torch.Tensor` of shape `(N,)`): Image of each candidate.
            reference_images (`torch.Tensor` of shape `(R,)`): Image of each reference, sorted.
        Returns:
            `torch.Tensor` of shape `(N,)`: float64 scores in [0, 10]; higher is better.
        Raises:
            ValueError: If the sizes disagree, references are not sorted by image, or an image has none.
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
                f"Candidate {int(missing[0])} belongs to image {int(images[missing[0]])}, which has no reference."
            )
        if num_references > 1 and bool((images[num_candidates + 1 :] < images[num_candidates:-1]).any()):
            raise ValueError("reference_images must be sorted, references of one image side by side.")
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

        ours = positions(counts.rows < num_candidates)  # (E',) entries of the candidates
        theirs = counts.table(slots).index_select(0, counts.columns.index_select(0, ours))  # (E', S)
        own = amount.index_select(0, ours)[:, None]
        clipped = torch.minimum(own, theirs) if self.variant == "cider_d" else own
        products = clipped * theirs * squared.index_select(0, ours)[:, None]
        num_slots = theirs.shape[1]
        similarity = torch.zeros(num_candidates * width, num_slots, dtype=torch.float64, device=device)
        similarity.index_add_(0, segment.index_select(0, ours), products)
        similarity = similarity.view(num_candidates, width, num_slots)

        # (N, S): the caption that stands at each slot of the candidate's image; slots past the last are masked.
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
