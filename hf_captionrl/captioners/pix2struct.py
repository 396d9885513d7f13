"""Pix2Struct."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL import Image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.head_tap import floating_dtype
from hf_captionrl.captioners.prompt_prefix import decoder_text

__all__ = ["Pix2StructCaptioner"]


@register
class Pix2StructCaptioner(Captioner):
    """Pix2Struct (`Pix2StructForConditionalGeneration`), which reads patches and keeps the aspect ratio of the image.

    `pixel_values` are the flattened patches `(B, M, 2 + D)`; the first two columns are row and column, counted from 1.
    Images with fewer than M patches are padded with rows of zeros, in `image_features` too. M is set by the image
    processor (`max_patches`).
    """

    family = "pix2struct"
    model_types = ("pix2struct",)
    is_encoder_decoder = True
    token_argument = "decoder_input_ids"
    vision_path = "encoder"
    language_lora = r"decoder\..*\.(query|key|value|attention\.output|wo)"
    vision_lora = r"encoder\.encoder\..*\.(query|key|value|wi_0|wi_1|wo)"

    def check_fit(self) -> None:
        super().check_fit()
        if getattr(self.base_model.config, "is_vqa", False) or getattr(self.image_processor, "is_vqa", False):
            raise ValueError(
                "This Pix2Struct answers questions that are rendered above the image (is_vqa). Load a captioning "
                "checkpoint, such as google/pix2struct-textcaps-base."
            )

    def special_token_ids(self) -> tuple[int, int, int]:
        config = self.base_model.config.text_config
        return self.require_ids(config.decoder_start_token_id, config.eos_token_id, config.pad_token_id)

    def encode_images(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        read = self.image_processor(images=list(images), return_tensors="pt")
        return {"pixel_values": read["flattened_patches"]}

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        return "input_ids" not in inputs or len(inputs["pixel_values"]) == len(inputs["input_ids"])

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if "input_ids" not in inputs:
            return dict(inputs)
        inputs = decoder_text(inputs)
        if (patches := inputs.pop("pixel_values", None)) is not None:
            dtype = floating_dtype(model.get_submodule(cls.vision_path), patches.dtype)
            inputs |= {"flattened_patches": patches.to(dtype), "attention_mask": _is_patch(patches)}
        return inputs

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        patches, tower = inputs["pixel_values"], cls.find_vision_tower(model)
        mask = _is_patch(patches)
        patches = patches.to(next(tower.parameters()).device, floating_dtype(tower, patches.dtype))
        output = tower(flattened_patches=patches, attention_mask=mask.to(patches.device))
        return output.last_hidden_state * mask[..., None].to(patches)

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        inputs.pop("flattened_patches", None)
        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=features)
        inputs["attention_mask"] = (features != 0).any(-1).long()
        yield

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        model = self.base_model
        kwargs.setdefault("use_cache", True)  # the configuration of published checkpoints turns it off
        inputs: dict[str, Any] = {"decoder_input_ids": prompt_ids}
        with self.known_features(model, image_features, inputs):
            # Never encoded: only tells generate the number of rows.
            return model.generate(image_features.new_zeros(len(image_features), 1, 1), **inputs, **kwargs)


def _is_patch(patches: Tensor) -> Tensor:
    """`(B, M)`: 1 for a patch, 0 for padding, whose row is 0."""
    return (patches[..., 0] != 0).long()
