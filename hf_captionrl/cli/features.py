"""Features by which commands find images that look alike."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets
    import torch

    from hf_captionrl.retrieval import Scorer

__all__ = ["similarity_features"]


def similarity_features(arguments: argparse.Namespace, dataset: datasets.Dataset, scorer: Scorer) -> torch.Tensor:
    """What images are alike by: one unit vector an image, of the image alone or of image and captions.

    Reference: Gaur et al. 2024 (No Detail Left Behind), section 3: the feature of an image beside the mean of those of its
    captions.

    Args:
        arguments: `features` (`"multimodal"` or `"image"`), `cache_dir` and `batch_size` count.
        dataset: N images, for `"multimodal"` with captions.
        scorer: Whose features.

    Returns:
        `torch.Tensor` of shape `(N, D)`, for `"multimodal"` `(N, 2 D)`.

    Raises:
        ValueError: If captions are wanted, and an image has none.
    """
    import numpy as np
    import torch

    from hf_captionrl.data import cached_features
    from hf_captionrl.retrieval import FeatureCache
    from hf_captionrl.retrieval.bags import multimodal_features

    cache = FeatureCache.for_scorer(scorer, arguments.cache_dir)
    images = cached_features(
        cache, dataset, lambda batch: scorer.image_features(batch), batch_size=arguments.batch_size, progress=False
    )
    if arguments.features == "image":
        return images.tensor().float()
    captions = dataset["captions"][:]
    means = []
    for start in range(0, len(captions), 1024):  # all captions at once would be five times the image features
        groups = captions[start : start + 1024]
        for i, group in enumerate(groups, start):
            if not group:
                raise ValueError(f"image {dataset['image_id'][i]!r} has no caption. Pass --features image.")
        rows = scorer.text_features([caption for group in groups for caption in group]).float().cpu()
        splits = np.cumsum([len(group) for group in groups])[:-1].tolist()
        means.append(torch.stack([part.mean(dim=0) for part in rows.tensor_split(splits)]))
    return multimodal_features(images.tensor(), torch.cat(means))
