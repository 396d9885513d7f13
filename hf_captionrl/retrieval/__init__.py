"""Scorers, feature caching and ranking."""

from importlib import import_module
from typing import Any

__all__ = [
    "FeatureCache",
    "FeatureView",
    "HFScorer",
    "OpenClipScorer",
    "Scorer",
    "default_cache_dir",
    "image_hash",
    "load_scorer",
    "model_fingerprint",
]

# torch, transformers and open_clip take seconds to import; a name loads its module when it is first used.
_MODULES = {
    "features": ("FeatureCache", "FeatureView", "default_cache_dir", "image_hash", "model_fingerprint"),
    "scorer": ("HFScorer", "OpenClipScorer", "Scorer", "load_scorer"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
