"""ClipCap: maps an image embedding to a prefix of a language model.

Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["ClipCapConfig", "ClipCapForConditionalGeneration", "ClipCapProcessor"]

# Resolved on first use, because the configuration does not need torch.
_HOME = {
    "ClipCapConfig": "configuration_clipcap",
    "ClipCapForConditionalGeneration": "modeling_clipcap",
    "ClipCapProcessor": "processing_clipcap",
}

if TYPE_CHECKING:
    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig
    from hf_captionrl.captioners.clipcap.modeling_clipcap import ClipCapForConditionalGeneration
    from hf_captionrl.captioners.clipcap.processing_clipcap import ClipCapProcessor


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Its public names are {__all__}.")
