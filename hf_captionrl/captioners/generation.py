r"""Generates captions.

Legend: B images, N = B * captions per image, P tokens of start and prompt, T tokens, M image tokens, D features.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.captioners.caption_tokens import completion_mask
from hf_captionrl.captioners.compiled_decoding import check_compiler
from hf_captionrl.captioners.decoding import DecodingLoop, UndecodableError
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.head_tap import bypass_vision_tower, floating_dtype
from hf_captionrl.captioners.model_inputs import Encoding
from hf_captionrl.captioners.sharding import is_sharded, with_gathered_weights

__all__ = ["Completions", "Writing", "split_greedy"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


@dataclass
class Completions:
    """Generated captions.

    Args:
        ids (`torch.Tensor` of shape `(N, T)`): Token ids after the prompt, including the end token, right-padded.
        captions (`list[str]`): N captions without prompt and special tokens.
        ended (`torch.Tensor` of shape `(N,)`): True if the caption has an end token, false if it was truncated.
        mask (`torch.Tensor` of shape `(N, T)`): True for the tokens of the caption, including the end token.
    """

    ids: Tensor
    captions: list[str]
    ended: Tensor
    mask: Tensor

    def rows(self, index: Tensor) -> Completions:
        """Some of the captions, without the columns that only the others use.

        Args:
            index (`torch.Tensor` of shape `(K,)`): Rows to keep.

        Returns:
            [`Completions`]: K captions.
        """
        mask = self.mask[index]
        width = max(1, int(mask.any(0).sum()))
        return Completions(
            ids=self.ids[index][:, :width],
            captions=[self.captions[row] for row in index.tolist()],
            ended=self.ended[index],
            mask=mask[:, :width],
        )


def split_greedy(together: Completions, group_size: int) -> tuple[Completions, Completions]:
    """Split the result of `generate(greedy_first=True)` into the G captions and the greedy caption of each image."""
    rows = torch.arange(len(together.captions))
    is_greedy = rows % (group_size + 1) == 0
    return together.rows(rows[~is_greedy]), together.rows(rows[is_greedy])


class Writing(Encoding):
    """The part of [`Captioner`] that generates."""

    model: Any
    base_model: Any
    supports_static_cache: ClassVar[bool] = True
    """Whether transformers decodes the family with `cache_implementation="static"`."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def writer(self) -> Any:
        """The module whose `generate` decodes."""
        return self.base_model

    @classmethod
    @abstractmethod
    def find_vision_tower(cls, model: Any) -> Any:
        """The vision tower.

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.

        Returns:
            `nn.Module`: For most families, its `last_hidden_state` is `image_features`.
        """

    @property
    def vision_tower(self) -> Any:
        """The vision tower."""
        return self.find_vision_tower(self.base_model)

    @classmethod
    @abstractmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute `image_features`.

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.
            inputs (`dict`): Output of `encode_images`.

        Returns:
            `torch.Tensor` of shape `(B, M, D)`.
        """

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        """Generate a continuation of the prompt.

        Args:
            image_features (`torch.Tensor` of shape `(B, M, D)`): Output of the vision tower.
            prompt_ids (`torch.Tensor` of shape `(B, P)`): Start token and prompt.
            side_inputs (`dict`): Other inputs per image, see `Captioner.side_inputs`.
            kwargs: Arguments of the model's `generate`.

        Returns:
            `torch.Tensor` of shape `(N, P + T)`: Prompt and continuation.
        """
        model = self.base_model
        with bypass_vision_tower(self.find_vision_tower(model), image_features) as pixel_values:
            return model.generate(
                input_ids=prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                pixel_values=pixel_values,
                **kwargs,
            )

    def generate(
        self,
        *,
        pixel_values: Tensor | None = None,
        image_features: Tensor | None = None,
        max_new_tokens: int = 40,
        greedy_first: bool = False,
        compile_decoding: bool = False,
        **kwargs: Any,
    ) -> Completions:
        """Generate captions in eval mode. Each image is encoded once for all its captions and beams.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, H, W)`, *optional*): Output of `encode_images`.
            image_features (`torch.Tensor` of shape `(B, M, D)`, *optional*): Features that replace the pixels.
            max_new_tokens (`int`): Longest caption, including the end token; limited by the model's positions.
            greedy_first (`bool`): Whether the sampled captions of each image follow its greedy caption.
            compile_decoding (`bool`): Whether `torch.compile` compiles the forward of every token after the first, once for
                all numbers of images and tokens. For greedy and sampled captions.
            kwargs: The other outputs of `encode_images`, and arguments of transformers' `generate`: `num_beams`,
                `do_sample`, `num_return_sequences`, `cache_implementation`, ...

        Returns:
            [`Completions`]: N = B * `num_return_sequences` captions, or B * (1 + `num_return_sequences`) with
                `greedy_first`; those of one image are consecutive.

        Raises:
            ValueError: If both or neither of `pixel_values` and `image_features` are given, the family does not support the
                cache, or `compile_decoding` is set but there is no compiler, or other settings exclude it.
        """
        if (pixel_values is None) == (image_features is None):
            raise ValueError("generate needs images once. Pass either pixel_values or image_features.")
        cache = self._known(kwargs, "cache_implementation")
        if isinstance(cache, str) and "static" in cache and not self.supports_static_cache:
            raise ValueError(
                f"cache_implementation is {cache!r}, but {type(self.base_model).__name__} cannot decode with a static cache. "
                "Use 'dynamic'; compile_decoding=True compiles the decoding step with it."
            )
        if compile_decoding:
            check_compiler(self.device)
        with evaluating(self.model), torch.no_grad():
            images = {name: kwargs.pop(name) for name in self.side_inputs if name in kwargs}
            if pixel_values is not None:
                images["pixel_values"] = pixel_values
            elif image_features is not None:
                images["image_features"] = image_features
            images |= self.fixed_side_inputs_missing_in(images)
            settings = {"max_new_tokens": max_new_tokens, **kwargs}
            ids = with_gathered_weights(
                self.model, lambda: self._write(images, settings, greedy_first, compile_decoding)
            )
        mask, ended = completion_mask(ids, end_ids=self.end_token_ids, pad_id=self.pad_token_id)
        return Completions(ids=ids, captions=self.decode(ids, mask), ended=ended, mask=mask)

    def fixed_side_inputs_missing_in(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """`fixed_side_inputs` for inputs that do not contain them.

        Args:
            inputs (`dict`): Inputs with `pixel_values` or `image_features`.

        Returns:
            `dict`: The missing side inputs; empty if there are none.

        Raises:
            ValueError: If the side inputs depend on the image.
        """
        if not self.side_inputs or any(name in inputs for name in self.side_inputs):
            return {}
        return self.fixed_side_inputs(len(inputs["image_features" if "image_features" in inputs else "pixel_values"]))

    def _write(
        self, images: dict[str, Tensor], settings: dict[str, Any], greedy_first: bool, compiled: bool
    ) -> Tensor:
        images = {name: value.to(self.device) for name, value in images.items()}
        features = images.pop("image_features", None)
        if features is None:
            features = self.encode(self.base_model, images)
            del images["pixel_values"]
        features = features.to(floating_dtype(self.vision_tower, features.dtype))  # (B, M, D)
        before = self.prompt_ids()
        prompt_ids = torch.tensor([before], device=self.device).repeat(features.size(0), 1)  # (B, P)
        settings = {"eos_token_id": list(self.end_token_ids), "pad_token_id": self.pad_token_id, **settings}
        settings["max_new_tokens"] = min(settings["max_new_tokens"], self.max_text_tokens - len(before))

        def write(further: dict[str, Any]) -> Tensor:
            return self.generate_ids(features, prompt_ids, dict(images), **further)[:, len(before) :]  # (N, T)

        if is_sharded(self.model):
            # All processes must run until the last one has finished, because they gather the weights together.
            settings.setdefault("synced_gpus", True)
        do_sample, number, num_beams = (
            self._known(settings, name) or 0 for name in ("do_sample", "num_return_sequences", "num_beams")
        )
        number = max(1, number)
        # With beams, `generate` would prepare (and in an encoder-decoder encode) the inputs before the loop could refuse.
        decodable = num_beams <= 1 and (do_sample or (number == 1 and not greedy_first))
        if decodable and not is_sharded(self.model) and settings.get("custom_generate") is None:
            with suppress(UndecodableError):
                loop = DecodingLoop(
                    num_sampled=number if do_sample else 0,
                    greedy=greedy_first or not do_sample,
                    folded=self.base_model.folds_cross_attention,
                    compiled=compiled,
                )
                return write({**settings, "num_return_sequences": 1, "custom_generate": loop})
        if compiled:
            raise ValueError(
                "compile_decoding is True, but these settings need the decoding loop of transformers, which it does not compile. "
                "Use greedy or sampled captions (num_beams=1) with the default cache on unsharded models, or leave it out."
            )
        if not greedy_first:
            return write(settings)
        plain = {name: value for name, value in settings.items() if name not in _SAMPLING}
        greedy = write({**plain, "do_sample": False, "num_beams": 1, "num_return_sequences": 1})
        return self._interleave(greedy, write(settings))

    def _known(self, settings: dict[str, Any], name: str) -> Any:
        """A setting of `generate`: from the arguments, a given configuration, or the configuration of the model."""
        configs = (settings.get("generation_config"), self.writer.generation_config)
        sources = [settings, *(vars(config) for config in configs if config is not None)]
        return next((source[name] for source in sources if source.get(name) is not None), None)

    def _interleave(self, greedy: Tensor, sampled: Tensor) -> Tensor:
        """`(B, S)` and `(B * G, T)` -> `(B * (1 + G), max(S, T))`, the greedy caption of each image first."""
        width = max(greedy.size(1), sampled.size(1))
        parts = [F.pad(part, (0, width - part.size(1)), value=self.pad_token_id) for part in (greedy, sampled)]
        return torch.cat([part.view(len(greedy), -1, width) for part in parts], 1).flatten(0, 1)
