"""Captioners of BLIP's published code, renamed for `BlipForConditionalGeneration`.

The renaming is documented by transformers' `convert_blip_original_pytorch_to_hf.py`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.conversion.sizes import head_count, layer_count, side

__all__ = ["blip_config", "blip_names", "is_blip", "resize_image_positions"]

_POSITIONS = "vision_model.embeddings.position_embedding"
_PATCHES = "vision_model.embeddings.patch_embedding.weight"
_LAYER = re.compile(r"visual_encoder\.blocks\.(\d+)\.(.+)")
_OUTSIDE = {
    "visual_encoder.cls_token": "vision_model.embeddings.class_embedding",
    "visual_encoder.pos_embed": _POSITIONS,
    "visual_encoder.patch_embed.proj.weight": _PATCHES,
    "visual_encoder.patch_embed.proj.bias": "vision_model.embeddings.patch_embedding.bias",
    "visual_encoder.norm.weight": "vision_model.post_layernorm.weight",
    "visual_encoder.norm.bias": "vision_model.post_layernorm.bias",
}
_INSIDE = {
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_DROPPED: tuple[str, ...] = (
    "text_encoder",
    "vision_proj",
    "text_proj",
    "itm_head",
    "visual_encoder_m",
    "text_encoder_m",
    "image_queue",
)
_DROPPED += ("vision_proj_m", "text_proj_m", "text_queue", "queue_ptr", "temp", "ptr_queue", "idx_queue")
"""Parts of the pretraining checkpoint that captioning does not use."""


def is_blip(names: set[str]) -> bool:
    """Whether tensors have the names of BLIP's published code."""
    return "visual_encoder.cls_token" in names


def blip_names(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Rename the tensors of a captioner for transformers; also returns the omitted parts."""
    parts = {name.partition(".")[0] for name in state}
    if "text_decoder" not in parts or ("text_encoder" in parts and "itm_head" not in parts):
        raise ValueError(
            f"The checkpoint has the parts {sorted(parts)}, so it is not a captioner of BLIP. Use one of its captioning or "
            "pretraining checkpoints."
        )
    found: dict[str, Tensor] = {}
    dropped: set[str] = set()
    for name, value in state.items():
        part = name.partition(".")[0]
        if part in _DROPPED:
            dropped.add(part)
        elif name.endswith(".position_ids"):
            continue  # a buffer that transformers creates
        elif part == "text_decoder":
            found[name] = value
        elif name in _OUTSIDE:
            found[_OUTSIDE[name]] = value
        else:
            layer = _LAYER.fullmatch(name)
            inner, _, kind = (layer[2] if layer else "").rpartition(".")
            if layer is None or inner not in _INSIDE:
                raise ValueError(
                    f"{name} is not a tensor of BLIP's published captioner. Use a checkpoint as it was released."
                )
            found[f"vision_model.encoder.layers.{layer[1]}.{_INSIDE[inner]}.{kind}"] = value
    return found, sorted(dropped)


def resize_image_positions(state: dict[str, Tensor], image_size: int) -> None:
    """Interpolate the image positions for images of another size, as `interpolate_pos_embed` of BLIP's code does."""
    positions, patch_size = state[_POSITIONS], state[_PATCHES].shape[-1]  # (1, 1 + M, D)
    if image_size % patch_size:
        raise ValueError(f"image_size is {image_size}, but the patches are {patch_size} wide. Use a multiple of it.")
    old, new = side(positions.shape[1] - 1, "BLIP's image positions"), image_size // patch_size
    if old == new:
        return
    grid = positions[:, 1:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)  # (1, D, old, old)
    grid = torch.nn.functional.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    patches = grid.flatten(2).transpose(1, 2).to(positions.dtype)
    state[_POSITIONS] = torch.cat([positions[:, :1], patches], dim=1)


def blip_config(state: dict[str, Tensor], given: Any | None = None) -> Any:
    """The configuration with the sizes of the tensors."""
    from transformers import BlipConfig

    patch = state[_PATCHES]  # (D, 3, P, P)
    words = state["text_decoder.bert.embeddings.word_embeddings.weight"]  # (V, D)
    layer = "text_decoder.bert.encoder.layer."
    width, patch_size = patch.shape[0], patch.shape[-1]
    grid = side(state[_POSITIONS].shape[1] - 1, "BLIP's image positions")
    config = BlipConfig() if given is None else given
    config.vision_config.update(
        {
            "hidden_size": width,
            "patch_size": patch_size,
            "image_size": patch_size * grid,
            "intermediate_size": state["vision_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": layer_count(state, "vision_model.encoder.layers."),
            "num_attention_heads": head_count(width, given and given.vision_config.num_attention_heads),
        }
    )
    config.text_config.update(
        {
            "vocab_size": words.shape[0],
            "hidden_size": words.shape[1],
            "max_position_embeddings": state["text_decoder.bert.embeddings.position_embeddings.weight"].shape[0],
            "intermediate_size": state[f"{layer}0.intermediate.dense.weight"].shape[0],
            "num_hidden_layers": layer_count(state, layer),
            "num_attention_heads": head_count(words.shape[1], given and given.text_config.num_attention_heads),
            "encoder_hidden_size": width,
            "is_decoder": True,
        }
    )
    config.architectures = ["BlipForConditionalGeneration"]
    return config
