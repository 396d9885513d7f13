"""Document frequencies of n-grams for CIDEr, counted once and stored in a file."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hf_captionrl.io import atomic_write_bytes
from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_documents, count_ngrams, encode_words, positions

__all__ = ["EOS", "DocumentFrequencies", "check_words"]

EOS = "<eos>"
_FORMAT = "hf_captionrl.document_frequencies.1"


@dataclass(frozen=True)
class DocumentFrequencies:
    """Number of images (documents) whose references contain each n-gram.

    Create it with [`DocumentFrequencies.from_references`] from the words of the training references (or with
    `from_token_batch` from token ids), not from one batch: frequencies of a batch give a different metric
    (1.157 instead of 1.075 on one batch), and with those of a single image every score is 0.
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
    ) -> "DocumentFrequencies":
        """Count the references of all images."""
        check_words(references, "references")
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
    ) -> "DocumentFrequencies":
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
        """The largest n that was counted."""
        return len(self.keys)

    def to(self, device: torch.device | str) -> "DocumentFrequencies":
        """Move the tables."""
        keys, counts = tuple(k.to(device) for k in self.keys), tuple(c.to(device) for c in self.counts)
        return DocumentFrequencies(self.num_documents, self.words, keys, counts, self.base, self.eos)

    def lookup(self, counts: NgramCounts) -> Tensor:
        """Number of documents that contain each distinct n-gram. Returns `(U,)`: int64, 0 for unknown n-grams."""
        if counts.max_order > self.max_order:
            raise ValueError(
                f"n-grams of order {counts.max_order} were requested, but only orders up to {self.max_order} were counted. Lower max_order."
            )
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

    def of(self, ngram: str) -> int:
        """Number of documents that contain one n-gram, for inspection."""
        words = ngram.split()
        if self.words is None:
            raise ValueError("These frequencies are of token ids, not of words. Use lookup.")
        if not 1 <= len(words) <= self.max_order:
            raise ValueError(f"{ngram!r} has {len(words)} words. Use 1 to {self.max_order}, which were counted.")
        counts = count_ngrams(encode_words([words], known=self.words), len(words))
        return int(self.lookup(counts)[counts.offsets[-2]])

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
    def load(cls, path: str | os.PathLike) -> "DocumentFrequencies":
        """Read what [`DocumentFrequencies.save`] wrote; nothing in the file is executed."""
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a file of document frequencies: {error}. Count them again."
            ) from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{os.fspath(path)} has the format {metadata.get('format')!r}, not {_FORMAT!r}. Count them again."
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


def check_words(groups: Sequence[Sequence[Sequence[str]]], name: str) -> None:
    """Raise unless `groups` is a list of lists of tokenised captions."""
    if len(groups) == 0:
        raise ValueError(f"There are no {name}. Pass one list per image.")
    for i, captions in enumerate(groups):
        if isinstance(captions, str):
            raise ValueError(
                f"{name}[{i}] is a string, not a list of captions. Pass [[...], ...], one list per image."
            )
        if len(captions) == 0:
            raise ValueError(f"{name}[{i}] is empty. Pass at least one per image.")
        for j, caption in enumerate(captions):
            if isinstance(caption, str):
                raise ValueError(
                    f"{name}[{i}][{j}] is a string; its characters would be counted as words. Tokenise it first."
                )
