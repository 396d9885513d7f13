"""BLIP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.processor_checks import check_special_tokens

__all__ = ["BlipCaptioner"]


@register
class BlipCaptioner(Captioner):
    """BLIP for captioning (`BlipForConditionalGeneration`), whose decoder attends to the image in cross-attention."""

    family = "blip"
    model_types = ("blip",)
    image_in_cross_attention = True
    can_join_frames = True
    vision_path = "vision_model"
    supports_static_cache = False
    language_lora = r"text_decoder\.bert\.encoder\..*\.(query|key|value|output\.dense)"
    vision_lora = r"vision_model\.encoder\..*\.(qkv|fc1|fc2)"
    checkpoint_prompts: ClassVar[dict[str, str]] = {"Salesforce/blip-image-captioning": "a picture of "}

    @classmethod
    def output_head(cls, model: Any) -> Any:
        # BlipForConditionalGeneration does not implement get_output_embeddings.
        decoder = getattr(model, "text_decoder", None)
        return None if decoder is None else decoder.get_output_embeddings()

    def special_token_ids(self) -> tuple[int, int, int]:
        # BLIP does not use its eos_token_id: captions begin with [DEC] and end with [SEP].
        config = self.base_model.config.text_config
        return self.require_ids(config.bos_token_id, config.sep_token_id, config.pad_token_id)

    def check_tokens(self) -> None:
        # BLIP adds [DEC] after BERT's vocabulary, so that it is never an ordinary word.
        check_special_tokens(self.tokenizer, self.base_model, self.start_token_id, self.eos_token_id, refuse=True)

    def own_loss(self, batch: dict[str, Any]) -> Tensor:
        # The configuration may set label smoothing.
        decoder = self.base_model.text_decoder
        smoothing, decoder.label_smoothing = decoder.label_smoothing, 0.0
        try:
            return super().own_loss(batch)
        finally:
            decoder.label_smoothing = smoothing

    @property
    def writer(self) -> Any:
        # Not the model: its generate drops the last token of the prompt, assuming [SEP], and adds a mask for the image.
        return self.base_model.text_decoder

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        return self.writer.generate(
            input_ids=prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            encoder_hidden_states=image_features,
            **kwargs,
        )
