"""Copies in an album: the same pixels, and near-copies such as the same photograph saved again.

Legend: M images, D features, k neighbours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.retrieval.scorer_base import Scorer

__all__ = [
    "CALIBRATION_IMAGES",
    "MAX_DIFFERENCE",
    "copy_cosine",
    "copy_leaders",
    "saved_again",
    "small_picture",
    "threshold_of",
]

_SIDE = 16
MAX_DIFFERENCE = 6.0
"""Largest mean difference of small pictures of near-copies, in levels of 255; [`saved_again`] changes small noisy images by 5."""
CALIBRATION_IMAGES = 64
"""Largest number of images, the first of the album, from which the threshold of copies is computed."""
_QUANTILE = 0.05
_PAIRS = 2**16


def small_picture(image: Image.Image) -> np.ndarray:
    """The image at 16 x 16 pixels, `(768,)` uint8."""
    return np.asarray(image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.uint8).reshape(-1)


def saved_again(image: Image.Image) -> Image.Image:
    """The image at four fifths of its size, as JPEG of quality 60: as messengers and web sites save copies."""
    size = tuple(max(8, round(side * 0.8)) for side in image.size)
    buffer = io.BytesIO()
    image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=60)  # type: ignore[arg-type]
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")


def copy_cosine(scorer: Scorer, image: Image.Image) -> float:
    """Cosine of an image and a re-encoded copy of itself."""
    own, copy = scorer.image_features([image, saved_again(image)])
    return float(own @ copy)


def threshold_of(cosines: Sequence[float] | np.ndarray) -> float:
    """Cosine from which two images may be near-copies: 95 % of the images reach it with a re-encoded copy of themselves."""
    return float(np.quantile(np.asarray(cosines, np.float64), _QUANTILE)) if len(cosines) else 1.0


def copy_leaders(
    keys: Sequence[str],
    pictures: np.ndarray,
    features: Tensor,
    neighbours: tuple[Tensor, Tensor] | None,
    threshold: float,
) -> np.ndarray:
    """The first image that each image is a copy of; for images that are not copies, their row.

    Two images are copies if their pixels are equal. They are near-copies if their cosine reaches the threshold and their
    small pictures differ by at most `MAX_DIFFERENCE`: scorers that overlook details give look-alikes high cosines, too.
    Every copy is compared with the first image of its group, so that groups do not grow along chains.

    Shapes: `pictures` `(M, 768)`, `features` `(M, D)`. `neighbours` are rows and cosines `(M, k)`, best first; None
    compares all pairs.
    """
    number = len(keys)
    leader = np.arange(number)
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        leader[row] = first.setdefault(key, row)
    for later, earlier in _near(features, neighbours, threshold):
        if leader[later] != later or leader[earlier] != earlier:
            continue
        difference = np.abs(pictures[later].astype(np.int16) - pictures[earlier].astype(np.int16)).mean()
        if difference <= MAX_DIFFERENCE:
            leader[later] = earlier
    # An image may lead copies and become a copy of an earlier image.
    return leader[leader]


def _near(features: Tensor, neighbours: tuple[Tensor, Tensor] | None, threshold: float) -> Iterator[tuple[int, int]]:
    """Pairs (later row, earlier row) of a cosine of at least the threshold, by the later row, then the earlier one."""
    pairs: list[Tensor] = []
    if neighbours is not None:
        rows, cosines = neighbours
        found = torch.nonzero(cosines >= threshold)
        pairs = [torch.stack([found[:, 0], rows[found[:, 0], found[:, 1]]], 1)]
    else:
        for start in range(0, len(features), 1024):
            found = torch.nonzero(features[start : start + 1024] @ features.T >= threshold).cpu()
            pairs.append(torch.stack([found[:, 0] + start, found[:, 1]], 1))
    both = torch.cat(pairs)
    both = torch.stack([both.amax(1), both.amin(1)], 1)
    both = both[both[:, 0] > both[:, 1]].unique(dim=0)  # sorted
    for part in both.split(_PAIRS):  # the frames of a video give millions of pairs
        yield from ((later, earlier) for later, earlier in part.tolist())
