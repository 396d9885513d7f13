r"""What every captioner can do: encode, align labels, score, generate, adapt, save.

Legend: B images or captions, N = B * captions an image, T tokens, V vocabulary, D features, M image tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_captionrl.captioners.adapters import Adapting
from hf_captionrl.captioners.checking import check_tap
from hf_captionrl.captioners.encoding import Encoding
from hf_captionrl.captioners.grouping import fold_cross_attention
from hf_captionrl.captioners.head import LogProbsObjective, bypass_image_tower, tap_head
from hf_captionrl.captioners.saving import Saving
from hf_captionrl.captioners.sharding import is_sharded, with_gathered_weights
from hf_captionrl.captioners.tokens import completion_mask

__all__ = ["Captioner", "GenerationOutput"]


@dataclass
class GenerationOutput:
    """What a captioner wrote.

    Args:
        ids (`torch.Tensor` of shape `(N, T)`): Token ids behind the prompt, the end token included, right-padded.
        captions (`list[str]`): N captions without prompt and special tokens.
        ended (`torch.Tensor` of shape `(N,)`): True where the end token was written, false where the length ran out.
        mask (`torch.Tensor` of shape `(N, T)`): True for the tokens of the caption, the end token included.
    """

    ids: Tensor
    captions: list[str]
    ended: Tensor
    mask: Tensor


class Captioner(Encoding, Adapting, Saving):
    """A vision-to-text model with its processor, under one interface for every family.

    Batches are the same for all families: `input_ids` (start, prompt, caption, end), `attention_mask` and `labels`,
    which equal `input_ids` where supervised and are not shifted, with `pixel_values` or `image_features`. The model
    and whatever wraps it take such a batch, and a `head_objective` (see `captioners.head`).

    A family is a subclass that states the class attributes, and overrides the few methods that its models need.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model; its `forward` is extended in place.
        processor: With `image_processor` and `tokenizer`.
        prompt (`str`, *optional*): Stands before every caption, in training and generation; never supervised.

    Raises:
        ValueError: If the model has no output head, the tokenizer does not fit it, or a special token is missing.
    """

    family: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    is_encoder_decoder: ClassVar[bool] = False
    token_argument: ClassVar[str] = "input_ids"
    """What the model's own forward calls the decoder's token ids."""
    image_in_cross_attention: ClassVar[bool] = False
    """Whether the text sees the image in cross-attention only, so that captions of an image may share its keys."""
    vision_path: ClassVar[str] = ""
    """Path of the image tower, whose `last_hidden_state` is what `image_features` stands for."""
    connector_paths: ClassVar[tuple[str, ...]] = ()
    """Paths of the modules between tower and language model, where there are any."""
    model_class: ClassVar[str] = "AutoModelForImageTextToText"
    """The class of transformers that loads a checkpoint."""
    checkpoint_prompts: ClassVar[dict[str, str]] = {}
    """Beginnings of names on the Hub, and the prompt these checkpoints were trained with."""

    def __init__(self, model: nn.Module, processor: Any, *, prompt: str | None = None) -> None:
        self.model: Any = model
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor
        self.prompt = prompt or ""
        head = self.output_head(self.base_model)
        if head is None:
            raise ValueError(
                f"{type(self.base_model).__name__} has no output head, so it cannot write. "
                "Load the checkpoint as its class with a language-modelling head."
            )
        if len(self.tokenizer) > head.out_features:
            raise ValueError(
                f"The tokenizer knows {len(self.tokenizer)} tokens, the model's output head {head.out_features}: they "
                "do not belong together. Pass the model's own processor, or call model.resize_token_embeddings."
            )
        self.start_token_id, self.eos_token_id, self.pad_token_id = self.special_token_ids()
        tap_head(self.base_model, type(self))
        if self.image_in_cross_attention and not self.base_model.folds_cross_attention:
            self.base_model.folds_cross_attention = fold_cross_attention(self.base_model)

    # What a family states

    @classmethod
    def output_head(cls, model: Any) -> Any:
        """The output projection, as it stands in the model (PEFT may have wrapped it).

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.

        Returns:
            `nn.Module` or None where there is none.
        """
        return model.get_output_embeddings()

    @classmethod
    def image_tower(cls, model: Any) -> Any:
        """The image tower.

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.

        Returns:
            `nn.Module`: Returns `last_hidden_state` of shape `(B, M, D)` for `pixel_values`.
        """
        return model.get_submodule(cls.vision_path)

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch in the words of the model's own forward.

        Args:
            model (`nn.Module`): The model.
            inputs (`dict`): A batch of `collate`, or the model's own inputs.

        Returns:
            `dict`: The model's own inputs.
        """
        return dict(inputs)

    @classmethod
    def softcap(cls, model: Any) -> float | None:
        """Cap of the logits behind the projection, where the model has one.

        Args:
            model (`nn.Module`): The model.

        Returns:
            `float` or None.
        """
        return getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)

    @classmethod
    def known_prompt(cls, name: str) -> str:
        """The prompt that a published checkpoint was trained with.

        Args:
            name (`str`): Name on the Hub.

        Returns:
            `str`: Empty for all others.
        """
        return next((prompt for start, prompt in cls.checkpoint_prompts.items() if name.startswith(start)), "")

    def special_token_ids(self) -> tuple[int, int, int]:
        """Ids of the start, end and padding tokens.

        Returns:
            `tuple`: Three ids.

        Raises:
            ValueError: If neither configuration nor tokenizer knows one of them.
        """
        config = self.base_model.config
        return self.require_ids(config.bos_token_id, config.eos_token_id, config.pad_token_id)

    def generate_ids(self, image_features: Tensor, prompt_ids: Tensor, **kwargs: Any) -> Tensor:
        """Let the model continue the prompt.

        Args:
            image_features (`torch.Tensor` of shape `(B, M, D)`): Output of the image tower.
            prompt_ids (`torch.Tensor` of shape `(B, P)`): Start token and prompt.
            kwargs: For the model's `generate`.

        Returns:
            `torch.Tensor` of shape `(N, P + T)`: Prompt and continuation.
        """
        model = self.base_model
        with bypass_image_tower(self.image_tower(model), image_features) as pixel_values:
            return model.generate(
                input_ids=prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                pixel_values=pixel_values,
                **kwargs,
            )

    # What follows from it

    def require_ids(self, start: Any, end: Any, pad: Any) -> tuple[int, int, int]:
        """Check three special tokens.

        Args:
            start (`int` or `list`, *optional*): Id of the start token.
            end (`int` or `list`, *optional*): Id of the end token; of several, the first counts.
            pad (`int` or `list`, *optional*): Id of the padding token.

        Returns:
            `tuple`: The three ids.

        Raises:
            ValueError: If one is missing.
        """
        named = {"start": start, "end": end, "padding": pad}
        ids = [value[0] if isinstance(value, (list, tuple)) and value else value for value in named.values()]
        missing = [name for name, value in zip(named, ids, strict=True) if not isinstance(value, int)]
        if missing:
            raise ValueError(
                f"Neither the model's configuration nor its tokenizer names the {' and '.join(missing)} token. Set "
                "bos_token_id (decoder_start_token_id), eos_token_id and pad_token_id in model.config."
            )
        return ids[0], ids[1], ids[2]

    @property
    def base_model(self) -> Any:
        """The model inside PEFT's wrapper, whose `forward` is extended."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def use_full_logits(self) -> bool:
        """Whether logits are computed in full: slower, and right for models whose head cannot be tapped."""
        return self.base_model.use_full_logits

    @use_full_logits.setter
    def use_full_logits(self, value: bool) -> None:
        self.base_model.use_full_logits = value

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection."""
        return self.output_head(self.base_model).out_features

    @property
    def vision_tower(self) -> Any:
        """The image tower."""
        return self.image_tower(self.base_model)

    @property
    def max_text_tokens(self) -> int:
        """Longest text in tokens, start and prompt included, that the model has positions for."""
        config = self.base_model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", None) or 2**20)

    def freeze_vision(self) -> None:
        """Exclude the image tower from training; `image_features` may be computed once then."""
        self.vision_tower.requires_grad_(False)

    def vision_signature(self) -> str:
        """Identifies what the image tower computes: its weights and the preparation of images.

        Returns:
            `str`: Model name, `@` and a hash of weights and image processor; equal weights have equal signatures.
        """
        digest = hashlib.blake2b(digest_size=12)
        for name, value in self.vision_tower.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        settings = {key: str(value) for key, value in self.image_processor.to_dict().items()}
        digest.update(json.dumps(settings, sort_keys=True).encode())
        name = os.path.basename(str(getattr(self.base_model, "name_or_path", "")).rstrip("/"))
        return f"{name or self.family}@{digest.hexdigest()}"

    def image_features(self, pixel_values: Tensor) -> Tensor:
        """Output of the image tower, which batches and `generate` take in place of `pixel_values`.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, H, W)`): Of `encode_images`.

        Returns:
            `torch.Tensor` of shape `(B, M, D)`.
        """
        return with_gathered_weights(self.model, lambda: self._encode(pixel_values))

    def _encode(self, pixel_values: Any) -> Tensor:
        tower = self.vision_tower
        dtype = next((p.dtype for p in tower.parameters()), pixel_values.dtype)
        return tower(pixel_values.to(self.device, dtype)).last_hidden_state

    # Scoring and writing

    def log_probs(
        self, batch: dict[str, Any], *, temperature: float = 1.0, return_entropy: bool = False, model: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probability of every supervised token, without logits of the whole batch.

        Args:
            batch (`dict`): Of `collate` or `encode_completions`, with images or features.
            temperature (`float`): The logits are divided by it.
            return_entropy (`bool`): Also return the entropy of each distribution.
            model (`nn.Module`, *optional*): The model as wrapped by DDP or the like; by default `self.model`.

        Returns:
            `torch.Tensor` of shape `(B, T - 1)`, 0 where nothing is supervised, aligned with `align_labels(labels)`;
            with the entropies, a pair.
        """
        model = self.model if model is None else model
        batch = {name: value.to(self.device) for name, value in batch.items()}
        output = model(**batch, head_objective=LogProbsObjective(temperature, return_entropy))
        return (output["log_probs"], output["entropy"]) if return_entropy else output["log_probs"]

    def generate(
        self,
        *,
        pixel_values: Tensor | None = None,
        image_features: Tensor | None = None,
        max_new_tokens: int = 40,
        **generate_kwargs: Any,
    ) -> GenerationOutput:
        """Write captions, in eval mode. Each image is encoded once, however many captions or beams it gets.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, H, W)`, *optional*): Of `encode_images`.
            image_features (`torch.Tensor` of shape `(B, M, D)`, *optional*): In place of them.
            max_new_tokens (`int`): Longest caption, the end token included; at most what the model has positions for.
            generate_kwargs: For transformers' `generate`: `num_beams`, `do_sample`, `num_return_sequences`, ...

        Returns:
            [`GenerationOutput`]: N = B * `num_return_sequences` captions, those of an image in a row.

        Raises:
            ValueError: If both or neither of `pixel_values` and `image_features` are given.
        """
        if (pixel_values is None) == (image_features is None):
            raise ValueError("Give generate either pixel_values or image_features.")
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                settings = {"max_new_tokens": max_new_tokens, **generate_kwargs}
                ids = with_gathered_weights(self.model, lambda: self._write(pixel_values, image_features, settings))
        finally:
            for module in training:
                module.training = True
        mask, ended = completion_mask(ids, end_ids=self.end_token_ids, pad_id=self.pad_token_id)
        return GenerationOutput(ids=ids, captions=self.decode(ids, mask), ended=ended, mask=mask)

    def _write(self, pixel_values: Tensor | None, image_features: Tensor | None, settings: dict[str, Any]) -> Tensor:
        features = self._encode(pixel_values) if image_features is None else image_features
        dtype = next((p.dtype for p in self.vision_tower.parameters()), features.dtype)
        features = features.to(self.device, dtype)  # (B, M, D)
        before = self.prompt_ids()
        prompt_ids = torch.tensor([before], device=self.device).repeat(features.size(0), 1)  # (B, P)
        settings = {"eos_token_id": list(self.end_token_ids), "pad_token_id": self.pad_token_id, **settings}
        settings["max_new_tokens"] = min(settings["max_new_tokens"], self.max_text_tokens - len(before))
        if is_sharded(self.model):
            # Every process must go on for as long as one of them writes, or its weights are gathered by no one.
            settings.setdefault("synced_gpus", True)
        return self.generate_ids(features, prompt_ids, **settings)[:, len(before) :]  # (N, T)

    def own_loss(self, batch: dict[str, Any]) -> Tensor:
        """The model's own loss, as plain mean cross-entropy.

        Args:
            batch (`dict`): Of `collate`.

        Returns:
            `torch.Tensor`: Scalar.
        """
        return self.model(**batch).loss

    def self_check(self, batch: dict[str, Any], atol: float | None = None) -> float:
        """Compare the tap with the model's own loss on one batch; where they differ, use full logits from now on.

        Args:
            batch (`dict`): Of `collate`, on the model's device.
            atol (`float`, *optional*): Largest difference in nats; by default 1e-3 in fp32 and 0.05 in 16 bits.

        Returns:
            `float`: The difference between mean cross-entropy through the tap and the model's own loss.
        """
        return check_tap(self, batch, atol)
