"""Loads a captioner of the right family from a name, a folder or a model."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hf_captionrl.captioners.captioner import Captioner, ProcessorPair, read_settings
from hf_captionrl.utils.model_files import (
    ADAPTER_FILES,
    TOKENIZER_FILES,
    Weights,
    adapter_base,
    brings_code,
    check_complete,
    check_kwargs,
    find_file,
    find_weights,
    hub_name,
    load_pretrained,
    model_path,
    read_config,
    read_object,
)

FAMILIES: dict[str, type[Captioner]] = {}
"""From `config.model_type` to its family."""
Family = TypeVar("Family", bound=type[Captioner])


def register(family: Family) -> Family:
    """Class decorator that registers a family, a subclass of [`Captioner`], for its `model_types`."""
    FAMILIES.update(dict.fromkeys(family.model_types, family))
    return family


def registered(kind: str) -> type[Captioner] | None:
    """The family of a `config.model_type`, if there is one; chat models are registered when no other family has the type."""
    if kind not in FAMILIES:
        from hf_captionrl.captioners import chat  # noqa: F401
    return FAMILIES.get(kind)


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
        what = type(model).__name__
        raise ValueError(f"{', '.join(kwargs)} cannot be set on a {what} that is loaded. Use model.to(dtype).")
    if isinstance(model, Captioner):
        captioner = model
        captioner.prompt = captioner.prompt if prompt is None else prompt
    elif isinstance(model, (str, os.PathLike)):
        name = model_path(os.fspath(model))
        captioner = _load(name, processor, prompt, kwargs, revision=revision, base_model=base_model)
    else:
        what = type(model).__name__
        family = _family_of(getattr(model, "config", None), what)
        if processor is None:
            raise ValueError(f"A {what} object has no processor. Pass processor=, for instance an AutoProcessor.")
        prompt = family.known_prompt(str(getattr(model, "name_or_path", ""))) if prompt is None else prompt
        captioner = family(model, _checked_processor(processor, what), prompt=prompt)
    if device is not None:
        captioner.model.to(device)
    if captioner is not model:
        captioner.check_loaded()
    return captioner


def _family_of(config: Any, what: str) -> type[Captioner]:
    kind = getattr(config, "model_type", None)
    if (family := registered(str(kind))) is not None:
        return family.for_config(config)
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        from hf_captionrl.captioners.chat import AnyChatCaptioner  # imports this module

        return AnyChatCaptioner.for_config(config)
    raise ValueError(
        f"{what} (model type {kind!r}) is not a captioner of a supported family. Load a vision-to-text model of one of these: "
        f"{', '.join(sorted(FAMILIES))}."
    )


def _checked_processor(processor: Any, what: str) -> Any:
    if getattr(processor, "tokenizer", None) is None or getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"The processor of {what} is a {type(processor).__name__}, which lacks a tokenizer or an image_processor. "
            "Pass processor=ProcessorPair(image_processor, tokenizer)."
        )
    return processor


# --- From a folder or repository: a model, or an adapter -------------------------------------------------------------


def _load(
    name: str,
    processor: Any,
    prompt: str | None,
    kwargs: dict[str, Any],
    *,
    revision: str | None = None,
    base_model: Any = None,
    adapt: Callable[[Any], Any] | None = None,
) -> Captioner:
    """`adapt` adds the adapter that this is the base model of."""
    # Before a request is sent to the Hub.
    if not os.path.isdir(name) and (hub_name(name) is None or os.path.isabs(name) or name.startswith((".", "~"))):
        raise FileNotFoundError(f"There is no folder {name!r}. Pass a folder, or a name on the Hub (owner/name).")
    settings = read_settings(name, revision)
    prompt = settings.get("prompt") if prompt is None else prompt
    if not find_file(name, "adapter_config.json", revision):
        config = read_config(name, revision, hint="The supported families are in docs/families.md.")
        family = _family_of(config, repr(name))
        processor = _load_processor(name, revision) if processor is None else processor
        if processor is None:
            raise FileNotFoundError(f"{name!r} has no tokenizer or no image processor. Pass processor=...")
        loader = getattr(transformers, family.model_class)
        model, missing = load_pretrained(loader, name, revision=revision, config=config, **kwargs)
        _check_head(name, family, model, missing)
        # Captioners use the last hidden state; published checkpoints omit the poolers, which are not used.
        check_complete(name, model, missing, unused=("pooler", "position_ids"))
        processor = _checked_processor(processor, repr(name))
        if adapt is not None:
            # Adapt first: the processor, which may come from the adapter's folder, is then compared with the model.
            model = adapt(model)
        captioner = family(model, processor, prompt=family.known_prompt(name) if prompt is None else prompt)
        captioner.model.eval()
    else:
        base = base_model or adapter_base(name, revision)
        weights = find_weights(name, revision, ADAPTER_FILES)  # PEFT would open a pickle
        processor = _load_processor(name, revision) if processor is None else processor
        own = functools.partial(_with_adapter, name=name, weights=weights)
        if isinstance(base, (str, os.PathLike)):
            base = model_path(os.fspath(base))
            captioner = _load(base, processor, prompt, kwargs, adapt=own)
        else:
            captioner = load_captioner(base, processor=processor, prompt=prompt, **kwargs)
            captioner.model = own(captioner.model)
        captioner.model.eval()
        captioner.model = captioner.model if adapt is None else adapt(captioner.model)
    captioner.frame_pooling = settings.get("frame_pooling", captioner.frame_pooling)
    captioner.num_frames = settings.get("num_frames", captioner.num_frames)
    return captioner


def _check_head(name: str, family: type[Captioner], model: Any, missing: set[str]) -> None:
    head = family.output_head(model)
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if head is not None and p is head.weight}
    if names <= missing:
        reason = f"has no weights for the output head of {type(model).__name__}"
        raise ValueError(f"{name!r} {reason}. Load a trained captioner, or pass a model object.")
    if not head.weight.is_floating_point():
        module = next((n for n, m in model.named_modules() if m is head), "lm_head")
        raise ValueError(
            f"The output head of {type(model).__name__} was quantized, but losses are computed from its weights. Pass "
            f"quantization_config=BitsAndBytesConfig(..., llm_int8_skip_modules=[{module!r}])."
        )


def _with_adapter(model: Any, name: str, weights: Weights) -> Any:
    """Load an adapter onto a model, and raise if it does not fit: PEFT only warns, or ignores its weights."""
    from peft import PeftModel, get_peft_model_state_dict

    with safe_open(weights.path, "pt") as stored:
        names = set(stored.keys())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
            adapted = PeftModel.from_pretrained(model, name, revision=weights.revision, is_trainable=True)
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        # Counted, not compared by name: older releases of transformers have other names for the same weights.
        places = names - adapted.state_dict().keys()
        if len(places) > len(own):
            raise ValueError(f"it has {min(places - own)}, which the model does not have")
    except (UserWarning, KeyError, RuntimeError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())[:300].rstrip(".")
        base = getattr(model, "name_or_path", "") or type(model).__name__
        raise ValueError(f"The adapter {name!r} does not fit {base!r}: {said}. Pass base_model=...") from error
    return adapted


# --- Processors: those of AutoProcessor, or a `ProcessorPair` if transformers has no joint one -----------------------

_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
)


def _load_processor(name: str, revision: str | None) -> Any:
    """The processor in a folder or repository; None if tokenizer or image processor are missing."""
    image_files = [path for file in _FILES[:2] if (path := find_file(name, file, revision))]
    # Without a vocabulary, transformers creates an empty tokenizer.
    if not image_files or not any(find_file(name, file, revision) for file in TOKENIZER_FILES):
        return None
    try:
        with contextlib.suppress(OSError, ValueError):
            processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
            if None not in (getattr(processor, "tokenizer", None), getattr(processor, "image_processor", None)):
                return processor
        content = read_object(image_files[0])
        kind = str(content.pop("image_processor_type", ""))
        former = getattr(transformers, kind.replace("FeatureExtractor", "ImageProcessor"), None)
        if kind.endswith("FeatureExtractor") and former is not None and "auto_map" not in content:
            content.pop("feature_extractor_type", None)
            images = former(**content)  # of a former name such as ViTFeatureExtractor
        else:
            images = AutoImageProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
        return ProcessorPair(images, AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False))
    except ImportError:
        raise
    except Exception as error:  # from a validator, a missing file, or an attribute of the wrong type
        if brings_code(name, _FILES, revision):
            reason = "needs custom code (auto_map), which is never executed here"
            raise ValueError(
                f"The image processor or tokenizer of {name!r} {reason}. Pass processor=..., or load a checkpoint that was "
                "converted to classes of transformers."
            ) from error
        said = " ".join(str(error).split())[:200]
        present = ", ".join(file for file in _FILES if find_file(name, file, revision))
        raise ValueError(
            f"The processor of {name!r} cannot be loaded from {present} ({type(error).__name__}: {said}). Pass processor=..."
        ) from error


# Importing a module of families registers them.
from hf_captionrl.captioners import families  # noqa: E402, F401
