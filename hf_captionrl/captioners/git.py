"""GIT.

Legend: B images or videos, F frames, M image tokens per frame, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.head_tap import replaced_forward
from hf_captionrl.captioners.processor_checks import check_special_tokens

__all__ = ["GitCaptioner"]


@register
class GitCaptioner(Captioner):
    """GIT (`GitForCausalLM`), which reads image tokens and text as one sequence.

    A GIT for videos (`num_image_with_embedding` in its configuration) adds a learned temporal embedding to each frame.
    It takes exactly that many frames, concatenated in `image_features`.
    """

    family = "git"
    model_types = ("git",)
    vision_path = "git.image_encoder"
    supports_static_cache = False
    connector_paths = ("git.visual_projection",)
    language_lora = r"git\.encoder\..*\.(query|key|value|output\.dense)"
    vision_lora = r"git\.image_encoder\..*\.([qkv]_proj|fc1|fc2)"

    def check_tokens(self) -> None:
        check_special_tokens(self.tokenizer, self.base_model, self.start_token_id, self.eos_token_id, refuse=True)

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        places = self.base_model.config.num_image_with_embedding
        if pooling == "concat" and places != num_frames:
            expected = f"videos of {places} frames" if places else "images"
            raise ValueError(
                f"frame_pooling is 'concat' with {num_frames} frames, but this GitForCausalLM expects {expected} "
                "(num_image_with_embedding). Set num_frames to that number, or use frame_pooling='mean'."
            )
        if pooling != "concat":
            super().check_frame_pooling(pooling, num_frames)

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        places = model.config.num_image_with_embedding or 1
        tokens = model.git.encoder.layer[0].attention.self.image_patch_tokens // places  # M
        frames = features.size(1) // tokens
        if frames == 1:
            with super().known_features(model, features, inputs):
                yield
            return

        def known(pixels: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
            number = int(pixels.flatten()[0])
            one = features[:, number * tokens : (number + 1) * tokens]  # (B, M, D)
            # Always a copy, because the model adds to it in place.
            one = one.repeat_interleave(pixels.size(0) // features.size(0), dim=0)
            return BaseModelOutputWithPooling(last_hidden_state=one)

        # In place of the pixels, each frame carries its index.
        numbers = torch.arange(frames, device=features.device, dtype=features.dtype)
        with replaced_forward(cls.find_vision_tower(model), known):
            inputs["pixel_values"] = numbers.view(1, -1, 1, 1, 1).repeat(features.size(0), 1, 1, 1, 1)
            yield

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        inputs = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids)}
        with self.known_features(self.base_model, image_features, inputs):
            return self.base_model.generate(**inputs, **kwargs)
