"""From a name, a folder or a model to a captioner of the right family."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import cached_file

from hf_captionrl.captioners.adapter_loading import with_adapter
from hf_captionrl.captioners.base import Captioner
from hf_captionrl.captioners.saving import SETTINGS_FILE, ProcessorPair

__all__ = ["FAMILIES", "load_captioner", "register"]

FAMILIES: dict[str, type[Captioner]] = {}
"""From `config.model_type` to the family that knows it."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")

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
        model (`str`, `PreTrainedModel`, `PeftModel` or [`Captioner`]): Name on the Hub, a folder, or a model.
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
        FileNotFoundError: If there is no such folder or repository, or it lacks a processor.
        ValueError: If it is not a captioner, has no output head, brings code of its own, the parts do not belong
            together, or settings of loading are given with a model that is loaded already.
    """
    if kwargs.pop("trust_remote_code", None):
        raise ValueError(
            "trust_remote_code is never taken: no code that a checkpoint brings is run here. Leave it out, and load "
            "checkpoints of model types that transformers knows."
        )
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
        captioner = _load(os.fspath(model), processor, prompt, dtype, revision, base_model, kwargs)
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
        f"{what} (model type {model_type!r}) is no captioner of a known family. {_hint(config, str(model_type))} Known "
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


def _file(name: str, file: str, revision: str | None) -> str | None:
    return cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _check_place(name: str) -> None:
    """Refuse what is neither a folder nor a name on the Hub, before anybody is asked for it."""
    if os.path.isdir(name):
        return
    try:
        validate_repo_id(name)
        is_name = True
    except HFValidationError:
        is_name = False
    if not is_name or os.path.isabs(name) or name.startswith((".", "~")):
        raise FileNotFoundError(
            f"There is no folder {name!r}. Check the path, or pass a name on the Hub (owner/name)."
        )


def _read_config(name: str, revision: str | None) -> Any:
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise FileNotFoundError(f"The folder {name!r} has no config.json. Pass the folder that save_pretrained wrote.")
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except OSError as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder nor a reachable model on the Hub with a readable config.json. Check the "
            "name; offline, only folders and models that were downloaded before can be loaded."
        ) from error
    except (ValueError, KeyError) as error:
        if _brings_code(name, ("config.json",), revision):
            reason = (
                "brings code of its own (auto_map in config.json), which is never run here. Load a checkpoint of the same "
                "model in a class of transformers' own (often there is one whose name ends in -hf), or convert it to one"
            )
        else:
            reason = (
                f"is of a model type that the installed transformers ({transformers.__version__}) does not know. Update "
                "transformers, or check model_type in its config.json"
            )
        raise ValueError(f"{name!r} {reason}. Known families: {', '.join(sorted(FAMILIES))}.") from error


def _brings_code(name: str, files: tuple[str, ...], revision: str | None) -> bool:
    """Whether a checkpoint asks for Python files that lie beside it."""
    for file in files:
        path = _file(name, file, revision)
        if path is not None:
            with open(path, encoding="utf-8") as stream:
                if '"auto_map"' in stream.read():
                    return True
    return False


def _load_processor(name: str, revision: str | None) -> Any:
    """The processor in a folder or repository; None where there is none."""
    has_tokenizer = any(
        _file(name, file, revision) for file in ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")
    )
    has_image_processor = any(
        _file(name, file, revision) for file in ("preprocessor_config.json", "processor_config.json")
    )
    if not (has_tokenizer and has_image_processor):
        return None
    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError):
        processor = None
    if getattr(processor, "tokenizer", None) is not None and getattr(processor, "image_processor", None) is not None:
        return processor
    try:
        return ProcessorPair(
            AutoImageProcessor.from_pretrained(name, revision=revision, trust_remote_code=False),
            AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False),
        )
    except ValueError as error:
        if not _brings_code(name, PROCESSOR_FILES, revision):
            raise
        raise ValueError(
            f"The image processor or tokenizer of {name!r} brings code of its own (auto_map), which is never run here. Pass "
            "processor=..., made of classes of transformers."
        ) from error


def _saved_settings(name: str, revision: str | None) -> dict[str, Any]:
    """What the captioner was saved with; empty for a checkpoint that is not ours."""
    file = _file(name, SETTINGS_FILE, revision)
    if file is None:
        return {}
    with open(file, encoding="utf-8") as stream:
        return json.load(stream)


def _load(
    name: str,
    processor: Any,
    prompt: str | None,
    dtype: Any,
    revision: str | None,
    base_model: Any,
    kwargs: dict[str, Any],
    adapt: Callable[[Any], Any] | None = None,
) -> Captioner:
    _check_place(name)
    settings = _saved_settings(name, revision)
    if prompt is None:
        prompt = settings.get("prompt")
    if _file(name, "adapter_config.json", revision):
        captioner = _load_adapter(name, processor, prompt, dtype, revision, base_model, kwargs)
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
    config = _read_config(name, revision)
    family = _family_of(config, repr(name))
    if processor is None:
        processor = _load_processor(name, revision)
    if processor is None:
        raise FileNotFoundError(
            f"{name!r} holds a model, but no tokenizer or no image processor. Save the processor beside it "
            "(processor.save_pretrained), or pass processor=..."
        )
    if dtype is not None:
        kwargs["dtype"] = dtype
    # Asked first: transformers would have another format converted by a service, or open a pickle, which runs code.
    if not any(_file(name, file, revision) for file in WEIGHT_FILES):
        raise FileNotFoundError(
            f"{name!r} has a config.json but no weights in safetensors. Other formats run code where they are opened: "
            "convert them with the model's own save_pretrained."
        )
    loader = getattr(transformers, family.model_class)
    model, info = loader.from_pretrained(
        name, revision=revision, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **kwargs
    )
    _check_head(name, family, model, set(info["missing_keys"]))
    if adapt is not None:
        # Before the processor, which may come from the adapter's folder, is compared with the model.
        model = adapt(model)
    if prompt is None:
        prompt = family.known_prompt(name)
    captioner = family(model, _as_processor(processor, repr(name)), prompt=prompt)
    captioner.model.eval()
    return captioner


def _check_head(name: str, family: type[Captioner], model: Any, missing: set[str]) -> None:
    head = family.output_head(model)
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if head is not None and p is head.weight}
    if head is None or names <= missing:
        raise ValueError(
            f"{name!r} has no weights for the output head of {type(model).__name__}: it is no finished captioner. "
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
) -> Captioner:
    from peft import PeftConfig

    base = base_model or PeftConfig.from_pretrained(name, revision=revision).base_model_name_or_path
    if not base:
        raise ValueError(f"The adapter {name!r} does not say which model it belongs to. Pass base_model=...")
    # A relative path is looked for from the adapter's own folder, so that the two can be moved together.
    beside = os.path.normpath(os.path.join(name, base)) if str(base).startswith(".") else ""
    if os.path.isdir(beside):
        base = beside
    file = _file(name, "adapter_model.safetensors", revision)
    if not file:  # PEFT would open a pickle
        raise FileNotFoundError(
            f"The adapter {name!r} has no adapter_model.safetensors. Other formats run code where they are opened: save it "
            "with PEFT's save_pretrained."
        )
    if processor is None:
        processor = _load_processor(name, revision)
    if isinstance(base, (str, os.PathLike)):
        place = os.fspath(base)
        adapt = functools.partial(with_adapter, name=name, file=file, base=place, revision=revision)
        captioner = _load(place, processor, prompt, dtype, None, None, kwargs, adapt)
    else:
        captioner = load_captioner(base, processor=processor, prompt=prompt, dtype=dtype, **kwargs)
        captioner.model = with_adapter(captioner.model, name, file, type(captioner.base_model).__name__, revision)
    captioner.model.eval()
    return captioner
