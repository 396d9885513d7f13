"""Scorers, feature caching and ranking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.retrieval.bags import (
        TOP_NEIGHBOURS,
        BagFile,
        NeighbourFile,
        bag_similarities,
        candidate_bags,
        check_neighbours,
        curate_bags,
        load_bags,
        load_neighbours,
        save_bags,
        save_neighbours,
        training_bags,
    )
    from hf_captionrl.retrieval.feature_cache import (
        FeatureCache,
        FeatureView,
        default_cache_dir,
        image_hash,
        model_fingerprint,
    )
    from hf_captionrl.retrieval.neighbours import multimodal_features, nearest_neighbours, normalised
    from hf_captionrl.retrieval.open_clip_scorer import OpenClipScorer
    from hf_captionrl.retrieval.scorer import HFScorer, Scorer, TokenScorer, load_scorer

__getattr__, __all__ = lazy_names(__name__)
