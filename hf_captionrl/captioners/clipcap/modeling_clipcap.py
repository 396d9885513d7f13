"""ClipCap: maps an image embedding to a prefix that a language model continues.

Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning", and its published code. The mappers keep its
weight names.

Legend: B images or captions, N = B * captions per image, T tokens, P prefix vectors, C vectors of the image in the
transformer mapper, D image embedding, E width of the language model, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionModelWithProjection,
    GenerationMixin,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from .configuration_clipcap import ClipCapConfig

# Name of the keys and values in inputs and outputs: `cache` since transformers 5.24.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"


class ClipCapVisionTower(nn.Module):
    """Computes the image embedding, equal to CLIP's `get_image_features`."""

    def __init__(self, config: ClipCapConfig) -> None:
        super().__init__()
        self.projects = config.vision_config.model_type == "clip_vision_model"
        if self.projects:
            self.encoder = CLIPVisionModelWithProjection._from_config(config.vision_config)
        else:
            self.encoder = AutoModel.from_config(config.vision_config)

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        output = self.encoder(pixel_values=pixel_values)
        pooled = output.image_embeds if self.projects else output.pooler_output.flatten(1)  # (B, D)
        return BaseModelOutputWithPooling(last_hidden_state=pooled.unsqueeze(1), pooler_output=pooled)


class MlpMapper(nn.Module):
    """`MLP` of the published code: D -> P * E / 2 -> tanh -> P * E."""

    def __init__(self, config: ClipCapConfig, width: int) -> None:
        super().__init__()
        size = config.prefix_length * width
        self.model = nn.Sequential(nn.Linear(config.image_embed_dim, size // 2), nn.Tanh(), nn.Linear(size // 2, size))
        self.prefix_length = config.prefix_length

    def forward(self, embeds: Tensor) -> Tensor:
        return self.model(embeds).unflatten(-1, (self.prefix_length, -1))  # (B, P, E)


class MapperAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_queries = nn.Linear(width, width, bias=False)
        self.to_keys_values = nn.Linear(width, 2 * width, bias=False)
        self.project = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        keys, values = self.to_keys_values(states).chunk(2, dim=-1)
        parts = (self.to_queries(states), keys, values)
        heads = [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts]
        return self.project(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class MapperLayer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = MapperAttention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        layers = {"fc1": nn.Linear(width, 2 * width), "relu": nn.ReLU(), "fc2": nn.Linear(2 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attn(self.norm1(states))
        return states + self.mlp(self.norm2(states))


class TransformerMapper(nn.Module):
    """`TransformerMapper` of the published code: attention over C image vectors and P learned vectors."""

    def __init__(self, config: ClipCapConfig, width: int) -> None:
        super().__init__()
        self.clip_length = config.clip_length
        layers = [MapperLayer(width, config.num_mapper_heads) for _ in range(config.num_mapper_layers)]
        self.transformer = nn.ModuleDict({"layers": nn.Sequential(*layers)})
        self.linear = nn.Linear(config.image_embed_dim, config.clip_length * width)
        self.prefix_const = nn.Parameter(torch.randn(config.prefix_length, width))

    def forward(self, embeds: Tensor) -> Tensor:
        image = self.linear(embeds).unflatten(-1, (self.clip_length, -1))  # (B, C, E)
        learned = self.prefix_const.expand(image.size(0), -1, -1)  # (B, P, E)
        return self.transformer["layers"](torch.cat([image, learned], 1))[:, self.clip_length :]


class ClipCapForConditionalGeneration(PreTrainedModel, GenerationMixin):
    r"""ClipCap with a language-modelling head.

    The first column of `input_ids`, the start token, is replaced by the P prefix vectors, the last of which predicts the first word.
    Ids, labels and logits therefore have the same shape, and the language model never sees a start token, as in the published code.
    """

    config_class = ClipCapConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = _CACHE
    input_modalities = ("image", "text")

    def __init__(self, config: ClipCapConfig) -> None:
        super().__init__(config)
        self.vision_tower = ClipCapVisionTower(config)
        self.language_model = AutoModelForCausalLM.from_config(config.text_config)
        width = self.language_model.get_input_embeddings().embedding_dim
        self.mapper = (MlpMapper if config.mapping_type == "mlp" else TransformerMapper)(config, width)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, TransformerMapper):
            initialization.normal_(module.prefix_const)

    def get_input_embeddings(self) -> Any:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.language_model.set_output_embeddings(new_embeddings)

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Image embeddings before normalisation: `pooler_output` `(B, D)`."""
        return self.vision_tower(pixel_values)

    def prefix_embeds(self, pixel_values: Tensor) -> Tensor:
        """The prefix of the language model, `(B, P, E)`."""
        embeds = self.vision_tower(pixel_values).last_hidden_state[:, 0]  # (B, D)
        if self.config.normalize_image_embeds:
            embeds = F.normalize(embeds, dim=-1)
        return self.mapper(embeds)

    def _with_prefix(
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings `(B, P + T - 1, E)` of prefix and text, and their mask."""
        text = self.get_input_embeddings()(input_ids[:, 1:])  # (B, T - 1, E)
        prefix = self.prefix_embeds(pixel_values).to(text.dtype)  # (B, P, E)
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (self.config.prefix_length - 1, 0), value=1)
        return torch.cat([prefix, text], 1), attention_mask

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `(B, T, V)`, of which position t predicts token t + 1, and the loss if there are labels (not shifted).

        `input_ids` `(B, T)` are start token and caption, or with `cache` (before transformers 5.24, `past_key_values`) the
        tokens after them. `attention_mask` `(B, T)` is 0 for padding on the right. `inputs_embeds` `(B, S, E)` are used instead
        of images and ids.
        """
        cache = past_key_values if cache is None else cache
        number = kwargs.pop("num_items_in_batch", None)
        if inputs_embeds is None and (input_ids is None or (pixel_values is None and cache is None)):
            raise ValueError("Pass pixel_values and input_ids (at least a start token), or inputs_embeds.")
        length = None
        if inputs_embeds is None and pixel_values is not None:
            assert input_ids is not None
            length = input_ids.size(1)
            inputs_embeds, attention_mask = self._with_prefix(pixel_values, input_ids, attention_mask)
            kwargs.setdefault("logits_to_keep", length)  # logits of the prefix are not used
        output = self.language_model(
            input_ids=input_ids if inputs_embeds is None else None,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **{**kwargs, _CACHE: cache, "return_dict": True},
        )
        logits = output.logits if length is None else output.logits[:, -length:]  # (B, T, V)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.size(-1), num_items_in_batch=number)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{_CACHE: output.get(_CACHE)},
            hidden_states=output.get("hidden_states"),
            attentions=output.get("attentions"),
        )

    @torch.no_grad()
    def generate(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        generation_config: Any = None,
        stop_at_period: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate captions: ids `(N, T + new)` that begin with `input_ids` `(B, T)`, by default only the start token.

        Each image is encoded once for all its captions and beams.
        """
        if pixel_values is None:
            raise ValueError("generate needs images. Pass pixel_values.")
        settings = copy.deepcopy(generation_config or self.generation_config)
        if input_ids is None:
            start = settings.bos_token_id
            if start is None:
                raise ValueError("The generation config has no start token. Set bos_token_id, or pass input_ids.")
            input_ids = torch.full((pixel_values.size(0), 1), start, device=pixel_values.device)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        kwargs = settings.update(**kwargs)  # the remaining arguments are passed to the language model's forward
        ends = settings.eos_token_id
        ends = list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [int(ends)]
        if self.config.stop_at_period if stop_at_period is None else stop_at_period:
            if not self.config.period_token_ids:
                raise ValueError("stop_at_period needs config.period_token_ids. Use processor.period_token_ids().")
            settings.eos_token_id = ends = list(dict.fromkeys([*self.config.period_token_ids, *ends]))
        if settings.pad_token_id is None and ends:
            settings.pad_token_id = ends[-1]
        inputs_embeds, attention_mask = self._with_prefix(pixel_values, input_ids, attention_mask)
        output = self.language_model.generate(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, generation_config=settings, **kwargs
        )
        new = output if isinstance(output, Tensor) else output.sequences  # (N, new)
        sequences = torch.cat([input_ids.repeat_interleave(new.size(0) // input_ids.size(0), 0), new], 1)
        if isinstance(output, Tensor):  # without return_dict_in_generate
            return sequences
        output.sequences = sequences
        return output
