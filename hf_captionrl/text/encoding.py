"""Captions of many images as integers: words are strings only while a block of captions is encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from hf_captionrl.text.frequencies import EOS
from hf_captionrl.text.ngrams import TokenBatch, encode_words
from hf_captionrl.text.tokenize import ptb_tokenize

__all__ = ["encode_captions"]

_IMAGES_AT_ONCE = 1024


def encode_captions(
    images: Iterable[Sequence[str]],
    vocabulary: dict[str, int] | None = None,
    *,
    known: Mapping[str, int] | None = None,
    eos: bool = False,
) -> tuple[TokenBatch, Tensor]:
    """Words of the captions of each image by the rules of the Penn Treebank, without punctuation, as integers.

    New words are added to `vocabulary`, numbered after those of `known`. With `eos`, every caption ends with an
    end-of-sequence word. Returns the captions, whose tokens are int32, and the image of each, int64 `(N,)`.
    """
    vocabulary = {} if vocabulary is None else vocabulary
    end = [EOS] if eos else []
    tokens, lengths, sizes = [], [], []
    for block in _blocks(images):
        words = [[*ptb_tokenize(caption), *end] for captions in block for caption in captions]
        batch = encode_words(words, vocabulary, known=known)
        tokens.append(batch.tokens.int())
        lengths.append(batch.lengths)
        sizes.append(torch.tensor([len(captions) for captions in block]))
    number = torch.cat(sizes)
    return TokenBatch(torch.cat(tokens), torch.cat(lengths)), torch.repeat_interleave(
        torch.arange(len(number)), number
    )


def _blocks(images: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    given = iter(images)
    while block := list(islice(given, _IMAGES_AT_ONCE)):
        yield block
