"""VisionEncoderDecoder: any image encoder with any decoder that has cross-attention."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.prompt_prefix import decoder_text
from hf_captionrl.captioners.shared_cross_attention import computed_once

__all__ = ["EncoderDecoderCaptioner"]

logger = logging.getLogger(__name__)


@register
class EncoderDecoderCaptioner(Captioner):
    """`VisionEncoderDecoderModel`, e.g. ViT + GPT-2 or ViT + BERT."""

    family = "vision-encoder-decoder"
    model_types = ("vision-encoder-decoder",)
    is_encoder_decoder = True
    image_in_cross_attention = True
    can_join_frames = True
    token_argument = "decoder_input_ids"
    vision_path = "encoder"
    connector_paths = ("enc_to_dec_proj",)
    language_lora = r"decoder\..*\.(c_attn|q_attn|(?:cross)?att(?:n|ention)\.c_proj|query|key|value|output\.dense|[qkv]_proj|out_proj)"
    vision_lora = r"encoder\..*\.(query|key|value|qkv|[qkv]_proj|fc1|fc2|intermediate\.dense|\d+\.output\.dense)"

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return decoder_text(inputs)

    def special_token_ids(self) -> tuple[int, int, int]:
        # From the configuration, else the decoder's, else the tokenizer. transformers reads them from the configuration.
        config, tokenizer = self.base_model.config, self.tokenizer
        decoder, generation = config.decoder, self.base_model.generation_config
        candidates: dict[str, tuple[Any, ...]] = {
            "decoder_start_token_id": (decoder.bos_token_id, tokenizer.cls_token_id, tokenizer.bos_token_id),
            "eos_token_id": (decoder.eos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id),
            "pad_token_id": (decoder.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id),
        }
        found = []
        for name, elsewhere in candidates.items():
            known = [getattr(config, name, None), getattr(generation, name, None)]
            value = next((value for value in (*known, *elsewhere) if value is not None), None)
            if known == [None, None] and value is not None:
                logger.warning("The configuration lacks %s. Using %s, from the decoder or tokenizer.", name, value)
            setattr(config, name, value)
            setattr(generation, name, value)
            found.append(value)
        return self.require_ids(*found)

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        model = self.base_model
        with computed_once(getattr(model, "enc_to_dec_proj", None)):
            return model.generate(
                # Never encoded: only tells generate the number of rows.
                pixel_values=image_features.new_zeros(prompt_ids.size(0), 1, 1, 1),
                encoder_outputs=BaseModelOutput(last_hidden_state=image_features),
                attention_mask=torch.ones(image_features.shape[:2], dtype=torch.long, device=prompt_ids.device),
                decoder_input_ids=prompt_ids,
                **kwargs,
            )
