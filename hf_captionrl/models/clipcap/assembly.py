"""A ClipCap made of a pretrained image tower and a pretrained language model."""

from __future__ import annotations

import os
from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPVisionModelWithProjection,
)

from hf_captionrl.models.clipcap.configuration_clipcap import ClipCapConfig
from hf_captionrl.models.clipcap.modeling_clipcap import ClipCapForConditionalGeneration
from hf_captionrl.models.clipcap.processing_clipcap import ClipCapProcessor

__all__ = ["assemble"]


def _tower(name: str) -> Any:
    """The image tower of a dual encoder, or one that stands alone; CLIP's with its projection."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type in ("clip", "clip_vision_model"):
        vision_config = getattr(config, "vision_config", config)
        vision_config.projection_dim = config.projection_dim  # that of the vision part alone is not always kept right
        return CLIPVisionModelWithProjection.from_pretrained(name, config=vision_config, use_safetensors=True)
    whole = AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
    return whole.vision_model if hasattr(config, "vision_config") else whole


def assemble(
    vision_model: str | os.PathLike[str],
    language_model: str | os.PathLike[str],
    *,
    fresh_language_model: bool = False,
    **settings: Any,
) -> tuple[ClipCapForConditionalGeneration, ClipCapProcessor]:
    """Join an image tower and a language model by a mapper that has learnt nothing yet.

    Args:
        vision_model (`str`): CLIP, SigLIP, or another model with a pooled image embedding; a folder or a name on the Hub.
        language_model (`str`): A causal language model with its tokenizer, likewise.
        fresh_language_model (`bool`): Take only its shape and tokenizer, not its weights.
        settings (`Any`): For [`ClipCapConfig`].

    Returns:
        `tuple`: Model, in eval mode, and processor.

    Raises:
        ValueError: If captions are to stop at a full stop, and the tokenizer has no token for it.
    """
    vision_model, language_model = os.fspath(vision_model), os.fspath(language_model)
    tower = _tower(vision_model)
    text_config = AutoConfig.from_pretrained(language_model, trust_remote_code=False)
    processor = ClipCapProcessor(
        AutoImageProcessor.from_pretrained(vision_model, trust_remote_code=False),
        AutoTokenizer.from_pretrained(language_model, trust_remote_code=False),
    )
    for part in (tower.config, text_config):
        part._name_or_path = ""  # where the parts stood on this machine is not to be saved with the whole
    config = ClipCapConfig(tower.config, text_config, **settings)
    if config.stop_at_period:
        config.period_token_ids = processor.period_token_ids()
    model = ClipCapForConditionalGeneration(config).eval()
    model.vision_tower.encoder.load_state_dict(tower.state_dict())
    if not fresh_language_model:
        pretrained = AutoModelForCausalLM.from_pretrained(
            language_model, trust_remote_code=False, use_safetensors=True
        )
        model.language_model.load_state_dict(pretrained.state_dict())
    return model, processor
