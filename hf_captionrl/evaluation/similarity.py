"""Features that define which images look alike."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from torch import Tensor

from hf_captionrl.data import cached_features
from hf_captionrl.data.columns import id_column
from hf_captionrl.retrieval import FeatureCache, Scorer, load_scorer
from hf_captionrl.retrieval.neighbours import multimodal_features
from hf_captionrl.utils.model_files import model_path


def similarity_features(
    dataset: datasets.Dataset, scorer: Scorer, kind: str, *, cache_dir: str | None = None, batch_size: int = 64
) -> Tensor:
    """Features of the images alone (`"image"`), `(N, D)` fp32, or with their captions (`"multimodal"`, `"concatenated"`), `(N, 2 D)`.

    Reference: Gaur et al. 2024 (No Detail Left Behind), section 3: the feature of an image beside the mean feature of its
    captions.
    """
    cache = FeatureCache.for_scorer(scorer, cache_dir)
    images = cached_features(
        cache, dataset, scorer.image_features, unit_length=True, batch_size=batch_size, progress=False
    )
    if kind == "image":
        return images.tensor().float()
    captions, means = dataset["captions"][:], []
    if blank := [image_id for image_id, group in zip(id_column(dataset), captions, strict=True) if not group]:
        raise ValueError(f"image {blank[0]!r} has no caption. Use --features image.")
    # All captions at once would take five times the memory of the image features.
    for groups in (captions[start : start + 1024] for start in range(0, len(captions), 1024)):
        rows = scorer.text_features([caption for group in groups for caption in group]).float().cpu()
        means.append(torch.stack([part.mean(dim=0) for part in rows.split([len(group) for group in groups])]))
    return multimodal_features(images.tensor().float(), torch.cat(means), equal_weights=kind == "multimodal")


def similarity_scorer(arguments: Any) -> Any:
    """The scorer of `--scorer`, or the default for the data."""
    fitting = "scenes:clip-reward" if arguments.dataset == "scenes" else "openai/clip-vit-base-patch32"
    return load_scorer(
        model_path(arguments.scorer or fitting), device=arguments.device, batch_size=arguments.batch_size
    )


def features_of(arguments: Any, dataset: datasets.Dataset, scorer: Any) -> Tensor:
    """[`similarity_features`] with the options of a command."""
    settings = {"cache_dir": arguments.cache_dir, "batch_size": arguments.batch_size}
    return similarity_features(dataset, scorer, arguments.features, **settings)
