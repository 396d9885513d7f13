"""Kosmos-2."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.fixed_prefix import FixedPrefixCaptioner
from hf_captionrl.captioners.processor_checks import blank_image

__all__ = ["Kosmos2Captioner"]


@register
class Kosmos2Captioner(FixedPrefixCaptioner):
    """Kosmos-2 (`Kosmos2ForConditionalGeneration`), which reads `<s><image>`, image tokens, `</image>`, prompt, caption.

    With `<grounding>` in the prompt, captions contain the locations of the objects.
    """

    family = "kosmos-2"
    model_types = ("kosmos-2",)
    vision_path = "vision_model"
    supports_static_cache = False
    connector_paths = ("image_to_text_projection",)
    language_lora = r"text_model\..*\.([qkv]_proj|out_proj|fc2)"
    vision_lora = r"vision_model\..*\.([qkv]_proj|fc1|fc2)"
    processor_parts = ("eoi_token",)
    checkpoint_prompts: ClassVar[dict[str, str]] = {"microsoft/kosmos-2-": "An image of"}

    def special_token_ids(self) -> tuple[int, int, int]:
        # The last token of the image is the start token of the text.
        config = self.base_model.config.text_config
        start = self.tokenizer.convert_tokens_to_ids(self.processor.eoi_token)
        return self.require_ids(start, config.eos_token_id, config.pad_token_id)

    def prefix_token_ids(self) -> list[int]:
        number = self.base_model.config.latent_query_num
        read = self.processor(text="a", images=blank_image(), num_image_tokens=number)
        ids = list(read["input_ids"])
        return ids[: ids.index(self.start_token_id)]

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        native = super().native_inputs(model, inputs)
        if "prefix_ids" in inputs:
            end = inputs["prefix_ids"].size(1)
            places = native["input_ids"].new_zeros(native["input_ids"].shape)  # (N, P + T)
            places[:, end - model.config.latent_query_num : end] = 1
            native["image_embeds_position_mask"] = places
        return native
