"""Loads a captioner of the right family from a name, a folder or a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hf_captionrl.captioners.adapter_loading import adapter_base, with_adapter
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.processor_loading import load_processor
from hf_captionrl.captioners.saving import read_settings
from hf_captionrl.checkpoints.files import find_file, hub_name
from hf_captionrl.checkpoints.loading import check_complete, check_kwargs, load_pretrained, read_config
from hf_captionrl.checkpoints.shipped_models import model_path
from hf_captionrl.checkpoints.weights import ADAPTER_FILES, find_weights, usable_revision

__all__ = ["FAMILIES", "load_captioner", "register"]

FAMILIES: dict[str, type[Captioner]] = {}
"""From `config.model_type` to its family."""

Family = TypeVar("Family", bound=type[Captioner])


def register(family: Family) -> Family:
    """Class decorator that registers a family for its `model_types`, so that `load_captioner` finds it.

    Args:
        family: A subclass of [`Captioner`].

    Returns:
        The class itself.
    """
    for model_type in family.model_types:
        FAMILIES[model_type] = family
    return family


def load_captioner(
    model: str | os.PathLike[str] | PreTrainedModel | Captioner,
    *,
    processor: Any | None = None,
    prompt: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    base_model: Any | None = None,
    **kwargs: Any,
) -> Captioner:
    """Load a vision-to-text model, or an adapter and its base model, as a captioner.

    Args:
        model (`str`, `PreTrainedModel`, `PeftModel` or [`Captioner`]): Name on the Hub, a folder, a shipped model
            (`"scenes:blip-mle"`), or a model.
        processor (*optional*): Processor to use instead of the saved one; required if `model` is a model object.
        prompt (`str`, *optional*): Text before every caption. By default the prompt that the captioner was saved with,
            else the known prompt of a published checkpoint, else none.
        dtype (`torch.dtype` or `str`, *optional*): Data type of the weights; by default that of the checkpoint.
        device (`torch.device` or `str`, *optional*): Device to move the model to.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        base_model (*optional*): Base model of an adapter, if it is not the one in the adapter's configuration. A
            relative path in the configuration that begins with a dot is first resolved from the adapter's folder.
        kwargs: Arguments of `from_pretrained`, such as `attn_implementation`, or `load_in_4bit=True` and
            `load_in_8bit=True` for a quantized base (bitsandbytes, on a GPU). Like `dtype`, they are only accepted if a
            model is loaded.

    Returns:
        [`Captioner`]: In eval mode if it was loaded.

    Raises:
        FileNotFoundError: If the folder or repository does not exist, or lacks a processor or weights in safetensors.
        ValueError: If the model is not a captioner, has no output head or needs custom code, a file is damaged, the
            parts do not match, or arguments of loading are given for a model that is already loaded.
    """
    kwargs = check_kwargs(kwargs if dtype is None else {"dtype": dtype} | kwargs)
    if kwargs and not isinstance(model, (str, os.PathLike)):
        raise ValueError(
            f"{', '.join(kwargs)} cannot be set on a {type(model).__name__} object, which is already loaded. Pass them when "
            "you load it, or convert it with model.to(dtype)."
        )
    if isinstance(model, Captioner):
        captioner = model
        if prompt is not None:
            captioner.prompt = prompt
    elif isinstance(model, (str, os.PathLike)):
        captioner = _load(_Source(model_path(os.fspath(model)), processor, prompt, revision, base_model, kwargs))
    else:
        family = _family_of(getattr(model, "config", None), type(model).__name__)
        if processor is None:
            raise ValueError(
                f"A {type(model).__name__} object has no processor. Pass processor=, for instance an AutoProcessor."
            )
        if prompt is None:
            prompt = family.known_prompt(str(getattr(model, "name_or_path", "")))
        captioner = family(model, _as_processor(processor, type(model).__name__), prompt=prompt)
    if device is not None:
        captioner.model.to(device)
    return captioner


def _family_of(config: Any, what: str) -> type[Captioner]:
    model_type = getattr(config, "model_type", None)
    if model_type in FAMILIES:
        return FAMILIES[model_type].for_config(config)
    raise ValueError(
        f"{what} (model type {model_type!r}) is not a captioner of a supported family. {_hint(config, str(model_type))} "
        f"Supported: {', '.join(sorted(FAMILIES))}."
    )


def _hint(config: Any, model_type: str) -> str:
    """What kind of model it is, and what to do."""
    if hasattr(config, "logit_scale_init_value") or model_type.startswith(("clip", "siglip")):
        return "It ranks captions, but cannot generate them. Use load_scorer to load it."
    has_vision = (
        getattr(config, "vision_config", None) is not None or model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    if model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "It classifies images, but cannot generate text. Load a vision-to-text model."
    if not has_vision and (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    ):
        return "It reads only text, not images. Load a vision-to-text model."
    return "Load a vision-to-text model."


def _as_processor(processor: Any, what: str) -> Any:
    if getattr(processor, "tokenizer", None) is None or getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"The processor of {what} is a {type(processor).__name__}, which lacks a tokenizer or an image_processor. "
            "Pass processor=ProcessorPair(image_processor, tokenizer)."
        )
    return processor


def _check_place(name: str) -> None:
    """Raise for a name that is neither a folder nor a possible name on the Hub, before a request is sent."""
    if os.path.isdir(name):
        return
    if hub_name(name) is None or os.path.isabs(name) or name.startswith((".", "~")):
        raise FileNotFoundError(
            f"There is no folder {name!r}. Check the path, or pass a name on the Hub (owner/name)."
        )


@dataclass(frozen=True)
class _Source:
    """The arguments of `load_captioner` for one folder or repository: a model, or an adapter."""

    name: str
    processor: Any
    prompt: str | None
    revision: str | None
    base_model: Any
    kwargs: dict[str, Any]
    adapt: Callable[[Any], Any] | None = None  # adds the adapter that this is the base model of
    adapters: tuple[str, ...] = ()  # loaded so far, to detect cycles


def _load(source: _Source) -> Captioner:
    name = source.name
    _check_place(name)
    revision = usable_revision(name, source.revision, ("config.json", "adapter_config.json"))
    settings = read_settings(name, revision)
    prompt = settings.get("prompt") if source.prompt is None else source.prompt
    source = replace(source, prompt=prompt, revision=revision)
    if find_file(name, "adapter_config.json", revision):
        captioner = _load_adapter(source)
        captioner.model = captioner.model if source.adapt is None else source.adapt(captioner.model)
    else:
        captioner = _load_model(source)
    captioner.frame_pooling = settings.get("frame_pooling", captioner.frame_pooling)
    captioner.num_frames = settings.get("num_frames", captioner.num_frames)
    return captioner


def _load_model(source: _Source) -> Captioner:
    name, revision = source.name, source.revision
    config = read_config(name, revision, hint=f"Supported families: {', '.join(sorted(FAMILIES))}.")
    family = _family_of(config, repr(name))
    processor = load_processor(name, revision) if source.processor is None else source.processor
    if processor is None:
        raise FileNotFoundError(
            f"{name!r} has a model, but no tokenizer or no image processor. Save the processor in the same folder "
            "(processor.save_pretrained), or pass processor=..."
        )
    loader = getattr(transformers, family.model_class)
    model, missing = load_pretrained(loader, name, revision=revision, config=config, **source.kwargs)
    _check_head(name, family, model, missing)
    # Captioners use the last hidden state; published checkpoints omit the poolers, which are not used.
    check_complete(name, model, missing, unused=("pooler", "position_ids"))
    processor = _as_processor(processor, repr(name))
    family.complete_processor(model, processor)
    if source.adapt is not None:
        # Adapt first: the processor, which may come from the adapter's folder, is then compared with the model.
        model = source.adapt(model)
    prompt = family.known_prompt(name) if source.prompt is None else source.prompt
    captioner = family(model, processor, prompt=prompt)
    captioner.model.eval()
    return captioner


def _check_head(name: str, family: type[Captioner], model: Any, missing: set[str]) -> None:
    head = family.output_head(model)
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if head is not None and p is head.weight}
    if head is None or names <= missing:
        raise ValueError(
            f"{name!r} has no weights for the output head of {type(model).__name__}, so it is not a trained captioner. "
            "Load a checkpoint with a language-modelling head, or pass a model object to train it from scratch."
        )
    if not head.weight.is_floating_point():
        module = next((n for n, m in model.named_modules() if m is head), "lm_head")
        raise ValueError(
            f"The output head of {type(model).__name__} was quantized, but losses are computed from its weights. Pass "
            f"quantization_config=BitsAndBytesConfig(..., llm_int8_skip_modules=[{module!r}])."
        )


def _load_adapter(source: _Source) -> Captioner:
    name = source.name
    base = source.base_model or adapter_base(name, source.revision, source.adapters)
    weights = find_weights(name, source.revision, ADAPTER_FILES)  # PEFT would open a pickle
    processor = load_processor(name, source.revision) if source.processor is None else source.processor
    adapt = functools.partial(with_adapter, name=name, file=weights.path, revision=weights.revision)
    if isinstance(base, (str, os.PathLike)):
        place, adapters = model_path(os.fspath(base)), (*source.adapters, name)
        adapt = functools.partial(adapt, base=place)
        captioner = _load(_Source(place, processor, source.prompt, None, None, source.kwargs, adapt, adapters))
    else:
        captioner = load_captioner(base, processor=processor, prompt=source.prompt, **source.kwargs)
        captioner.model = adapt(captioner.model, base=type(captioner.base_model).__name__)
    captioner.model.eval()
    return captioner
