"""Does a scorer match two images with their two captions? Winoground and MMVP-VLM.

Legend: P pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["pair_matching"]


def pair_matching(similarity: Any) -> dict[str, float]:
    """Text, image and group score.

    Reference: Thrush et al. 2022, "Winoground", section 3. A tie is not a success. `image_score` is the pair accuracy of
    MMVP-VLM (Tong et al. 2024), as in the code of No Detail Left Behind.

    Args:
        similarity (array of shape `(P, 2, 2)`): Of caption c with image i, `[p, c, i]`.

    Returns:
        `dict`: Fractions of pairs: `text_score` (each image prefers its caption), `image_score` (each caption prefers its
        image), `group_score` (both); `text_accuracy` and `image_accuracy`, the same per image and per caption.
    """
    values = np.asarray(similarity, dtype=np.float64)
    if values.ndim != 3 or values.shape[1:] != (2, 2) or not len(values):
        raise ValueError(f"similarity has the shape {values.shape}. Pass (pairs, 2 captions, 2 images).")
    own = values[:, [0, 1], [0, 1]]  # (P, 2)
    texts = own > values[:, [1, 0], [0, 1]]  # image i prefers caption i
    images = own > values[:, [0, 1], [1, 0]]  # caption c prefers image c
    return {
        "text_score": float(texts.all(1).mean()),
        "image_score": float(images.all(1).mean()),
        "group_score": float((texts & images).all(1).mean()),
        "text_accuracy": float(texts.mean()),
        "image_accuracy": float(images.mean()),
    }
