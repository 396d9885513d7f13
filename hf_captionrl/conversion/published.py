"""Checkpoints of the published code of BLIP, CLIP and ClipCap, identified by the names of their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.checkpoints.loading import read_config
from hf_captionrl.conversion.blip import blip_config, blip_names, is_blip, resize_image_positions
from hf_captionrl.conversion.clip import clip_config, clip_names, is_clip
from hf_captionrl.conversion.clipcap import assemble_clipcap, is_clipcap
from hf_captionrl.conversion.report import Report
from hf_captionrl.conversion.sizes import misfits

__all__ = ["write_published"]

VISION_MODEL, LANGUAGE_MODEL = "openai/clip-vit-base-patch32", "openai-community/gpt2"
"""The models that ClipCap's published checkpoints were trained with."""


def write_published(
    state: dict[str, Tensor],
    folder: Path,
    report: Report,
    *,
    like: Path | None,
    image_size: int | None,
    clipcap: dict[str, Any],
) -> None:
    """Write model, configuration and image processor of a published checkpoint."""
    names = set(state)
    if image_size is not None and not is_blip(names):
        raise ValueError(
            f"image_size is {image_size}, but {report.source!r} is not a captioner of BLIP. Leave it out."
        )
    if is_clipcap(names):
        _write_clipcap(state, folder, report, clipcap)
    elif is_blip(names):
        _write_blip(state, folder, report, like, image_size)
    elif is_clip(names):
        _write_clip(state, folder, report, like)
    else:
        raise ValueError(
            f"{report.source!r} has tensors such as {min(names)}, which are not names of the published code of BLIP, CLIP and "
            "ClipCap. Use an output that ends in .safetensors to keep the names, or a folder with a config.json."
        )


def _write_clipcap(state: dict[str, Tensor], folder: Path, report: Report, settings: dict[str, Any]) -> None:
    report.kind = "ClipCap captioner"
    settings = {"vision_model": VISION_MODEL, "language_model": LANGUAGE_MODEL, "stop_at_period": True, **settings}
    model, processor, mapper_alone = assemble_clipcap(state, **settings)
    if mapper_alone:
        report.notes.append(
            f"The checkpoint contains only the mapper. The language model is {settings['language_model']} as published."
        )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _write_blip(
    state: dict[str, Tensor], folder: Path, report: Report, like: Path | None, image_size: int | None
) -> None:
    from transformers import BlipForConditionalGeneration, BlipImageProcessor

    report.kind = "BLIP captioner"
    found, dropped = blip_names(state)
    if dropped:
        report.notes.append(f"Omitted {', '.join(dropped)}, which captioning does not use.")
    if image_size is not None:
        resize_image_positions(found, image_size)
    config = blip_config(found, _config_of(like, "blip"))
    _save(found, config, BlipForConditionalGeneration, folder)
    if like is None:
        size = config.vision_config.image_size
        BlipImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)


def _write_clip(state: dict[str, Tensor], folder: Path, report: Report, like: Path | None) -> None:
    from transformers import CLIPImageProcessor, CLIPModel

    report.kind = "CLIP scorer"
    found = clip_names(state)
    config = clip_config(found, _config_of(like, "clip"))
    _save(found, config, CLIPModel, folder)
    if like is None:
        report.notes.append("The activation is quick_gelu, as in OpenAI's models. Use --config for another one.")
        size = config.vision_config.image_size
        crop = {"height": size, "width": size}
        CLIPImageProcessor(size={"shortest_edge": size}, crop_size=crop).save_pretrained(folder)


def _config_of(like: Path | None, model_type: str) -> Any:
    if like is None:
        return None
    config = read_config(str(like))
    if config.model_type != model_type:
        raise ValueError(
            f"--config {str(like)!r} has model type {config.model_type!r}, but the checkpoint has {model_type!r}. Use a "
            "configuration of the same type."
        )
    config._name_or_path = ""
    return config


def _save(state: dict[str, Tensor], config: Any, model_class: Any, folder: Path) -> None:
    """Write weights and configuration, if the weights fit the model class."""
    from safetensors.torch import save_file

    config.dtype = next(iter(state.values())).dtype
    with torch.device("meta"):
        wrong = misfits(state, model_class(config).state_dict())
    if wrong:
        raise ValueError(
            f"The checkpoint does not match {model_class.__name__}: {wrong}. Use a checkpoint as it was released, and "
            "--config of the same model."
        )
    save_file(
        {name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config.save_pretrained(folder)
