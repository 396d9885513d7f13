"""Captions of an album: the image that each caption finds, and the choice of one distinct caption per image.

Legend: M images of the album, N captions, D features.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.album.assignment import best_assignment
from hf_captionrl.retrieval.feature_checks import check_features, check_targets
from hf_captionrl.retrieval.ranking import duplicate_images, ranks_from_scores, tie_copies

__all__ = ["AlbumCaption", "AlbumCaptions", "Finding", "distinct_captions", "found_images", "same_text"]


@dataclass(frozen=True)
class Finding:
    """A caption and the image that it finds in the album.

    Args:
        caption: The text.
        rank: Rank of its target when it searches the album, 1 = best; ties count against it.
        found: Row of the image that it finds.
    """

    caption: str
    rank: int
    found: int


@dataclass(frozen=True)
class AlbumCaption:
    """The caption chosen for an image of an album.

    Args:
        caption: The text.
        candidate: Its index among the image's candidates.
        rank: Rank of the image when the caption searches the album, 1 = best; ties count against it.
        margin: Similarity to its image minus that to the most similar other image; None in an album of one image.
        is_distinct: Whether it is not blank and no other image of the album has the same text.
        confused_with: Rows of the other images that the caption fits at least as well.
    """

    caption: str
    candidate: int
    rank: int
    margin: float | None
    is_distinct: bool
    confused_with: tuple[int, ...]


@dataclass(frozen=True)
class AlbumCaptions:
    """One caption for each image of an album.

    Args:
        captions: In the order of the images.
    """

    captions: Sequence[AlbumCaption]

    @property
    def num_distinct(self) -> int:
        """Number of images whose text no other image has."""
        return sum(caption.is_distinct for caption in self.captions)

    @property
    def num_found(self) -> int:
        """Number of images with a distinct text that ranks them first."""
        return sum(caption.is_distinct and caption.rank == 1 for caption in self.captions)

    @property
    def not_distinguished(self) -> list[tuple[int, ...]]:
        """Groups of images that their captions do not distinguish: a caption fits another image as well, or is shared."""
        group = list(range(len(self.captions)))
        for row, caption in enumerate(self.captions):
            shared = [
                i for i, other in enumerate(self.captions) if same_text(other.caption) == same_text(caption.caption)
            ]
            for other in (*caption.confused_with, *shared):
                old, new = group[other], group[row]
                group = [new if name == old else name for name in group]
        groups = [tuple(i for i, name in enumerate(group) if name == which) for which in dict.fromkeys(group)]
        return [rows for rows in groups if len(rows) > 1]


def same_text(caption: str) -> str:
    """A caption without case, extra blanks and a final full stop, to compare texts."""
    return " ".join(caption.casefold().split()).rstrip(" .")


def found_images(text_features: Any, image_features: Any, targets: Any = None) -> tuple[Tensor, Tensor]:
    """Rank of each caption's target, and the image that it finds.

    Args:
        text_features (array or tensor of shape `(N, D)`): Features of the captions, unit length for cosine.
        image_features (array or tensor of shape `(M, D)`): Features of the album's images.

    Returns:
        `tuple` of two int64 tensors of shape `(N,)`: ranks of the targets, 1 = best, and rows of the images found.
    """
    scores, columns = _scores(text_features, image_features, targets)
    rank = ranks_from_scores(scores, columns)
    best_other = scores.scatter(1, columns[:, None], -torch.inf).argmax(1)
    return rank.cpu(), torch.where(rank == 1, columns, best_other).cpu()


def distinct_captions(candidates: Sequence[Sequence[str]], text_features: Any, image_features: Any) -> AlbumCaptions:
    r"""Choose one candidate for each image so that the texts differ and each retrieves its target.

    The margin of a caption t of image i is `m_i(t) = s(t, i) - max_{j != i} s(t, j)`; it is positive exactly if the rank
    is 1. The choice is the exact optimum of, in this order:

    1. the number of different texts, each used by one image,
    2. the number of these texts with rank 1,
    3. the sum of their margins.

    It is an assignment of texts to images, solved by [`best_assignment`]. An image for which no text is left gets its
    candidate with the largest margin, which another image has too or which is blank; `is_distinct` is then False for both.
    In an album of one image the similarity replaces the margin.

    Args:
        text_features (array or tensor of shape `(N, D)`): Of all candidates, those of the first image first.
        image_features (array or tensor of shape `(M, D)`): Of the images.
    """
    for row, texts in enumerate(candidates):
        if isinstance(texts, str) or not texts:
            raise ValueError(f"candidates[{row}] is {texts!r}. Use a list of at least one caption per image.")
    owners = [row for row, texts in enumerate(candidates) for _ in texts]
    images = check_features(image_features, "image_features")
    if len(candidates) != len(images):
        raise ValueError(
            f"There are candidates for {len(candidates)} images, but features of {len(images)}. Use the same images for both."
        )
    scores, columns = _scores(text_features, images, owners)
    number = len(candidates)
    own = scores.gather(1, columns[:, None])[:, 0]
    rank = ranks_from_scores(scores, columns).tolist()
    margin = (own - scores.scatter(1, columns[:, None], -torch.inf).amax(1) if number > 1 else own).double().tolist()

    flat = [text for texts in candidates for text in texts]
    keys = list(dict.fromkeys(key for key in map(same_text, flat) if key))
    place = {key: column for column, key in enumerate(keys)}
    # One more text outweighs all ranks, and one more rank outweighs all margins. The last columns, one per image, stand for
    # no text.
    largest = max(map(abs, margin))
    per_rank = 1 + 2 * number * largest
    per_text = 1 + 2 * number * (per_rank + largest)
    gains = np.full((number, len(keys) + number), -np.inf)
    best: dict[tuple[int, int], int] = {}
    for i, (row, text) in enumerate(zip(owners, flat, strict=True)):
        column = place.get(same_text(text))
        gain = margin[i] + per_rank * (rank[i] == 1)
        if column is not None and gain > gains[row, column]:
            gains[row, column] = gain
            best[row, column] = i
    gains[np.arange(number), len(keys) + np.arange(number)] = -per_text
    chosen = best_assignment(gains).tolist()

    first = [owners.index(row) for row in range(number)]
    taken = []
    for row, column in enumerate(chosen):
        mine = range(first[row], first[row] + len(candidates[row]))
        taken.append(best.get((row, column), max(mine, key=lambda i: (bool(same_text(flat[i])), margin[i]))))
    holders = Counter(same_text(flat[i]) for i in taken)
    found = []
    for row, i in enumerate(taken):
        others = torch.nonzero(scores[i] >= scores[i, row]).flatten().tolist()
        found.append(
            AlbumCaption(
                caption=flat[i],
                candidate=i - first[row],
                rank=rank[i],
                margin=margin[i] if number > 1 else None,
                is_distinct=holders[same_text(flat[i])] == 1 and bool(same_text(flat[i])),
                confused_with=tuple(other for other in others if other != row),
            )
        )
    return AlbumCaptions(found)


def _scores(text_features: Any, image_features: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Similarities `(N, M)`, and the column of each caption's target."""
    text = check_features(text_features, "text_features")
    images = check_features(image_features, "image_features").to(text)
    if text.shape[1] != images.shape[1]:
        raise ValueError(
            f"text_features have {text.shape[1]} features and image_features {images.shape[1]}. "
            "Use features of one scorer."
        )
    columns = check_targets(targets, len(text), len(images)).to(text.device)
    scores = text @ images.T
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("Products of text_features and image_features overflow. Use features of unit length.")
    return tie_copies(scores, duplicate_images(images)), columns
