"""`LoraConfig`s of the adapters of No Detail Left Behind: SR-L, SR-V and SR-LV."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hf_captionrl.captioners.captioner import Captioner, ProcessorPair, read_settings
from hf_captionrl.utils.model_files import (
    ADAPTER_FILES,
    TOKENIZER_FILES,
    brings_code,
    check_complete,
    check_json_files,
    check_kwargs,
    find_file,
    find_weights,
    hub_name,
    load_pretrained,
    model_path,
    read_config,
    read_object,
    usable_revision,
)

if TYPE_CHECKING:
    from peft import LoraConfig


# --- Loads a saved adapter onto its base model, and rejects other models ---------------------------------------------


def adapter_base(name: str, revision: str | None, adapters: tuple[str, ...] = ()) -> str:
    """The base model in the configuration of an adapter; `adapters` are those already loaded, to detect cycles."""
    base = read_object(str(find_file(name, "adapter_config.json", revision))).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"adapter_config.json of {name!r} does not name its base model. Pass base_model=...")
    if not isinstance(base, str):
        raise ValueError(
            f"adapter_config.json of {name!r} has {base!r} as base_model_name_or_path, which must be a name or a folder. "
            "Pass base_model=..."
        )
    beside = os.path.normpath(os.path.join(name, base)) if base.startswith(".") else ""
    if os.path.isdir(beside):
        base = beside
    places = {os.path.realpath(place) if os.path.isdir(place) else place for place in (*adapters, name)}
    if (os.path.realpath(base) if os.path.isdir(base) else base) in places:
        raise ValueError(
            f"adapter_config.json of {name!r} has {base!r} as its base model, which is the adapter itself. Pass "
            "base_model=..., the model that it was trained on."
        )
    return base


def with_adapter(model: Any, name: str, file: str, base: str, revision: str | None) -> Any:
    """Load an adapter onto a model, and raise if it does not fit: PEFT only warns, or ignores its weights."""
    from peft import PeftModel, get_peft_model_state_dict

    with safe_open(file, "pt") as stored:
        names = set(stored.keys())
    wrong = ""
    cause: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, name, revision=revision, is_trainable=True)
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        # Counted, not compared by name: older releases of transformers have other names for the same weights.
        places = names - adapted.state_dict().keys()
        if len(places) > len(own):
            wrong = f"it has {min(places - own)}, which the model does not have"
    except UserWarning as error:
        lacking = re.search(r"\['(.*?)'", str(error))
        wrong, cause = f"it lacks {lacking[1] if lacking else 'weights'}", error
    except KeyError as error:
        wrong, cause = f"it lacks {error.args[0]}", error
    except (RuntimeError, ValueError, TypeError) as error:
        cause = error
        found = re.search(r"size mismatch for (\S+): .*?Size\((.*?)\).*?Size\((.*?)\)", str(error))
        wrong = (
            f"{found[1]} is {found[2]} in the adapter and {found[3]} in the model"
            if found
            else "the model has none of the modules that it adapts"
            if "Target modules" in str(error)
            else str(error).splitlines()[0].rstrip(".")
        )
    if wrong:
        raise ValueError(
            f"The adapter {name!r} does not fit {base!r}: {wrong}. Pass base_model=..., the model that it was trained on."
        ) from cause
    return adapted


# --- Loads the processor of a checkpoint, as a `ProcessorPair` if transformers has no joint processor for it ---------

_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
)


def load_processor(name: str, revision: str | None) -> Any:
    """The processor in a folder or repository; None if tokenizer or image processor are missing."""
    check_json_files(name, revision, _FILES)
    has_tokenizer = any(find_file(name, file, revision) for file in TOKENIZER_FILES)
    has_image_processor = any(find_file(name, file, revision) for file in _FILES[:2])
    if not (has_tokenizer and has_image_processor):
        return None
    try:
        return _joined(name, revision)
    except ImportError:
        raise
    except Exception as error:  # from a validator, a missing file, or an attribute of the wrong type
        if brings_code(name, _FILES, revision):
            raise ValueError(
                f"The image processor or tokenizer of {name!r} needs custom code (auto_map), which is never executed here. "
                "Pass processor=... with classes of transformers, or load a checkpoint converted to them (for Florence-2: "
                "florence-community/...)."
            ) from error
        said = " ".join(str(error).split())
        present = [file for file in _FILES if find_file(name, file, revision)]
        raise ValueError(
            f"The processor of {name!r} cannot be loaded from {', '.join(present)} ({type(error).__name__}: {said[:200]}). Use an "
            "intact copy of the checkpoint, or pass processor=..."
        ) from error


def _joined(name: str, revision: str | None) -> Any:
    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError):
        processor = None
    if getattr(processor, "tokenizer", None) is not None and getattr(processor, "image_processor", None) is not None:
        return processor
    return ProcessorPair(
        _load_image_processor(name, revision),
        AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False),
    )


def _load_image_processor(name: str, revision: str | None) -> Any:
    """The image processor; former names such as `ViTFeatureExtractor` are mapped to `ViTImageProcessor`."""
    for file in _FILES[:2]:
        path = find_file(name, file, revision)
        content = {} if path is None else read_object(path)
        kind = content.get("image_processor_type")
        if isinstance(kind, str) and kind.endswith("FeatureExtractor") and "auto_map" not in content:
            loader = getattr(transformers, kind.replace("FeatureExtractor", "ImageProcessor"), None)
            if loader is not None:
                settings = {
                    k: v for k, v in content.items() if k not in ("image_processor_type", "feature_extractor_type")
                }
                return loader(**settings)
    return AutoImageProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)


# --- Loads a captioner of the right family from a name, a folder or a model ------------------------------------------

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


# --- `LoraConfig`s of the adapters of No Detail Left Behind: SR-L, SR-V and SR-LV ------------------------------------


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
