r"""The common interface of all captioners: encode, score, generate, adapt, save.

Legend: B images or captions, N = B * captions per image, T tokens, V vocabulary, D features, M image tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_captionrl.captioners.adapters import Adapting
from hf_captionrl.captioners.generation import Writing
from hf_captionrl.captioners.head_tap import LogProbsObjective, bypass_vision_tower, tap_head
from hf_captionrl.captioners.head_tap_check import check_tap
from hf_captionrl.captioners.prepared_pixels import processor_settings
from hf_captionrl.captioners.processor_checks import check_image_size, check_special_tokens
from hf_captionrl.captioners.saving import Saving
from hf_captionrl.captioners.sharding import with_gathered_weights
from hf_captionrl.captioners.shared_cross_attention import fold_cross_attention

__all__ = ["Captioner"]


class Captioner(Writing, Adapting, Saving):
    """A vision-to-text model with its processor, with the same interface for every family.

    All families use the same batches: `input_ids` (start, prompt, caption, end), `attention_mask` and `labels`, with
    `pixel_values` or `image_features`. Labels equal `input_ids` where supervised, and are not shifted. The model and
    its wrappers take such a batch and a `head_objective` (see `captioners.head_tap`).

    A family is a subclass that sets the class attributes and overrides the methods that its models need.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model; its `forward` is extended in place.
        processor: A processor with `image_processor` and `tokenizer`.
        prompt (`str`, *optional*): Text before every caption, in training and generation; never supervised.

    Raises:
        ValueError: If the model has no output head, the tokenizer does not match it, or a special token is missing.
    """

    family: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    is_encoder_decoder: ClassVar[bool] = False
    token_argument: ClassVar[str] = "input_ids"
    """Name of the decoder's token ids in the model's forward."""
    image_in_cross_attention: ClassVar[bool] = False
    """Whether the text sees the image only through cross-attention, so that captions of an image can share its keys."""
    vision_path: ClassVar[str] = ""
    """Path of the vision tower, whose `last_hidden_state` is `image_features`."""
    connector_paths: ClassVar[tuple[str, ...]] = ()
    """Paths of the modules between vision tower and language model, if there are any."""
    model_class: ClassVar[str] = "AutoModelForImageTextToText"
    """Name of the class in transformers that loads a checkpoint."""
    checkpoint_prompts: ClassVar[dict[str, str]] = {}
    """From prefixes of names on the Hub to the prompts that these checkpoints were trained with."""
    default_prompt: ClassVar[str] = ""
    """Prompt of all other checkpoints, unless one is given."""
    processor_parts: ClassVar[tuple[str, ...]] = ()
    """Attributes that the processor needs besides `image_processor` and `tokenizer`."""

    def __init__(self, model: nn.Module, processor: Any, *, prompt: str | None = None) -> None:
        self.model: Any = model
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor
        self.prompt = self.default_prompt if prompt is None else prompt
        self.check_fit()
        self.start_token_id, self.eos_token_id, self.pad_token_id = self.special_token_ids()
        self.check_tokens()
        self.check_image_size()
        tap_head(self.base_model, type(self))
        if self.image_in_cross_attention and not self.base_model.folds_cross_attention:
            self.base_model.folds_cross_attention = fold_cross_attention(self.base_model)

    def check_fit(self) -> None:
        """Check that model, tokenizer and processor match.

        Raises:
            ValueError: If the model has no output head, or tokenizer or processor do not match it.
        """
        lacking = [name for name in self.processor_parts if getattr(self.processor, name, None) is None]
        if lacking:
            raise ValueError(
                f"The {type(self.processor).__name__} has no {' and no '.join(lacking)}, which {type(self.base_model).__name__} "
                "needs. Pass the processor of the model, for instance from AutoProcessor.from_pretrained."
            )
        head = self.output_head(self.base_model)
        if head is None:
            raise ValueError(
                f"{type(self.base_model).__name__} has no output head, so it cannot generate. "
                "Load the checkpoint with its class that has a language-modelling head."
            )
        if len(self.tokenizer) > head.out_features:
            raise ValueError(
                f"The tokenizer has {len(self.tokenizer)} tokens, but the model's output head has {head.out_features}. "
                "Pass the processor of the model, or call model.resize_token_embeddings."
            )

    def check_image_size(self) -> None:
        """Check that the image processor and the vision tower use the same image size.

        Raises:
            ValueError: If the sizes differ.
        """
        check_image_size(
            self.find_vision_tower(self.base_model),
            lambda image: self.image_processor(images=[image], return_tensors="pt").get("pixel_values"),
            self.base_model,
        )

    def check_tokens(self) -> None:
        """Check that the tokenizer has the end token; warn if the start or end token is an ordinary word.

        Raises:
            ValueError: If the tokenizer does not have the end token.
        """
        check_special_tokens(self.tokenizer, self.base_model, self.start_token_id, self.eos_token_id)

    # Overridden by families

    @classmethod
    def for_config(cls, config: Any) -> type[Captioner]:
        """The class for a checkpoint, for model types that need several classes.

        Args:
            config (`PreTrainedConfig`): Configuration of the checkpoint.

        Returns:
            `type`: By default this class.
        """
        return cls

    @classmethod
    def output_head(cls, model: Any) -> Any:
        """The output projection, possibly wrapped by PEFT.

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.

        Returns:
            `nn.Module`, or None if the model does not have one.
        """
        return model.get_output_embeddings()

    @classmethod
    def find_vision_tower(cls, model: Any) -> Any:
        """The vision tower.

        Returns:
            `nn.Module`: Returns `last_hidden_state` of shape `(B, M, D)` for `pixel_values`.
        """
        return model.get_submodule(cls.vision_path)

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Convert a batch to keyword arguments of the model's original forward.

        Args:
            model (`nn.Module`): The model.
            inputs (`dict`): A batch from `collate`, or inputs of the original forward.

        Returns:
            `dict`: Inputs of the original forward.
        """
        return dict(inputs)

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        """Whether a batch with images already has the form of the model's original forward.

        Args:
            model (`nn.Module`): The model.
            inputs (`dict`): A batch from `collate`, or inputs of the original forward, with `pixel_values`.

        Returns:
            `bool`: By default, whether there is one image per caption.
        """
        pixels = inputs["pixel_values"]
        ids: Any = inputs.get("input_ids", inputs.get(cls.token_argument))
        return pixels.dim() != 4 or pixels.size(0) == ids.size(0)

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute `image_features`.

        Returns:
            `torch.Tensor` of shape `(B, M, D)`: By default the last hidden state of the vision tower.
        """
        tower = cls.find_vision_tower(model)
        pixels = inputs["pixel_values"]
        device, dtype = next(((p.device, p.dtype) for p in tower.parameters()), (pixels.device, pixels.dtype))
        return tower(pixels.to(device, dtype)).last_hidden_state

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        """Context in which the model uses precomputed features instead of images.

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.
            features (`torch.Tensor` of shape `(B, M, D)`): Output of `encode`, one row per caption; one row per image
                if cross-attention is folded.
            inputs (`dict`): Inputs of the original forward; modified in place.

        Yields:
            Nothing.
        """
        with bypass_vision_tower(cls.find_vision_tower(model), features) as placeholder:
            inputs["pixel_values"] = placeholder
            yield

    @classmethod
    def softcap(cls, model: Any) -> float | None:
        """Soft cap of the logits, if the model has one.

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
            `str`: The prompt; `default_prompt` for unknown names.
        """
        known = (prompt for start, prompt in cls.checkpoint_prompts.items() if name.startswith(start))
        return next(known, cls.default_prompt)

    def special_token_ids(self) -> tuple[int, int, int]:
        """Ids of the start, end and padding tokens.

        Returns:
            `tuple`: The three ids.

        Raises:
            ValueError: If one of them is in neither the configuration nor the tokenizer.
        """
        config = self.base_model.config
        return self.require_ids(config.bos_token_id, config.eos_token_id, config.pad_token_id)

    # The same for all families

    def require_ids(self, start: Any, end: Any, pad: Any) -> tuple[int, int, int]:
        """Check three special tokens.

        Args:
            start (`int` or `list`, *optional*): Id of the start token.
            end (`int` or `list`, *optional*): Id of the end token; the first one of a list is used.
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
                f"Neither the model's configuration nor its tokenizer defines the {' and '.join(missing)} token. Set "
                "bos_token_id (decoder_start_token_id), eos_token_id and pad_token_id in model.config."
            )
        return ids[0], ids[1], ids[2]

    @property
    def base_model(self) -> Any:
        """The model inside PEFT's wrapper, whose `forward` is extended."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def use_full_logits(self) -> bool:
        """Whether full logits are computed: slower, but correct for models whose head cannot be tapped."""
        return self.base_model.use_full_logits

    @use_full_logits.setter
    def use_full_logits(self, value: bool) -> None:
        self.base_model.use_full_logits = value

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection."""
        return self.output_head(self.base_model).out_features

    @property
    def max_text_tokens(self) -> int:
        """Longest text that the model has positions for, in tokens, including start token and prompt."""
        config = self.base_model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", None) or 2**20)

    def freeze_vision(self) -> None:
        """Exclude the vision tower from training, so that `image_features` can be computed once."""
        self.vision_tower.requires_grad_(False)

    def vision_state(self) -> dict[str, Tensor]:
        """All weights that `image_features` depend on.

        Returns:
            `dict`: From names to weights.
        """
        return self.vision_tower.state_dict()

    def vision_signature(self) -> str:
        """Identifies the function that the vision tower computes.

        Returns:
            `str`: The model's name, `@`, and a hash of the weights and of the image processor's settings.
        """
        digest = hashlib.blake2b(digest_size=12)
        for name, value in self.vision_state().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        digest.update(processor_settings(self.image_processor).encode())
        name = os.path.basename(str(getattr(self.base_model, "name_or_path", "")).rstrip("/"))
        return f"{name or self.family}@{digest.hexdigest()}"

    def image_features(self, pixel_values: Tensor, **side_inputs: Tensor) -> Tensor:
        """Output of the vision tower. Batches and `generate` accept it instead of `pixel_values`.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, H, W)`): Output of `encode_images`.
            side_inputs (`torch.Tensor`): The other outputs of `encode_images`.

        Returns:
            `torch.Tensor` of shape `(B, M, D)`.
        """
        inputs = {name: value.to(self.device) for name, value in side_inputs.items()}
        inputs["pixel_values"] = pixel_values.to(self.device)
        return with_gathered_weights(self.model, lambda: self.encode(self.base_model, inputs))

    # Scoring

    def log_probs(
        self, batch: dict[str, Any], *, temperature: float = 1.0, return_entropy: bool = False, model: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probability of every supervised token, without building the logits of the whole batch.

        Args:
            batch (`dict`): Output of `collate` or `encode_completions`, with images or features.
            temperature (`float`): Divides the logits.
            return_entropy (`bool`): Also return the entropy of each distribution.
            model (`nn.Module`, *optional*): The model, wrapped for instance by DDP; by default `self.model`.

        Returns:
            `torch.Tensor` of shape `(B, T - 1)`: Aligned with `align_labels(labels)`, 0 at unsupervised positions;
            with `return_entropy` a pair (log-probabilities, entropies).
        """
        model = self.model if model is None else model
        batch = {**self.fixed_side_inputs_missing_in(batch), **batch}
        batch = {name: value.to(self.device) for name, value in batch.items()}
        output = model(**batch, head_objective=LogProbsObjective(temperature, return_entropy))
        return (output["log_probs"], output["entropy"]) if return_entropy else output["log_probs"]

    def own_loss(self, batch: dict[str, Any]) -> Tensor:
        """The loss that the model itself computes, as plain mean cross-entropy.

        Args:
            batch (`dict`): Output of `collate`.

        Returns:
            `torch.Tensor`: Scalar.
        """
        return self.model(**batch).loss

    def self_check(self, batch: dict[str, Any], atol: float | None = None) -> float:
        """Compare the head tap with the model's own loss on one batch, and switch to full logits if they differ.

        Args:
            batch (`dict`): Output of `collate`, on the model's device.
            atol (`float`, *optional*): Largest difference in nats; by default 1e-3 in fp32 and 0.05 in 16 bits.

        Returns:
            `float`: Difference between the mean cross-entropy through the tap and the model's own loss.
        """
        return check_tap(self, batch, atol)
