"""Checkpoints of the published code of BLIP, CLIP and ClipCap, identified by the names of their tensors.

Transformers' `convert_blip_original_pytorch_to_hf.py` and `convert_clip_original_pytorch_to_hf.py` document the renaming. Names
that no rule knows stay as they are, and the comparison with the model class refuses them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.utils.model_files import model_path, read_config

_POSITIONS = "vision_model.embeddings.position_embedding"
_PATCHES = "vision_model.embeddings.patch_embedding.weight"
_BLIP_RULES = {
    "visual_encoder.cls_token": "vision_model.embeddings.class_embedding",
    "visual_encoder.pos_embed": _POSITIONS,
    "visual_encoder.patch_embed.proj": "vision_model.embeddings.patch_embedding",
    "visual_encoder.norm": "vision_model.post_layernorm",
    "visual_encoder.blocks": "vision_model.encoder.layers",
    ".attn.qkv": ".self_attn.qkv",
    ".attn.proj": ".self_attn.projection",
    ".norm": ".layer_norm",
}
# Parts of the pretraining checkpoint that captioning does not use.
_DROPPED = frozenset(
    "text_encoder vision_proj text_proj itm_head visual_encoder_m text_encoder_m image_queue vision_proj_m text_proj_m "
    "text_queue queue_ptr temp ptr_queue idx_queue".split()
)
_CLIP_RULES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "transformer.resblocks": "text_model.encoder.layers",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    ".ln_": ".layer_norm",
    ".attn.": ".self_attn.",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_NUMBERS = ("input_resolution", "context_length", "vocab_size")  # settings that OpenAI's archives store as tensors


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for theirs, ours in rules.items():
        name = name.replace(theirs, ours)
    return name


def _misfits(state: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first differences in names and shapes between two sets of tensors; empty if they fit."""
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - state.keys())]
    wrong += [f"{name} is unknown" for name in sorted(state.keys() - expected.keys())]
    wrong += [
        f"{name} is {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name].shape
    ]
    return "; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else "")


# --- BLIP and CLIP ---------------------------------------------------------------------------------------------------


def blip_names(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Rename the tensors of a captioner of BLIP for transformers; also returns the omitted parts."""
    parts = {name.partition(".")[0] for name in state}
    if "text_decoder" not in parts or ("text_encoder" in parts and "itm_head" not in parts):
        raise ValueError(f"The checkpoint has the parts {sorted(parts)}. Use a captioner of BLIP.")
    renamed = {}
    for name, value in state.items():
        part = name.partition(".")[0]
        if part not in _DROPPED and not name.endswith(".position_ids"):  # a buffer that transformers creates
            renamed[name if part == "text_decoder" else _renamed(name, _BLIP_RULES)] = value
    return renamed, sorted(parts & _DROPPED)


def resize_image_positions(state: dict[str, Tensor], image_size: int) -> None:
    """Interpolate the image positions for images of another size, as `interpolate_pos_embed` of BLIP's code does."""
    positions, patch_size = state[_POSITIONS], state[_PATCHES].shape[-1]  # (1, 1 + M, D)
    if image_size % patch_size:
        raise ValueError(f"image_size is {image_size}, but the patches are {patch_size} wide. Use a multiple of it.")
    old, new = math.isqrt(positions.shape[1] - 1), image_size // patch_size
    if old == new:
        return
    grid = positions[:, 1:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)  # (1, D, old, old)
    grid = torch.nn.functional.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    patches = grid.flatten(2).transpose(1, 2).to(positions.dtype)
    state[_POSITIONS] = torch.cat([positions[:, :1], patches], dim=1)


def clip_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of CLIP for transformers, with separate queries, keys and values, and transposed projections."""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in _TRANSPOSED:
            renamed[_TRANSPOSED[name]] = value.T.contiguous()
        elif ".attn.in_proj_" in name:
            layer, kind = _renamed(name, _CLIP_RULES).split(".in_proj_")
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{layer}.{letter}_proj.{kind}"] = part.clone()
        elif name not in _NUMBERS:
            renamed[_renamed(name, _CLIP_RULES)] = value
    return renamed


# --- ClipCap: the mapper (`clip_project.*`) and usually GPT-2 (`gpt.*`) ----------------------------------------------
# The vision tower, the tokenizer and the shape of the language model come from other checkpoints; by default from those that the
# published ones were trained with.

_PARTS = {"clip_project": "mapper", "gpt": "language_model"}
_CLIPCAP: dict[str, Any] = {
    "vision_model": "openai/clip-vit-base-patch32",
    "language_model": "openai-community/gpt2",
    "stop_at_period": True,
}


def mapper_settings(mapper: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Kind and lengths of the mapper, from the shapes; `width` is that of the language model."""
    constant = mapper.get("prefix_const")
    size = mapper["model.2.weight" if constant is None else "linear.weight"].size(0)
    if size % width or (constant is not None and constant.size(1) != width):
        raise ValueError(f"The mapper ({size}) does not fit width {width}. Use the --language_model of its training.")
    if constant is None:
        return {"mapping_type": "mlp", "prefix_length": size // width}
    layers = {name.split(".")[2] for name in mapper if name.startswith("transformer.layers.")}
    lengths = {"prefix_length": constant.size(0), "clip_length": size // width, "num_mapper_layers": len(layers)}
    return {"mapping_type": "transformer", **lengths}


def _write_clipcap(state: dict[str, Tensor], folder: Path, settings: dict[str, Any]) -> list[str]:
    settings = _CLIPCAP | settings
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        # Not the buffers of old versions of GPT-2, which computes its mask today; an unknown part is a misfit.
        if not re.search(r"\.attn\.(masked_)?bias$", name):
            renamed[f"{_PARTS.get(part, part)}.{rest}"] = value
    mapper = {n.removeprefix("mapper."): value for n, value in renamed.items() if n.startswith("mapper.")}
    mapper_alone = not any(name.startswith("language_model.") for name in renamed)
    width = read_config(model_path(settings["language_model"])).hidden_size
    settings = settings | mapper_settings(mapper, width)
    model, processor = assemble(fresh_language_model=not mapper_alone, **settings)
    parts = ("mapper.",) if mapper_alone else ("mapper.", "language_model.")
    if wrong := _misfits(renamed, {n: value for n, value in model.state_dict().items() if n.startswith(parts)}):
        raise ValueError(f"The checkpoint does not fit --vision_model and --language_model: {wrong}. Use its own.")
    model.load_state_dict(renamed, strict=False)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    language_model = f"the language model is {settings['language_model']} as published."
    return [f"The checkpoint contains only the mapper; {language_model}"] if mapper_alone else []


# --- Any of these checkpoints ----------------------------------------------------------------------------------------


def kind_of(names: Collection[str]) -> str:
    """What a checkpoint with tensors of these names is."""
    if any(name.startswith("clip_project.") for name in names):
        return "ClipCap captioner"
    if "visual_encoder.cls_token" in names:
        return "BLIP captioner"
    if {"visual.proj", "token_embedding.weight"} <= set(names):
        return "CLIP scorer"
    raise ValueError(
        f"{min(names)} is no name in the published code of BLIP, CLIP and ClipCap. Use an output that ends in .safetensors."
    )


def write_published(
    state: dict[str, Tensor],
    kind: str,
    folder: Path,
    *,
    like: Path | None,
    image_size: int | None,
    clipcap: dict[str, Any],
) -> list[str]:
    """Write weights and configuration of a published checkpoint; returns notes."""
    if like is None:
        return _write_clipcap(state, folder, clipcap)
    import transformers

    dropped: list[str] = []
    config = read_config(str(like))
    if kind == "BLIP captioner":
        model_class: Any = transformers.BlipForConditionalGeneration
        state, dropped = blip_names(state)
        if image_size is not None:
            resize_image_positions(state, image_size)
            config.vision_config.image_size = image_size
    else:
        model_class, state = transformers.CLIPModel, clip_names(state)
    if not isinstance(config, model_class.config_class):
        raise ValueError(f"--config is one of {config.model_type!r}, not a {model_class.config_class.__name__}.")
    config._name_or_path = ""
    config.architectures = [model_class.__name__]
    # The widest, because loading rounds to it: OpenAI's code stores some tensors in 16 bits and others in 32.
    floats = (value.dtype for value in state.values() if value.is_floating_point())
    config.dtype = max(floats, key=lambda dtype: dtype.itemsize)
    with torch.device("meta"):
        wrong = _misfits(state, model_class(config).state_dict())
    if wrong:
        raise ValueError(f"The checkpoint does not match --config {str(like)!r}: {wrong}. Use that of the same model.")
    state = {name: value.contiguous() for name, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    return [f"Omitted {', '.join(dropped)}, which captioning does not use."] if dropped else []
