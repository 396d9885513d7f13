"""One distinct caption per image, and the image that each caption finds.

Legend: M images, N captions, S candidates of all images, k neighbours, D features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.album.candidate_assignment import Choice, choose_candidates
from hf_captionrl.album.candidate_scores import CandidateScores, confusions_of, score_candidates
from hf_captionrl.retrieval.duplicates import duplicate_images
from hf_captionrl.retrieval.feature_checks import check_features, check_targets
from hf_captionrl.retrieval.neighbours import normalised
from hf_captionrl.retrieval.ranking import ranks_from_scores, tie_copies

__all__ = ["AlbumCaption", "ChosenCaptions", "Finding", "distinct_captions", "found_images", "same_text"]


@dataclass(frozen=True)
class Finding:
    """A caption and the image that it finds in the album."""

    caption: str
    rank: int  # rank of its target among the images of the album, 1 = best; ties count against it
    found: int  # row of the image that it finds


@dataclass(frozen=True)
class AlbumCaption:
    """The caption chosen for an image of an album."""

    caption: str
    candidate: int  # its index among the image's candidates
    rank: int  # rank of the image among the images compared, 1 = best; ties count against it
    # Similarity to its image minus that to the most similar other image; None in an album of one image.
    margin: float | None
    is_distinct: bool  # whether it is not blank and no other image of the album has the same text
    confused_with: tuple[int, ...]  # rows of the other images that the caption fits at least as well, best first


@dataclass(frozen=True)
class ChosenCaptions:
    """One caption for each image, with the choice and the scores of all candidates."""

    captions: list[AlbumCaption]
    choice: Choice = field(repr=False)
    scores: CandidateScores = field(repr=False)


def same_text(caption: str) -> str:
    """A caption without case, extra blanks and a final full stop, to compare texts."""
    return " ".join(caption.casefold().split()).rstrip(" .")


def found_images(text_features: Any, image_features: Any, targets: Any = None) -> tuple[Tensor, Tensor]:
    """Rank of each caption's target, and the image that it finds.

    Shapes: `text_features` `(N, D)`, `image_features` `(M, D)`. Returns int64 tensors `(N,)`: ranks of the targets, 1
    = best, and rows of the images found.
    """
    scores, columns = _scores(text_features, image_features, targets)
    rank = ranks_from_scores(scores, columns)
    best_other = scores.scatter(1, columns[:, None], -torch.inf).argmax(1)
    return rank.cpu(), torch.where(rank == 1, columns, best_other).cpu()


def distinct_captions(
    candidates: Sequence[Sequence[str]],
    text_features: Any,
    image_features: Any,
    *,
    neighbours: Tensor | None = None,
    allowed: np.ndarray | None = None,
    max_component: int = 2000,
    exclusive: bool = True,
    progress: Any = None,
) -> ChosenCaptions:
    r"""Choose one candidate for each image so that the texts differ and each retrieves its target.

    The margin of a caption t of image i is `m_i(t) = s(t, i) - max_{j != i} s(t, j)`; it is positive exactly if the rank
    is 1. The choice is the exact optimum of, in this order:

    1. the number of different texts, each used by one image,
    2. the number of these texts with rank 1,
    3. the sum of their margins.

    See [`choose_candidates`]. An image for which no text is left gets its candidate with the largest margin. This text
    is blank or belongs to another image as well; `is_distinct` is then False for both. In an album of one image the similarity replaces
    the margin.

    Shapes: `image_features` `(M, D)`, `neighbours` `(M, k)`, `allowed` `(S,)`. `text_features` may be an object that
    gives the rows of an array of numbers, such as `EncodedTexts`.
    """
    for row, texts in enumerate(candidates):
        if isinstance(texts, str) or not texts:
            raise ValueError(f"candidates[{row}] is {texts!r}. Use a list of at least one caption per image.")
    images = normalised(image_features, "image_features")
    number = len(candidates)
    if number != len(images):
        raise ValueError(
            f"There are candidates for {number} images, but features of {len(images)}. Use the same images for both."
        )
    if isinstance(text_features, Tensor | np.ndarray | list):
        text_features = normalised(text_features, "text_features")
    starts = np.cumsum([0, *map(len, candidates)])
    flat = [text for texts in candidates for text in texts]
    keys, numbers = _number_texts(flat)
    scores = score_candidates(text_features, starts, images, neighbours, progress)
    choice = choose_candidates(
        starts, numbers, scores, allowed=allowed, max_component=max_component, exclusive=exclusive
    )
    taken = choice.chosen.tolist()
    confusions = confusions_of(text_features, taken, images, neighbours)
    holders = Counter(keys[i] for i in taken)
    found = [
        AlbumCaption(
            caption=flat[i],
            candidate=i - int(starts[row]),
            rank=int(scores.rank[i]),
            margin=float(scores.margin[i]) if number > 1 else None,
            is_distinct=holders[keys[i]] == 1 and bool(keys[i]),
            confused_with=confusions[row][0],
        )
        for row, i in enumerate(taken)
    ]
    return ChosenCaptions(found, choice, scores)


def _number_texts(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Texts as they are compared, and their numbers: equal for equal texts, -1 for blank ones."""
    keys = [same_text(text) for text in texts]
    number_of = {"": -1}
    for key in keys:
        number_of.setdefault(key, len(number_of) - 1)
    return keys, np.fromiter((number_of[key] for key in keys), np.int64, len(keys))


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
