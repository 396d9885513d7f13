"""PaliGemma.

Legend: N captions, T tokens of the text.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging import version
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
    def softcap(cls, model: Any) -> float | None:
        # Before transformers 5.23, PaliGemma's forward did not apply the soft cap of its language model.
        applied = version.parse(transformers.__version__) >= version.parse("5.23.0")
        return super().softcap(model) if applied else None

    @classmethod
    def text_types(cls, input_ids: Tensor) -> Tensor:
        # Type 0 has bidirectional attention: here the start token, which is the last token of the prompt.
        types = torch.ones_like(input_ids)
        types[:, 0] = 0
        return types
