"""BLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_captionrl.captioners.auto import register
from hf_captionrl.captioners.base import Captioner

__all__ = ["BlipCaptioner"]


@register
class BlipCaptioner(Captioner):
    """BLIP for captioning (`BlipForConditionalGeneration`), whose decoder attends to the image in cross-attention."""

    family = "blip"
    model_types = ("blip",)
    vision_path = "vision_model"
    language_lora = r"text_decoder\.bert\.encoder\..*\.(query|key|value|output\.dense)"
    vision_lora = r"vision_model\.encoder\..*\.(qkv|fc1|fc2)"
    # The prompt these were finetuned with.
    checkpoint_prompts = {"Salesforce/blip-image-captioning": "a picture of "}

    @classmethod
    def output_head(cls, model: Any) -> Any:
        """The decoder's projection: the model itself names none.

        Args:
            model (`BlipForConditionalGeneration`): The model.

        Returns:
            `nn.Module` or None.
        """
        decoder = getattr(model, "text_decoder", None)
        return None if decoder is None else decoder.get_output_embeddings()

    def special_token_ids(self) -> tuple[int, int, int]:
        """`[DEC]`, `[SEP]` and `[PAD]`; `eos_token_id` in BLIP's configuration is a leftover.

        Returns:
            `tuple`: Ids of start, end and padding.
        """
        config = self.base_model.config.text_config
        return self.require_ids(config.bos_token_id, config.sep_token_id, config.pad_token_id)

    def own_loss(self, batch: dict[str, Any]) -> Tensor:
        """The model's own loss without the label smoothing that its configuration may ask for.

        Args:
            batch (`dict`): Of `collate`.

        Returns:
            `torch.Tensor`: Scalar.
        """
        decoder = self.base_model.text_decoder
        smoothing, decoder.label_smoothing = decoder.label_smoothing, 0.0
        try:
            return super().own_loss(batch)
        finally:
            decoder.label_smoothing = smoothing

    def generate_ids(self, image_features: Tensor, prompt_ids: Tensor, **kwargs: Any) -> Tensor:
        """Let the decoder write; `BlipForConditionalGeneration.generate` would drop the prompt's last token.

        Args:
            image_features (`torch.Tensor` of shape `(B, M, D)`): Output of the image tower.
            prompt_ids (`torch.Tensor` of shape `(B, P)`): Start token and prompt.
            kwargs: For `generate`.

        Returns:
            `torch.Tensor` of shape `(N, P + T)`.
        """
        return self.base_model.text_decoder.generate(
            input_ids=prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            encoder_hidden_states=image_features,
            encoder_attention_mask=torch.ones(image_features.shape[:2], dtype=torch.long, device=prompt_ids.device),
            **kwargs,
        )
