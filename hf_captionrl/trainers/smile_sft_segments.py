r"""Segments of a packed batch that share one vocabulary subset: documents, sentences or windows.

Legend: B rows of a batch, T tokens, D features, N supervised tokens, K segments, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX

__all__ = ["Segments", "document_ids", "find_segments", "sentence_ends", "similar_lengths"]

_END_MARKS = (".", "!", "?", "。", "！", "？", "…")
_CLOSING = "\"'”’»)]* \t"  # may follow the mark within one token
_PADDING_FACTOR = 4  # rows of a group are padded to at most so many times their length
_SMALL = 4096  # slots below which one group is always faster than several


class Segments(NamedTuple):
    """The supervised tokens of a batch and their segments."""

    index: Tensor  # (N,): position of each token in the flattened `(B, T)` batch
    segment: Tensor  # (N,): its segment, counted from 0, ascending
    slot: Tensor  # (N,): its place within the segment
    lengths: Tensor  # (K,): tokens of each segment, at least 1


def sentence_ends(tokenizer: Any, vocab_size: int) -> Tensor:
    """Which tokens end a sentence, from the text of each token alone.

    A token ends a sentence if its text ends in `. ! ? …` or their full-width forms (closing quotes and brackets after it
    are ignored), contains a line break, or is a special token such as the end of the text. The point of "3.14" counts as
    an end too.

    Returns `(V,)`: bool.
    """
    ends = torch.zeros(vocab_size, dtype=torch.bool)
    known = min(len(tokenizer), vocab_size)
    for token, text in enumerate(tokenizer.batch_decode([[i] for i in range(known)], skip_special_tokens=False)):
        ends[token] = "\n" in text or text.rstrip(_CLOSING).endswith(_END_MARKS)
    special = [token for token in tokenizer.all_special_ids if token < vocab_size]
    ends[special] = True
    return ends


def document_ids(labels: Tensor, position_ids: Tensor | None) -> Tensor:
    """Which document each token belongs to.

    `position_ids` `(B, T)` are 0 at the first token of each document; None where a row is a document. The ids `(B, T)`
    ascend over the flattened batch.
    """
    B, T = labels.shape
    rows = torch.arange(B, device=labels.device).unsqueeze(1) * (T + 1)  # (B, 1)
    if position_ids is None:
        return rows.expand(B, T)
    return rows + (position_ids.expand(B, T) == 0).cumsum(1)


def find_segments(
    labels: Tensor, documents: Tensor, scope: str, *, window_tokens: int = 32, ends: Tensor | None = None
) -> Segments:
    """Split the supervised tokens into segments that share one subset.

    A sentence includes all consecutive end marks ("?!", ". " and the end of the text), and ends at unsupervised tokens
    (another speaker's turn). Windows count the supervised tokens of a document; a single last token, often the end of the
    text, joins the previous window.

    Shapes: `labels` `(B, T)`, `documents` `(B, T)`, `ends` `(V,)`.
    """
    index = (labels != IGNORE_INDEX).flatten().nonzero().squeeze(1)  # (N,)
    tokens, document = labels.flatten()[index], documents.flatten()[index]
    order = torch.arange(len(index), device=index.device)
    first = torch.ones_like(index, dtype=torch.bool)  # first of its document
    first[1:] = document[1:] != document[:-1]
    starts = first.clone()
    if scope == "sentence":
        if ends is None:
            raise ValueError("scope='sentence' needs the tokens that end a sentence. Pass ends=sentence_ends(...).")
        ending = ends.to(tokens.device)[tokens]  # (N,)
        starts[1:] |= (ending[:-1] & ~ending[1:]) | (index[1:] != index[:-1] + 1)
    elif scope == "window":
        place = order - torch.where(first, order, 0).cummax(0).values  # within the document
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        starts |= (place % window_tokens == 0) & ~last
    elif scope != "document":
        raise ValueError(f"scope is {scope!r}. Use 'document', 'sentence' or 'window'.")
    segment = starts.cumsum(0) - 1
    slot = order - torch.where(starts, order, 0).cummax(0).values
    return Segments(index, segment, slot, torch.bincount(segment))


def similar_lengths(lengths: Tensor) -> Iterator[Tensor]:
    """Groups of segments of lengths `(K,)` that may be padded to one length without much waste."""
    if lengths.numel() == 0:
        return
    ordered, order = lengths.sort(descending=True)
    if int(ordered[0]) * lengths.numel() <= _SMALL:
        yield order
        return
    remaining = ordered.tolist()
    start = 0
    while start < len(remaining):
        shortest = remaining[start] / _PADDING_FACTOR
        stop = start + sum(length > shortest for length in remaining[start:])
        yield order[start:stop]
        start = stop
