"""Small models in the layouts of published checkpoints: original configuration, tokenizer, processor; random weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

PLACE = Path(os.environ.get("CAPTIONRL_PUBLISHED_CHECKPOINTS") or "not given")
"""Folders named `OWNER__NAME`; they are not part of this repository."""

_NOT_OF_THE_CHECKPOINT = ("README*", "weights.txt", "*.index.json")

_TEXT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
_ROPE = {"mrope_section": [2, 3, 3]}

SIZES: dict[str, dict[str, Any]] = {
    "blip": {"text_config": {**_TEXT, "encoder_hidden_size": 32}, "vision_config": _TEXT},
    "blip-2": {
        "text_config": _T5,
        "vision_config": _TEXT,
        "qformer_config": {**_TEXT, "encoder_hidden_size": 32},
    },
    "idefics3": {"text_config": _GROUPED, "vision_config": _TEXT},
    "qwen2_vl": {
        **{k: v for k, v in _GROUPED.items() if k != "head_dim"},
        "rope_scaling": _ROPE,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **{k: v for k, v in _GROUPED.items() if k != "head_dim"},
        "rope_scaling": _ROPE,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": {**_GROUPED, "rope_scaling": _ROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    },
    "siglip": {"text_config": _TEXT, "vision_config": _TEXT},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},
}
"""Sizes by model type; vocabularies, images and patches stay as published."""


def _merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply nested changes; other values, and missing ones, are kept."""
    found = dict(content)
    for name, value in changes.items():
        found[name] = _merged(found.get(name) or {}, value) if isinstance(value, dict) else value
    return found


def shrunken(name: str, folder: Path, *, dtype: torch.dtype, formats: str, drop: tuple[str, ...] = ()) -> Path:
    """Copy a published layout with a tiny random model in it.

    Args:
        name: Folder below `PLACE`.
        folder: Where to.
        dtype: Of the weights.
        formats: `"safetensors"`, `"bin"`, or `"sharded ..."` in two files.
        drop: Keys of the configuration to leave out.
    """
    shutil.copytree(PLACE / name, folder, ignore=shutil.ignore_patterns(*_NOT_OF_THE_CHECKPOINT))
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content = _merged({k: v for k, v in content.items() if k not in drop}, SIZES[content["model_type"]])
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    config.quantization_config = None
    loader = getattr(transformers, (config.architectures or ["SiglipModel"])[0])
    model = loader(config)
    if hasattr(model, "query_tokens"):  # zero initially, where the gradient of the layer norm after them overflows
        torch.nn.init.normal_(model.query_tokens, std=0.02)
    model = model.to(dtype)
    scratch = folder / "scratch"
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(scratch, max_shard_size=size * 2 // 3 if formats.startswith("sharded") else size * 2)
    for path in sorted(scratch.glob("model*")):
        _place(path, folder, formats)
    shutil.rmtree(scratch)
    return folder


def _place(path: Path, folder: Path, formats: str) -> None:
    if not formats.endswith("bin"):
        shutil.copyfile(path, folder / path.name)
        return
    target = folder / path.name.replace("model", "pytorch_model", 1).replace("safetensors", "bin")
    if path.suffix == ".safetensors":
        torch.save(load_file(path), target)
    else:
        text = path.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        target.write_text(text)
