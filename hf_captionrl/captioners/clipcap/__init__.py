"""ClipCap: maps an image embedding to a prefix of a language model.

Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig
    from hf_captionrl.captioners.clipcap.modeling_clipcap import ClipCapForConditionalGeneration
    from hf_captionrl.captioners.clipcap.processing_clipcap import ClipCapProcessor

__getattr__, __all__ = lazy_names(__name__)
