"""Publishing: cards, manifest, push.

Cards and folders are checked before anything is uploaded, and a failed push can be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.hub.cards import ModelCardFacts, render_model_card, write_model_card
    from hf_captionrl.hub.push import (
        PushError,
        check_card,
        folder_contents,
        local_base_model,
        public_command,
        public_values,
        push_captioner,
        push_folder,
        write_manifest,
    )
    from hf_captionrl.hub.spaces import push_metric

__getattr__, __all__ = lazy_names(__name__)
