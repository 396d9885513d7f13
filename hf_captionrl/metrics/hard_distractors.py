"""Recall among the nearest images and random ones, as in DiscriTune's Table 12.

Legend: N captions, one per image; D features.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_captionrl.metrics.bootstrap import bootstrap_interval
from hf_captionrl.metrics.signature import signature
from hf_captionrl.retrieval.feature_checks import as_features, unit_rows
from hf_captionrl.retrieval.neighbours import nearest_neighbours
from hf_captionrl.retrieval.ranking import distractor_recall, ranks, set_ranks

__all__ = ["hard_distractor_recall"]


def hard_distractor_recall(
    text_features: Any,
    image_features: Any,
    *,
    num_nearest: int,
    num_distractors: int = 99,
    seed: int = 0,
    scorer: str = "",
) -> dict[str, Any]:
    r"""Recall at 1 of each caption among its image, the k nearest images and `num_distractors - k` random ones.

    Source: Dessi et al. 2023, Appendix D, Table 12. The random images are drawn from all others. This is the exact
    expectation: with b of the M - 1 - k other images better and none of the k nearest, it is
    `C(M-1-k-b, n) / C(M-1-k, n)` for n = `num_distractors` - k, else 0. Ties count against the caption.

    Args:
        text_features (array or tensor of shape `(N, D)`): Features of the captions.
        image_features (array or tensor of shape `(N, D)`): Features of their images, which also define who is near.
        num_nearest: Number k of nearest images, by cosine.
        num_distractors: Number of distractors per caption, the nearest included.
        seed: Seed of the bootstrap.
        scorer: Scorer and revision, for the signature.

    Returns:
        `dict`: `recall_at_1` in [0, 1], `recall_at_1_ci`, `recall_at_1_per_sample` `(N,)`, `signature`.
    """
    text = unit_rows(as_features(text_features, "text_features"), "text_features")
    images = unit_rows(as_features(image_features, "image_features"), "image_features")
    if not 1 <= num_nearest <= num_distractors:
        raise ValueError(f"num_nearest is {num_nearest}. Use 1 to num_distractors ({num_distractors}).")
    if len(text) != len(images) or len(images) <= num_distractors:
        raise ValueError(
            f"There are {len(text)} captions and {len(images)} images. Pass one caption per image, of more than "
            f"{num_distractors} images."
        )
    nearest = torch.as_tensor(nearest_neighbours(images, num_nearest)[0])  # (N, k)
    owners = torch.arange(len(images))
    among_nearest = set_ranks(text, images, torch.cat([owners[:, None], nearest], 1).tolist(), owners)
    # Of the images that rank higher, those that are not among the nearest can be drawn.
    better = ranks(text, images, owners) - among_nearest
    drawn = num_distractors - num_nearest
    chance = torch.ones(len(images), dtype=torch.float64)
    if drawn:
        chance = distractor_recall(better + 1, len(images) - num_nearest, k=1, num_distractors=drawn).double()
    values = (chance * (among_nearest == 1)).numpy()
    return {
        "recall_at_1": float(values.mean()),
        "recall_at_1_ci": bootstrap_interval(values, seed=seed),
        "recall_at_1_per_sample": values,
        "signature": signature(
            metric="self_retrieval", scorer=scorer, variant=f"rd{num_distractors + 1}-nearest-{num_nearest}"
        ),
    }
