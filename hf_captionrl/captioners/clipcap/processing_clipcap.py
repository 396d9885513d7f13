"""Processor of ClipCap: an image processor and a tokenizer."""

from __future__ import annotations

from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin


class ClipCapProcessor(ProcessorMixin):
    """Prepares images and captions for [`ClipCapForConditionalGeneration`]."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)

    def __call__(
        self, images: Any = None, text: Any = None, *, return_tensors: str | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Prepare images as `pixel_values`, and texts as `input_ids` that begin with the start token."""
        if images is None and text is None:
            raise ValueError("Pass images, text, or both.")
        data: dict[str, Any] = {}
        if text is not None:
            start = self.tokenizer.bos_token
            if start is None:
                raise ValueError("The tokenizer has no start token. Set tokenizer.bos_token.")
            texts = start + text if isinstance(text, str) else [start + one for one in text]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_tensors=return_tensors, **kwargs)
            data |= {name: encoded[name] for name in ("input_ids", "attention_mask")}
        if images is not None:
            data["pixel_values"] = self.image_processor(images=images, return_tensors=return_tensors)["pixel_values"]
        return BatchFeature(data)

    def period_token_ids(self) -> list[int]:
        """Ids of the tokens that contain a full stop, beginning with `"."`."""
        special = set(self.tokenizer.all_special_ids)
        ids = sorted(i for token, i in self.tokenizer.get_vocab().items() if "." in token and i not in special)
        first = self.tokenizer(".", add_special_tokens=False).input_ids
        if len(first) != 1 or first[0] not in ids:
            raise ValueError("The tokenizer has no token for a full stop. Set stop_at_period to False.")
        return [first[0], *(i for i in ids if i != first[0])]
