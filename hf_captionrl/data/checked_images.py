"""Remembers which images decode, by the bytes of their files, so that the next check does not decode them."""

from __future__ import annotations

import os

from hf_captionrl.data.images import MAX_PIXELS
from hf_captionrl.retrieval import FeatureCache

__all__ = ["checked_images"]


def checked_images(cache_dir: str | os.PathLike[str] | None, max_pixels: int = MAX_PIXELS) -> FeatureCache:
    """Rows `(1,)` uint8 by the keys of `source_keys`: 1 for an image that decodes."""
    return FeatureCache(
        cache_dir, model_id="checked_images", revision=f"1|{max_pixels}", what="is_good", dtype="uint8"
    )
