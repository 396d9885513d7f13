"""Assembles a ClipCap from a pretrained vision tower and a pretrained language model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, CLIPVisionModelWithProjection

from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig
from hf_captionrl.captioners.clipcap.modeling_clipcap import ClipCapForConditionalGeneration
from hf_captionrl.captioners.clipcap.processing_clipcap import ClipCapProcessor
from hf_captionrl.utils.model_files import (
    check_complete,
    check_width,
    load_image_processor,
    load_language_model,
    load_pretrained,
    model_path,
    read_config,
)


def _tower(name: str) -> Any:
    """The vision tower of a dual encoder, or a vision model; CLIP's includes its projection."""
    config = read_config(name)
    if config.model_type in ("clip", "clip_vision_model"):
        vision_config = getattr(config, "vision_config", config)
        vision_config.projection_dim = config.projection_dim  # the vision config's value may be wrong
        return load_pretrained(CLIPVisionModelWithProjection, name, config=vision_config)[0]
    whole, _ = load_pretrained(AutoModel, name)
    return whole.vision_model if hasattr(config, "vision_config") else whole


def _language_model(name: str) -> tuple[Any, Any]:
    """Tokenizer and language model; a folder without config.json may hold a GGUF file."""
    files = sorted(Path(name).glob("*.gguf"))
    if not files or (Path(name) / "config.json").exists():
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False), load_language_model(name)
    file, loading = files[0].name, {"dtype": torch.float32, "output_loading_info": True}
    tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=file, trust_remote_code=False)
    model, info = AutoModelForCausalLM.from_pretrained(
        name, gguf_file=file, trust_remote_code=False, use_safetensors=True, **loading
    )
    check_complete(str(files[0]), model, set(info["missing_keys"]))
    del model.config.quantization_config  # the weights are fp32 now
    if len(tokenizer) > model.config.vocab_size:  # transformers adds a token for unknown words that the file lacks
        model.resize_token_embeddings(len(tokenizer))
    return tokenizer, model


def assemble(
    vision_model: str | os.PathLike[str],
    language_model: str | os.PathLike[str],
    *,
    fresh_language_model: bool = False,
    **settings: Any,
) -> tuple[ClipCapForConditionalGeneration, ClipCapProcessor]:
    """Connect a vision tower and a language model with an untrained mapper."""
    vision_model, language_model = model_path(os.fspath(vision_model)), model_path(os.fspath(language_model))
    tower = _tower(vision_model)
    check_width(tower.config, vision_model)
    tokenizer, pretrained = _language_model(language_model)
    for name in ("bos_token", "eos_token"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"The tokenizer of {language_model!r} has no {name}. Set it in tokenizer_config.json.")
    processor = ClipCapProcessor(load_image_processor(vision_model), tokenizer)
    text_config = pretrained.config
    for part in (tower.config, text_config):
        part._name_or_path = ""  # do not save local paths with the model
        part.dtype = torch.float32  # a tower that is stored in 16 bits would not fit the mapper, which is trained
    config = ClipCapConfig(tower.config, text_config, **settings)
    if config.stop_at_period:
        config.period_token_ids = processor.period_token_ids()
    model = ClipCapForConditionalGeneration(config).eval()
    model.vision_tower.encoder.load_state_dict(tower.state_dict())
    if not fresh_language_model:
        model.language_model.load_state_dict(pretrained.state_dict())
    return model, processor
