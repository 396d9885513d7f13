"""`LoraConfig`s of the adapters of No Detail Left Behind: SR-L, SR-V and SR-LV, for a captioner, a model or a name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from hf_captionrl.captioners.captioner import Captioner, Tune
from hf_captionrl.captioners.loading import registered

if TYPE_CHECKING:
    from peft import LoraConfig


def _preset(
    model: Captioner | PreTrainedModel | str, tune: Tune, revision: str | None, settings: dict[str, Any]
) -> LoraConfig:
    if isinstance(model, Captioner):
        return model.lora_config(tune, **settings)
    loaded: Any = model
    is_name = isinstance(model, (str, os.PathLike))
    config: Any = (
        AutoConfig.from_pretrained(loaded, revision=revision, trust_remote_code=False) if is_name else loaded.config
    )
    family = registered(config.model_type)
    if family is None:
        raise ValueError(f"There is no LoRA preset for the model type {config.model_type!r}. Use a peft.LoraConfig.")
    family = family.for_config(config)
    captioner = family.__new__(family)  # only the module names are used: no weights, processor and head tap
    if is_name:
        with torch.device("meta"):
            loaded = getattr(transformers, family.model_class).from_config(config)
    captioner.model = loaded
    return captioner.lora_config(tune, **settings)


def language_lora(
    model: Captioner | PreTrainedModel | str, *, revision: str | None = None, **settings: Any
) -> LoraConfig:
    """LoRA on the language model: attention of GPT-2, every linear layer of LLaMA-like models; the connector is trained in full.

    Reference: "No Detail Left Behind", SR-L.

    Args:
        model ([`Captioner`], `PreTrainedModel` or `str`): The model to adapt, or its name; for a name, only the
            configuration is read.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        settings (`Any`): Those of `Captioner.lora_config`, such as `r` (32), `alpha` (16) and `init` ("peft", or "paper").

    Returns:
        `peft.LoraConfig`: For `peft_config` of a trainer.

    Example:
        >>> SmileTrainer(name, args, train, peft_config=language_lora(name, r=16))  # doctest: +SKIP
    """
    return _preset(model, "language", revision, settings)


def vision_lora(
    model: Captioner | PreTrainedModel | str, *, revision: str | None = None, **settings: Any
) -> LoraConfig:
    """LoRA on attention inputs and both layers of the MLP of the vision tower; the connector is trained in full.

    Reference: "No Detail Left Behind", SR-V. Arguments and errors are those of [`language_lora`].
    """
    return _preset(model, "vision", revision, settings)


def both_lora(model: Captioner | PreTrainedModel | str, *, revision: str | None = None, **settings: Any) -> LoraConfig:
    """LoRA on the language model and on the vision tower; the connector is trained in full.

    Reference: "No Detail Left Behind", SR-LV. Arguments and errors are those of [`language_lora`].
    """
    return _preset(model, "both", revision, settings)
