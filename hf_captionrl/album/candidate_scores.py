"""Similarities of candidate captions with their image and the images that it may be confused with, in blocks.

Legend: M images, S candidates of all images, G most candidates of one image, k neighbours per image, B images of a block,
D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval.duplicates import duplicate_images
from hf_captionrl.retrieval.ranking import ranks_from_scores, tie_copies

__all__ = ["CandidateScores", "EncodedTexts", "confusions_of", "score_candidates"]

_BLOCK_FLOATS = 2**23
"""Gathered features or scores per block: 32 MiB."""


class EncodedTexts:
    """Features of captions, computed when they are read, because those of millions of candidates do not fit into memory."""

    def __init__(self, scorer: Any, captions: Sequence[str]) -> None:
        self.scorer = scorer
        self.captions = captions

    def __getitem__(self, rows: Any) -> Tensor:
        return self.scorer.text_features([self.captions[row] for row in np.asarray(rows).tolist()])


@dataclass(frozen=True)
class CandidateScores:
    """Scores of every candidate, from which captions are chosen."""

    own: np.ndarray  # (S,): similarity to its image
    margin: np.ndarray  # (S,): that similarity minus the largest to another image; `own` if there is none
    rank: np.ndarray  # (S,): rank of its image among the images compared, 1 = best; ties count against it


def score_candidates(
    text_features: Any, starts: np.ndarray, images: Tensor, neighbours: Tensor | None = None, progress: Any = None
) -> CandidateScores:
    """Compare every candidate with its image and the image's neighbours, or with all images.

    Shapes: `starts` `(M + 1,)`, `images` `(M, D)`, `neighbours` `(M, k)`. With `neighbours=None` it is compared with
    all others.
    """
    total = int(starts[-1])
    own: np.ndarray = np.empty(total, np.float32)
    margin: np.ndarray = np.empty(total, np.float32)
    rank: np.ndarray = np.empty(total, np.int32)
    for rows, scores in _blocks(text_features, starts, images, neighbours, progress):
        mine = scores[:, 0]
        rank[rows] = ranks_from_scores(scores, torch.zeros(len(scores), dtype=torch.long)).numpy()
        own[rows] = mine.numpy()
        margin[rows] = (mine - scores[:, 1:].amax(1) if scores.shape[1] > 1 else mine).numpy()
    return CandidateScores(own, margin, rank)


def confusions_of(
    text_features: Any,
    chosen: Sequence[int],
    images: Tensor,
    neighbours: Tensor | None = None,
    *,
    starts: np.ndarray | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """For some captions, rows of the other images that each fits at least as well, best first, and its margin.

    `chosen` are rows of the text features; `starts` `(M + 1,)` is the first of them of each image, None one per image.
    """
    rows_of = np.asarray(chosen, dtype=np.int64)
    starts = np.arange(len(rows_of) + 1) if starts is None else starts
    owner = np.arange(len(images)).repeat(np.diff(starts))
    found: list[tuple[tuple[int, ...], float]] = []

    class Chosen:
        def __getitem__(self, rows: Any) -> Any:
            return text_features[rows_of[rows]]

    for rows, scores in _blocks(Chosen(), starts, images, neighbours, None):
        others = scores[:, 1:]
        margins = scores[:, 0] - others.amax(1) if others.shape[1] else scores[:, 0]
        better = torch.nonzero(others >= scores[:, :1])
        better = better[others[better[:, 0], better[:, 1]].argsort(descending=True, stable=True)]
        mine: list[list[int]] = [[] for _ in rows]
        for row, column in better.tolist():
            mine[row].append(column)
        for image, columns, margin in zip(owner[rows].tolist(), mine, margins.tolist(), strict=True):
            if neighbours is not None:
                columns = neighbours[image, columns].tolist()
            else:
                columns = [column + (column >= image) for column in columns]
            found.append((tuple(columns), margin))
    return found


def _blocks(
    text_features: Any, starts: np.ndarray, images: Tensor, neighbours: Tensor | None, progress: Any
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Rows of candidates and their scores `(rows, 1 + others)`: the target first, equal images tied."""
    number = len(images)
    same = duplicate_images(images)
    others = number - 1 if neighbours is None else neighbours.shape[1]
    most = int(np.diff(starts).max(initial=1))
    width = number * most if neighbours is None else (1 + others) * max(images.shape[1], most)
    size = max(1, _BLOCK_FLOATS // max(width, 1))
    for first in range(0, number, size):
        block = np.arange(first, min(first + size, number))
        rows = np.arange(starts[block[0]], starts[block[-1] + 1])
        counts = np.diff(starts[first : block[-1] + 2])
        text = torch.as_tensor(text_features[rows]).to(images)  # (rows, D)
        if neighbours is None:
            yield rows, _against_all(text, torch.from_numpy(block.repeat(counts)), images, same)
        else:
            yield rows, _against_neighbours(text, block, counts, images, neighbours, same)
        if progress is not None:
            progress(len(block))


def _against_all(text: Tensor, owners: Tensor, images: Tensor, same: Tensor) -> Tensor:
    scores = tie_copies(text @ images.T, same)  # (rows, M)
    # Move the target to the front; the others keep their order.
    own = scores.gather(1, owners[:, None])
    kept = torch.ones_like(scores, dtype=torch.bool).scatter_(1, owners[:, None], False)
    return torch.cat([own, scores[kept].view(len(scores), scores.shape[1] - 1)], 1).cpu()


def _against_neighbours(
    text: Tensor, block: np.ndarray, counts: np.ndarray, images: Tensor, neighbours: Tensor, same: Tensor
) -> Tensor:
    own = torch.from_numpy(block)
    columns = torch.cat([own[:, None], neighbours[own]], 1)  # (B, 1 + k)
    place = np.arange(counts.max()) < counts[:, None]  # (B, G)
    padded = text.new_zeros(*place.shape, text.shape[1])
    padded[torch.from_numpy(place)] = text
    scores = torch.bmm(padded, images[columns].transpose(1, 2)).cpu()  # (B, G, 1 + k)
    equal = same[columns] == same[columns[:, :1]]  # (B, 1 + k)
    if int(equal.sum()) > len(block):
        scores = torch.where(equal[:, None], scores[:, :, :1], scores)
    return scores[torch.from_numpy(place)]
