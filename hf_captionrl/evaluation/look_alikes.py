"""Who tells commands which images look alike."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    from torch import Tensor

__all__ = ["features_of", "similarity_scorer"]


def similarity_scorer(arguments: argparse.Namespace) -> Any:
    """The scorer of `--scorer`, or the one that fits the data."""
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.scenes.models import model_path

    fitting = "scenes:clip-reward" if arguments.dataset == "scenes" else "openai/clip-vit-base-patch32"
    return load_scorer(
        model_path(arguments.scorer or fitting), device=arguments.device, batch_size=arguments.batch_size
    )


def features_of(arguments: argparse.Namespace, dataset: datasets.Dataset, scorer: Any, kind: str) -> Tensor:
    """Features by which images look alike.

    Returns:
        `torch.Tensor` of shape `(N, D)`, for `"multimodal"` `(N, 2 D)`.
    """
    from hf_captionrl.evaluation.similarity import similarity_features

    return similarity_features(dataset, scorer, kind, cache_dir=arguments.cache_dir, batch_size=arguments.batch_size)
