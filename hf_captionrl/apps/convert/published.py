"""Checkpoints of the published code of BLIP, CLIP and ClipCap, identified by the names of their tensors.

The renaming is documented by transformers' `convert_blip_original_pytorch_to_hf.py` and `convert_clip_original_pytorch_to_hf.py`.
Names that no rule knows stay as they are, and the comparison with the model class refuses them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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


# --- Sizes of a model from the shapes of its tensors, and a comparison of two sets of shapes -------------------------


def _tower_sizes(state: Mapping[str, Tensor], layers: str, mlp: str, width: int, config: Any | None) -> dict[str, int]:
    """Sizes of a transformer whose layers are named by a prefix and a number, with a first matrix `mlp`.

    Without a configuration its heads have width 64, as in BERT, ViT, CLIP and BLIP of every size.
    """
    heads = width // 64 if config is None else config.num_attention_heads
    if not heads or width % heads:
        raise ValueError(
            f"A width of {width} cannot be split into {heads or 'heads of 64'}. Use --config with a folder of the model."
        )
    return {
        "hidden_size": width,
        "intermediate_size": state[f"{layers}0.{mlp}.weight"].shape[0],
        "num_hidden_layers": len({n.removeprefix(layers).partition(".")[0] for n in state if n.startswith(layers)}),
        "num_attention_heads": heads,
    }


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
        raise ValueError(
            f"The checkpoint has the parts {sorted(parts)}, so it is not a captioner of BLIP. Use one of its captioners."
        )
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


def blip_config(state: dict[str, Tensor], like: Any | None = None) -> Any:
    """The configuration with the sizes of the tensors."""
    from transformers import BlipConfig

    patch = state[_PATCHES]  # (D, 3, P, P)
    words = state["text_decoder.bert.embeddings.word_embeddings.weight"]  # (V, D)
    width, patch_size = patch.shape[0], patch.shape[-1]
    image_size = patch_size * math.isqrt(state[_POSITIONS].shape[1] - 1)
    config = BlipConfig() if like is None else like
    sizes = _tower_sizes(state, "vision_model.encoder.layers.", "mlp.fc1", width, like and like.vision_config)
    config.vision_config.update(sizes | {"patch_size": patch_size, "image_size": image_size})
    layers = "text_decoder.bert.encoder.layer."
    sizes = _tower_sizes(state, layers, "intermediate.dense", words.shape[1], like and like.text_config)
    positions = state["text_decoder.bert.embeddings.position_embeddings.weight"].shape[0]
    sizes |= {"vocab_size": words.shape[0], "max_position_embeddings": positions, "encoder_hidden_size": width}
    config.text_config.update(sizes | {"is_decoder": True})
    config.architectures = ["BlipForConditionalGeneration"]
    return config


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


def clip_config(state: dict[str, Tensor], like: Any | None = None) -> Any:
    """The configuration with the sizes of the tensors."""
    from transformers import CLIPConfig

    patch = state[_PATCHES]  # (D, 3, P, P)
    words = state["text_model.embeddings.token_embedding.weight"]  # (V, D)
    length = state["text_model.embeddings.position_embedding.weight"].shape[0]
    image_size = patch.shape[-1] * math.isqrt(state[f"{_POSITIONS}.weight"].shape[0] - 1)
    config = CLIPConfig() if like is None else like
    config.projection_dim = state["visual_projection.weight"].shape[0]
    for tower, width, more in (
        ("vision", patch.shape[0], {"patch_size": patch.shape[-1], "image_size": image_size}),
        ("text", words.shape[1], {"vocab_size": words.shape[0], "max_position_embeddings": length}),
    ):
        part = getattr(config, f"{tower}_config")
        sizes = _tower_sizes(state, f"{tower}_model.encoder.layers.", "mlp.fc1", width, like and part)
        part.update(sizes | more | {"projection_dim": config.projection_dim})
    config.architectures = ["CLIPModel"]
    return config


# --- ClipCap: the mapper (`clip_project.*`) and usually GPT-2 (`gpt.*`) ----------------------------------------------
# The vision tower, the tokenizer and the shape of the language model come from other checkpoints; by default from those that the
# published ones were trained with.

_PARTS = {"clip_project": "mapper", "gpt": "language_model"}
_CLIPCAP = {
    "vision_model": "openai/clip-vit-base-patch32",
    "language_model": "openai-community/gpt2",
    "stop_at_period": True,
}


def mapper_settings(mapper: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Kind and lengths of the mapper, from the shapes; `width` is that of the language model."""
    constant = mapper.get("prefix_const")
    size = mapper["model.2.weight" if constant is None else "linear.weight"].size(0)
    if size % width or (constant is not None and constant.size(1) != width):
        raise ValueError(
            f"The mapper ({size}) does not fit a language model of width {width}. Use the --language_model that it was trained with."
        )
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
        raise ValueError(
            f"The checkpoint does not fit --vision_model and --language_model: {wrong}. Use those it was trained with."
        )
    model.load_state_dict(renamed, strict=False)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    language_model = f"the language model is {settings['language_model']} as published."
    return [f"The checkpoint contains only the mapper; {language_model}"] if mapper_alone else []


# --- Any of these checkpoints ----------------------------------------------------------------------------------------


def write_published(
    state: dict[str, Tensor], folder: Path, *, like: Path | None, image_size: int | None, clipcap: dict[str, Any]
) -> tuple[str, list[str]]:
    """Write model, configuration and image processor of a published checkpoint; returns its kind, and notes."""
    is_blip = "visual_encoder.cls_token" in state
    if image_size is not None and not is_blip:
        raise ValueError(f"image_size is {image_size}, but the file is not a captioner of BLIP. Leave it out.")
    if any(name.startswith("clip_project.") for name in state):
        return "ClipCap captioner", _write_clipcap(state, folder, clipcap)
    if is_blip:
        return "BLIP captioner", _write_blip(state, folder, like, image_size)
    if {"visual.proj", "token_embedding.weight"} <= state.keys():
        return "CLIP scorer", _write_clip(state, folder, like)
    raise ValueError(
        f"The tensors have names such as {min(state)}, which are not those of the published code of BLIP, CLIP and ClipCap. Use an "
        "output that ends in .safetensors to keep the names, or a folder with a config.json."
    )


def _write_blip(state: dict[str, Tensor], folder: Path, like: Path | None, image_size: int | None) -> list[str]:
    from transformers import BlipForConditionalGeneration, BlipImageProcessor

    state, dropped = blip_names(state)
    if image_size is not None:
        resize_image_positions(state, image_size)
    config = blip_config(state, _config_of(like))
    _save(state, config, BlipForConditionalGeneration, folder)
    if like is None:
        size = config.vision_config.image_size
        BlipImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)
    return [f"Omitted {', '.join(dropped)}, which captioning does not use."] if dropped else []


def _write_clip(state: dict[str, Tensor], folder: Path, like: Path | None) -> list[str]:
    from transformers import CLIPImageProcessor, CLIPModel

    state = clip_names(state)
    config = clip_config(state, _config_of(like))
    _save(state, config, CLIPModel, folder)
    if like is not None:
        return []
    size = config.vision_config.image_size
    crop = {"height": size, "width": size}
    CLIPImageProcessor(size={"shortest_edge": size}, crop_size=crop).save_pretrained(folder)
    return ["The activation is quick_gelu, as in OpenAI's models. Use --config for another one."]


def _config_of(like: Path | None) -> Any:
    config = None if like is None else read_config(str(like))
    if config is not None:
        config._name_or_path = ""
    return config


def _save(state: dict[str, Tensor], config: Any, model_class: Any, folder: Path) -> None:
    """Write weights and configuration, if they fit the model class."""
    if not isinstance(config, model_class.config_class):
        raise ValueError(f"--config is one of {config.model_type!r}, not a {model_class.config_class.__name__}.")
    # The widest, because loading rounds to it: OpenAI's code stores some tensors in 16 bits and others in 32.
    floats = (value.dtype for value in state.values() if value.is_floating_point())
    config.dtype = max(floats, key=lambda dtype: dtype.itemsize)
    with torch.device("meta"):
        wrong = _misfits(state, model_class(config).state_dict())
    if wrong:
        raise ValueError(
            f"The checkpoint does not match {model_class.__name__}: {wrong}. Use a checkpoint as it was released, and "
            "--config of the same model."
        )
    state = {name: value.contiguous() for name, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
