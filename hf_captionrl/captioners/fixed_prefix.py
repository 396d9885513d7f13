r"""Models with a fixed number of image tokens before the text: BLIP-2, Florence-2, Kosmos-2.

Legend: B images, N captions, P tokens of the prefix, T tokens of the text, M image tokens, D features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.prompt_prefix import join_prefix, left_padded, repeat_rows, split_prefix

__all__ = ["FixedPrefixCaptioner", "configured_ids"]


def configured_ids(names: Sequence[str], generation: Any, config: Any) -> list[Any]:
    """Ids of special tokens, as `generate` reads them: from the generation config, else the model's config."""
    values = [getattr(generation, name, None) for name in names]
    return [getattr(config, name, None) if value is None else value for name, value in zip(names, values, strict=True)]


class FixedPrefixCaptioner(Captioner):
    """A captioner with image tokens before the text; in an encoder-decoder, the encoder reads them and the prompt."""

    side_inputs: ClassVar[tuple[str, ...]] = ("prefix_ids", "prefix_mask")
    # Side inputs, with the prompt that they were computed for.
    _fixed: tuple[str, dict[str, Tensor]] | None = None

    @abstractmethod
    def prefix_token_ids(self) -> Sequence[int]:
        """Token ids before the text, or in the encoder.

        Returns:
            `Sequence[int]`: P ids.
        """

    def one_side_input(self) -> dict[str, Tensor]:
        """The side inputs, which are the same for all images.

        Returns:
            `dict`: Tensors with one row.
        """
        return left_padded([self.prefix_token_ids()], self.pad_token_id)

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        if self._fixed is None or self._fixed[0] != self.prompt:
            self._fixed = (self.prompt, self.one_side_input())
        return {name: value.repeat_interleave(number, dim=0) for name, value in self._fixed[1].items()}

    @property
    def text_prompt(self) -> str:
        return "" if self.is_encoder_decoder else self.prompt

    @property
    def max_text_tokens(self) -> int:
        taken = 0 if self.is_encoder_decoder else len(self.prefix_token_ids())
        return super().max_text_tokens - taken

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        return "prefix_ids" not in inputs or super().is_native(model, inputs)

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if "prefix_ids" not in inputs:
            return dict(inputs)
        return split_prefix(inputs) if cls.is_encoder_decoder else join_prefix(inputs)

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        model = self.base_model
        batch = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids), **side_inputs}
        inputs = self.native_inputs(model, batch)
        if self.is_encoder_decoder:
            inputs.pop("decoder_attention_mask")
            inputs["decoder_input_ids"] = prompt_ids  # including the last one, which split_prefix removes
        width = inputs[self.token_argument].size(1)
        with self.known_features(model, image_features, inputs):
            generated = model.generate(**inputs, **kwargs)[:, width:]  # (N, T)
        return torch.cat([repeat_rows(prompt_ids, len(generated)), generated], 1)
