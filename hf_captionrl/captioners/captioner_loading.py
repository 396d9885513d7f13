"""From a name, a folder or a model to a captioner of the right family."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
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
from hf_captionrl.checkpoints.shipped import model_path
from hf_captionrl.checkpoints.weights import ADAPTER_FILES, find_weights, usable_revision

__all__ = ["FAMILIES", "load_captioner", "register"]

FAMILIES: dict[str, type[Captioner]] = {}
"""From `config.model_type` to the family that knows it."""

Family = TypeVar("Family", bound=type[Captioner])


def register(family: Family) -> Family:
    """Class decorator: let `load_captioner` find a family by the model types that it names.

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
    """Load a vision-to-text model, or an adapter on one, as a captioner.

    Args:
        model (`str`, `PreTrainedModel`, `PeftModel` or [`Captioner`]): Name on the Hub, a folder, a shipped model
            (`"scenes:blip-mle"`), or a model.
        processor (*optional*): In place of the one beside the model; needed where `model` is an object.
        prompt (`str`, *optional*): Stands before every caption; by default what the captioner was saved with, else
            what the checkpoint is known to be trained with, else nothing.
        dtype (`torch.dtype` or `str`, *optional*): Of the weights; by default the checkpoint's.
        device (`torch.device` or `str`, *optional*): Where to.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        base_model (*optional*): What an adapter belongs to, where that is not where its configuration says. A path there
            that begins with a dot is looked for from the adapter's folder first.
        kwargs: For `from_pretrained`; like `dtype` only where there is a model to load.

    Returns:
        [`Captioner`]: In eval mode if it was loaded.

    Raises:
        FileNotFoundError: If there is no such folder or repository, or it lacks a processor or weights in safetensors.
        ValueError: If it is not a captioner, has no output head, brings code of its own, a file is damaged, the parts do
            not belong together, or settings of loading are given with a model that is loaded already.
    """
    kwargs = check_kwargs(kwargs)
    unused = [*([] if dtype is None else ["dtype"]), *kwargs]
    if unused and not isinstance(model, (str, os.PathLike)):
        raise ValueError(
            f"{', '.join(unused)} cannot be set on a {type(model).__name__} object, which is loaded already. Give them where "
            "it is loaded, or convert it with model.to(dtype)."
        )
    if isinstance(model, Captioner):
        captioner = model
        if prompt is not None:
            captioner.prompt = prompt
    elif isinstance(model, (str, os.PathLike)):
        captioner = _load(model_path(os.fspath(model)), processor, prompt, dtype, revision, base_model, kwargs)
    else:
        family = _family_of(getattr(model, "config", None), type(model).__name__)
        if processor is None:
            raise ValueError(
                f"A {type(model).__name__} object brings no processor. Pass processor=, for instance an AutoProcessor."
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
        f"{what} (model type {model_type!r}) is not a captioner of a known family. {_hint(config, str(model_type))} Known "
        f"families: {', '.join(sorted(FAMILIES))}."
    )


def _hint(config: Any, model_type: str) -> str:
    """What the model is instead, and what to do."""
    if hasattr(config, "logit_scale_init_value") or model_type.startswith(("clip", "siglip")):
        return "It ranks captions, but writes none: load it with load_scorer."
    sees = (
        getattr(config, "vision_config", None) is not None or model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    if model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "It classifies images, but writes nothing. Load a vision-to-text model."
    if not sees and (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    ):
        return "It reads text, but sees no images. Load a vision-to-text model."
    return "Load a vision-to-text model."


def _as_processor(processor: Any, what: str) -> Any:
    if getattr(processor, "tokenizer", None) is None or getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"The processor of {what} is a {type(processor).__name__}, which lacks a tokenizer or an image_processor. "
            "Pass processor=ProcessorPair(image_processor, tokenizer)."
        )
    return processor


def _check_place(name: str) -> None:
    """Refuse what is neither a folder nor a name on the Hub, before the Hub is asked for it."""
    if os.path.isdir(name):
        return
    if hub_name(name) is None or os.path.isabs(name) or name.startswith((".", "~")):
        raise FileNotFoundError(
            f"There is no folder {name!r}. Check the path, or pass a name on the Hub (owner/name)."
        )


def _load(
    name: str,
    processor: Any,
    prompt: str | None,
    dtype: Any,
    revision: str | None,
    base_model: Any,
    kwargs: dict[str, Any],
    adapt: Callable[[Any], Any] | None = None,
    adapters: tuple[str, ...] = (),
) -> Captioner:
    _check_place(name)
    revision = usable_revision(name, revision, ("config.json", "adapter_config.json"))
    settings = read_settings(name, revision)
    if prompt is None:
        prompt = settings.get("prompt")
    if find_file(name, "adapter_config.json", revision):
        captioner = _load_adapter(name, processor, prompt, dtype, revision, base_model, kwargs, adapters)
        captioner.model = captioner.model if adapt is None else adapt(captioner.model)
    else:
        captioner = _load_whole(name, processor, prompt, dtype, revision, kwargs, adapt)
    captioner.frame_pooling = settings.get("frame_pooling", captioner.frame_pooling)
    captioner.num_frames = settings.get("num_frames", captioner.num_frames)
    return captioner


def _load_whole(
    name: str,
    processor: Any,
    prompt: str | None,
    dtype: Any,
    revision: str | None,
    kwargs: dict[str, Any],
    adapt: Callable[[Any], Any] | None = None,
) -> Captioner:
    config = read_config(name, revision, hint=f"Known families: {', '.join(sorted(FAMILIES))}.")
    family = _family_of(config, repr(name))
    if processor is None:
        processor = load_processor(name, revision)
    if processor is None:
        raise FileNotFoundError(
            f"{name!r} holds a model, but no tokenizer or no image processor. Save the processor beside it "
            "(processor.save_pretrained), or pass processor=..."
        )
    if dtype is not None:
        kwargs["dtype"] = dtype
    loader = getattr(transformers, family.model_class)
    model, missing = load_pretrained(loader, name, revision=revision, config=config, **kwargs)
    _check_head(name, family, model, missing)
    # Captioners read the last hidden state; published ones leave out the poolers that nothing reads.
    check_complete(name, model, missing, unused=("pooler", "position_ids"))
    processor = _as_processor(processor, repr(name))
    family.complete_processor(model, processor)
    if adapt is not None:
        # Before the processor, which may come from the adapter's folder, is compared with the model.
        model = adapt(model)
    if prompt is None:
        prompt = family.known_prompt(name)
    captioner = family(model, processor, prompt=prompt)
    captioner.model.eval()
    return captioner


def _check_head(name: str, family: type[Captioner], model: Any, missing: set[str]) -> None:
    head = family.output_head(model)
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if head is not None and p is head.weight}
    if head is None or names <= missing:
        raise ValueError(
            f"{name!r} has no weights for the output head of {type(model).__name__}: it is not a trained captioner. "
            "Load one with a language-modelling head, or pass a model object to train one from scratch."
        )


def _load_adapter(
    name: str,
    processor: Any,
    prompt: str | None,
    dtype: Any,
    revision: str | None,
    base_model: Any,
    kwargs: dict[str, Any],
    adapters: tuple[str, ...],
) -> Captioner:
    base = base_model or adapter_base(name, revision, adapters)
    # PEFT would open a pickle.
    weights = find_weights(name, revision, ADAPTER_FILES)
    if processor is None:
        processor = load_processor(name, revision)
    revision = weights.revision
    if isinstance(base, (str, os.PathLike)):
        place = model_path(os.fspath(base))
        adapt = functools.partial(with_adapter, name=name, file=weights.path, base=place, revision=revision)
        captioner = _load(place, processor, prompt, dtype, None, None, kwargs, adapt, (*adapters, name))
    else:
        captioner = load_captioner(base, processor=processor, prompt=prompt, dtype=dtype, **kwargs)
        base_type = type(captioner.base_model).__name__
        captioner.model = with_adapter(captioner.model, name, weights.path, base_type, revision)
    captioner.model.eval()
    return captioner
