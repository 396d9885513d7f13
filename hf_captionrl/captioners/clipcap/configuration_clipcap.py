"""Configuration of ClipCap."""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig


def _sub_config(given: Any, model_type: str) -> Any:
    if given is None or isinstance(given, dict):
        return AutoConfig.for_model(**{"model_type": model_type, **(given or {})})
    return given


class ClipCapConfig(PreTrainedConfig):
    """Configuration of [`ClipCapForConditionalGeneration`].

    Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning", and its published code.

    Args:
        vision_config (`PreTrainedConfig` or `dict`, *optional*): Vision tower: CLIP, SigLIP, or any other model with a
            pooled output. By default CLIP ViT-B/32.
        text_config (`PreTrainedConfig` or `dict`, *optional*): Any causal language model. By default GPT-2.
        prefix_length (`int`): Number of prefix vectors before the caption.
        mapping_type (`str`): `"mlp"` or `"transformer"`.
        clip_length (`int`): Number of vectors that the transformer mapper creates from the image embedding.
        num_mapper_layers (`int`): Layers of the transformer mapper.
        num_mapper_heads (`int`): Attention heads per layer of the transformer mapper.
        normalize_image_embeds (`bool`): Scale image embeddings to unit length, as `--normalize_prefix` in the
            published code.
        stop_at_period (`bool`): Captions end at the first token that contains a full stop, as in the training data of
            the published models. Otherwise they end with the language model's end token.
        period_token_ids (`list[int]`, *optional*): Ids of the tokens that contain a full stop, beginning with `"."`. A
            captioner sets them from its tokenizer.
    """

    model_type = "clipcap"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        vision_config: Any = None,
        text_config: Any = None,
        prefix_length: int = 10,
        mapping_type: str = "mlp",
        clip_length: int = 10,
        num_mapper_layers: int = 8,
        num_mapper_heads: int = 8,
        normalize_image_embeds: bool = False,
        stop_at_period: bool = False,
        period_token_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if mapping_type not in ("mlp", "transformer"):
            raise ValueError(f"mapping_type is {mapping_type!r}. Use 'mlp' or 'transformer'.")
        if prefix_length < 1 or clip_length < 1:
            raise ValueError(f"prefix_length ({prefix_length}) and clip_length ({clip_length}) must be at least 1.")
        self.vision_config = _sub_config(vision_config, "clip_vision_model")
        self.text_config = _sub_config(text_config, "gpt2")
        self.prefix_length, self.mapping_type, self.clip_length = prefix_length, mapping_type, clip_length
        self.num_mapper_layers, self.num_mapper_heads = num_mapper_layers, num_mapper_heads
        self.normalize_image_embeds = normalize_image_embeds
        self.stop_at_period, self.period_token_ids = stop_at_period, period_token_ids
        super().__init__(**kwargs)

    @property
    def image_embed_dim(self) -> int:
        """Size of the image embedding: CLIP's projection, or the pooled output of other towers."""
        if self.vision_config.model_type == "clip_vision_model":
            return self.vision_config.projection_dim
        return self.vision_config.hidden_size
