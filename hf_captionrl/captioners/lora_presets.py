"""`LoraConfig`s of the adapters of No Detail Left Behind: SR-L, SR-V and SR-LV."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import FAMILIES

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["both_lora", "language_lora", "vision_lora"]


class _Targets(Captioner):
    """A captioner of which only the module names are used: without weights, processor and head tap."""

    def __init__(self, model: Any) -> None:
        self.model = model


def _captioner_of(model: Captioner | PreTrainedModel | str, revision: str | None) -> Captioner:
    if isinstance(model, Captioner):
        return model
    if isinstance(model, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    else:
        config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{model if isinstance(model, str) else type(model).__name__!r} has model type {config.model_type!r}. Use one of "
            f"{', '.join(sorted(FAMILIES))}, or pass a peft.LoraConfig with your own target_modules."
        )
    family = FAMILIES[config.model_type].for_config(config)
    if isinstance(model, (str, os.PathLike)):
        with torch.device("meta"):
            model = getattr(transformers, family.model_class).from_config(config)
    made: Any = type(f"{family.__name__}Targets", (_Targets, family), {})
    return made(model)


def _preset(
    model: Captioner | PreTrainedModel | str,
    tune: Literal["language", "vision", "both"],
    revision: str | None,
    settings: dict[str, Any],
) -> LoraConfig:
    return _captioner_of(model, revision).lora_config(tune, **settings)


def language_lora(
    model: Captioner | PreTrainedModel | str, *, revision: str | None = None, **settings: Any
) -> LoraConfig:
    """LoRA on the language model: attention of GPT-2, every linear layer of LLaMA-like models; the connector is trained in full.

    Reference: "No Detail Left Behind", SR-L.

    Args:
        model ([`Captioner`], `PreTrainedModel` or `str`): The model to adapt, or its name; for a name, only the
            configuration is read.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        settings (`Any`): `r` (32), `alpha` (16), `dropout` (0), `init` ("peft"; "paper" for the authors'), `target_modules`, `modules_to_save`, as for
            `Captioner.lora_config`.

    Returns:
        `peft.LoraConfig`: For `peft_config` of a trainer.

    Raises:
        ValueError: If the family of the model is unknown.

    Example:
        >>> SmileTrainer(name, args, train, peft_config=language_lora(name, r=16))  # doctest: +SKIP
    """
    return _preset(model, "language", revision, settings)


def vision_lora(
    model: Captioner | PreTrainedModel | str, *, revision: str | None = None, **settings: Any
) -> LoraConfig:
    """LoRA on attention inputs and both layers of the MLP of the vision tower; the connector is trained in full.

    Reference: "No Detail Left Behind", SR-V. Arguments and errors are those of [`language_lora`].

    Args:
        model ([`Captioner`], `PreTrainedModel` or `str`): The model to adapt, or its name.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        settings (`Any`): Of `Captioner.lora_config`.

    Returns:
        `peft.LoraConfig`: For `peft_config` of a trainer.
    """
    return _preset(model, "vision", revision, settings)


def both_lora(model: Captioner | PreTrainedModel | str, *, revision: str | None = None, **settings: Any) -> LoraConfig:
    """LoRA on the language model and on the vision tower; the connector is trained in full.

    Reference: "No Detail Left Behind", SR-LV. Arguments and errors are those of [`language_lora`].

    Args:
        model ([`Captioner`], `PreTrainedModel` or `str`): The model to adapt, or its name.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        settings (`Any`): Of `Captioner.lora_config`.

    Returns:
        `peft.LoraConfig`: For `peft_config` of a trainer.
    """
    return _preset(model, "both", revision, settings)
