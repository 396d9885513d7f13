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
    """PaliGemma, which reads image and prompt in both directions and writes the caption behind them."""

    family = "paligemma"
    model_types = ("paligemma",)
    default_prompt = "caption en"
    processor_class = "PaliGemmaProcessor"

    def plain_turn(self) -> str:
        return f"{self.processor.image_token}{self.prompt}"

    @classmethod
    def text_types(cls, input_ids: Tensor) -> Tensor:
        # 0 is read in both directions: the start token, which is the last of the prompt. The rest is the answer.
        types = torch.ones_like(input_ids)
        types[:, 0] = 0
        return types
