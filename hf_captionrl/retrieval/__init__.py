"""Scorers, feature caching and ranking."""

from importlib import import_module
from typing import Any

__all__ = [
    "BagFile",
    "FeatureCache",
    "FeatureView",
    "HFScorer",
    "NeighbourFile",
    "OpenClipScorer",
    "Scorer",
    "TokenScorer",
    "approximate_neighbours",
    "bag_similarities",
    "candidate_bags",
    "curate_bags",
    "default_cache_dir",
    "image_hash",
    "load_bags",
    "load_neighbours",
    "load_scorer",
    "model_fingerprint",
    "multimodal_features",
    "nearest_neighbours",
    "neighbour_recall",
    "save_bags",
    "save_neighbours",
    "training_bags",
]

# torch, transformers and open_clip take seconds to import, so modules are imported on first use of their names.
_MODULES = {
    "bag_files": ("BagFile", "NeighbourFile", "load_bags", "load_neighbours", "save_bags", "save_neighbours"),
    "bags": ("bag_similarities", "candidate_bags", "curate_bags", "training_bags"),
    "feature_cache": ("FeatureCache", "FeatureView", "default_cache_dir", "image_hash", "model_fingerprint"),
    "neighbours": ("approximate_neighbours", "multimodal_features", "nearest_neighbours", "neighbour_recall"),
    "scorer": ("HFScorer", "OpenClipScorer", "Scorer", "TokenScorer", "load_scorer"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
