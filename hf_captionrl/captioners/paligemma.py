"""PaliGemma.

Legend: N captions, T tokens of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.chat import ChatCaptioner

__all__ = ["PaliGemmaCaptioner"]


@register
class PaliGemmaCaptioner(ChatCaptioner):
    """PaliGemma, with bidirectional attention over image and prompt, and causal attention over the caption."""

    family = "paligemma"
    model_types = ("paligemma",)
    default_prompt = "caption en"
    processor_class = "PaliGemmaProcessor"
    supports_static_cache = False

    def plain_turn(self) -> str:
        return f"{self.processor.image_token}{self.prompt}"

    @classmethod
    def text_types(cls, input_ids: Tensor) -> Tensor:
        # Type 0 has bidirectional attention: here the start token, which is the last token of the prompt.
        types = torch.ones_like(input_ids)
        types[:, 0] = 0
        return types
