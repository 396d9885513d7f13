"""Florence-2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.fixed_prefix import FixedPrefixCaptioner, configured_ids
from hf_captionrl.captioners.processor_checks import blank_image

__all__ = ["Florence2Captioner"]


@register
class Florence2Captioner(FixedPrefixCaptioner):
    """Florence-2 (`Florence2ForConditionalGeneration`), whose BART encoder reads image and task.

    `prompt` is a task such as `<CAPTION>` or `<DETAILED_CAPTION>`, which the processor expands, or a sentence.
    `image_features` is the flattened feature map of the vision tower, row by row.
    """

    family = "florence2"
    model_types = ("florence2",)
    is_encoder_decoder = True
    token_argument = "decoder_input_ids"
    vision_path = "model.vision_tower"
    connector_paths = ("model.multi_modal_projector",)
    language_lora = r"model\.language_model\..*\.([qkv]_proj|out_proj|fc2)"
    vision_lora = r"model\.vision_tower\..*\.(qkv|fc1|fc2)"
    processor_parts = ("num_image_tokens", "task_prompts_without_inputs")
    checkpoint_prompts: ClassVar[dict[str, str]] = {
        "florence-community/Florence-2-": "<CAPTION>",
        "microsoft/Florence-2-": "<CAPTION>",
    }

    def special_token_ids(self) -> tuple[int, int, int]:
        config, generation = self.base_model.config.text_config, self.base_model.generation_config
        names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
        # Every target of BART has <s> after the start token.
        forced, begins = generation.forced_bos_token_id, self.tokenizer("").input_ids[:1]
        self.forced_token_ids = (self.tokenizer.bos_token_id,) if begins == [self.tokenizer.bos_token_id] else ()
        if forced is not None:
            self.forced_token_ids = (forced,)
        return self.require_ids(*configured_ids(names, generation, config))

    def prefix_token_ids(self) -> list[int]:
        # The ids do not depend on the image.
        read = self.processor(images=blank_image(), text=self.prompt)
        return list(read["input_ids"][0])

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        return super().encode(model, inputs).flatten(2).transpose(1, 2)  # (B, D, h, w) -> (B, M, D)

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        side = math.isqrt(features.size(1))
        if side * side != features.size(1):
            raise ValueError(
                f"image_features with {features.size(1)} rows are not a square feature map. Compute them with "
                "captioner.image_features, and use an image processor with square outputs."
            )
        with super().known_features(model, features.transpose(1, 2).unflatten(2, (side, side)), inputs):
            yield
