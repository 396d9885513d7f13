"""CLIP of OpenAI's published code, renamed for transformers' `CLIPModel`.

The renaming is documented by transformers' `convert_clip_original_pytorch_to_hf.py`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from hf_captionrl.conversion.sizes import head_count, layer_count, side

__all__ = ["clip_config", "clip_names", "is_clip"]

_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
_OUTSIDE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_INSIDE = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_NUMBERS = ("input_resolution", "context_length", "vocab_size")
"""Settings that OpenAI's archives store as tensors."""


def is_clip(names: set[str]) -> bool:
    """Whether tensors have the names of OpenAI's published code."""
    return {"visual.proj", "token_embedding.weight"} <= names or "visual.layer1.0.conv1.weight" in names


def clip_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors for transformers, with separate queries, keys and values, and transposed projections."""
    if "visual.layer1.0.conv1.weight" in state:
        raise ValueError(
            "The vision tower is a ResNet, which transformers' CLIP does not support. Use a checkpoint with a vision "
            "transformer, or the weights of open_clip ('open_clip:RN50@openai')."
        )
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        block = _BLOCK.fullmatch(name)
        if name in _NUMBERS:
            continue
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = value
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = value.T.contiguous()
        elif block is not None:
            tower = "vision_model" if block[1] else "text_model"
            found |= _in_block(f"{tower}.encoder.layers.{block[2]}", block[3], value, name)
        else:
            raise ValueError(
                f"{name} is not a tensor of OpenAI's published CLIP. Use a checkpoint as it was released."
            )
    return found


def _in_block(layer: str, inner: str, value: Tensor, name: str) -> dict[str, Tensor]:
    if inner in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = inner.rpartition("_")[2]
        parts = zip("qkv", value.chunk(3), strict=True)
        return {f"{layer}.self_attn.{letter}_proj.{kind}": part.clone() for letter, part in parts}
    module, _, kind = inner.rpartition(".")
    if module not in _INSIDE:
        raise ValueError(f"{name} is not a tensor of OpenAI's published CLIP. Use a checkpoint as it was released.")
    return {f"{layer}.{_INSIDE[module]}.{kind}": value}


def clip_config(state: dict[str, Tensor], given: Any | None = None) -> Any:
    """The configuration with the sizes of the tensors."""
    from transformers import CLIPConfig

    patch = state["vision_model.embeddings.patch_embedding.weight"]  # (D, 3, P, P)
    words = state["text_model.embeddings.token_embedding.weight"]  # (V, D)
    grid = side(state["vision_model.embeddings.position_embedding.weight"].shape[0] - 1, "CLIP's image positions")
    config = CLIPConfig() if given is None else given
    projection = state["visual_projection.weight"].shape[0]
    for tower, width, more in (
        ("vision", patch.shape[0], {"patch_size": patch.shape[-1], "image_size": patch.shape[-1] * grid}),
        (
            "text",
            words.shape[1],
            {
                "vocab_size": words.shape[0],
                "max_position_embeddings": state["text_model.embeddings.position_embedding.weight"].shape[0],
            },
        ),
    ):
        part = getattr(config, f"{tower}_config")
        layers = f"{tower}_model.encoder.layers."
        part.update(
            {
                **more,
                "hidden_size": width,
                "projection_dim": projection,
                "intermediate_size": state[f"{layers}0.mlp.fc1.weight"].shape[0],
                "num_hidden_layers": layer_count(state, layers),
                "num_attention_heads": head_count(width, given and part.num_attention_heads),
            }
        )
    config.projection_dim = projection
    config.architectures = ["CLIPModel"]
    return config
