"""Loads configurations and models: only from safetensors, without custom code and kernels of the checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hf_captionrl.checkpoints.device_arguments import check_attention, with_quantization
from hf_captionrl.checkpoints.files import check_json_files, find_file, read_object
from hf_captionrl.checkpoints.shipped_models import model_path
from hf_captionrl.checkpoints.weights import ADAPTER_FILES, find_weights, usable_revision

__all__ = [
    "brings_code",
    "check_checkpoint",
    "check_complete",
    "check_kwargs",
    "load_language_model",
    "load_pretrained",
    "read_config",
    "without_kernels",
]

_FOR_MODEL = ("dtype", "torch_dtype", "quantization_config", "attn_implementation", "experts_implementation")
_FIXED = {"trust_remote_code": False, "use_safetensors": True}
"""Arguments of `from_pretrained` whose values are fixed."""


def check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for `from_pretrained` without those whose values are fixed; raises if they have other values."""
    if kwargs.get("trust_remote_code"):
        raise ValueError(
            "trust_remote_code is not supported: custom code of a checkpoint is never executed. Omit it, and load "
            "checkpoints of model types that transformers supports."
        )
    if kwargs.get("use_safetensors", True) not in (True, None):
        raise ValueError(
            f"use_safetensors is {kwargs['use_safetensors']!r}, but weights are only read from safetensors. Omit it, and "
            "use `captionrl convert` on a checkpoint that has pickles."
        )
    for name in ("variant", "subfolder", "gguf_file", "weights_only"):
        if kwargs.get(name) not in (None, ""):
            raise ValueError(
                f"{name} is {kwargs[name]!r}, which is not supported: files with other names or in other folders are not "
                "checked before they are opened. Use a folder or revision with the checkpoint itself."
            )
    kwargs = {k: v for k, v in kwargs.items() if k not in ("variant", "subfolder", "gguf_file", "weights_only")}
    if kwargs.get("output_loading_info"):
        raise ValueError("output_loading_info is not supported: the result is not a tuple. Omit it.")
    check_attention(kwargs.get("attn_implementation"))
    kwargs = with_quantization(kwargs)
    return {k: v for k, v in kwargs.items() if k not in (*_FIXED, "output_loading_info")}


def brings_code(name: str, files: tuple[str, ...], revision: str | None) -> bool:
    """Whether one of the files refers to custom code (`auto_map`)."""
    for file in files:
        path = find_file(name, file, revision)
        if path is not None and '"auto_map"' in Path(path).read_text(encoding="utf-8"):
            return True
    return False


def without_kernels(config: Any) -> Any:
    """Remove the settings that make transformers download kernels, or load weights with another file name.

    `attn_implementation` and `experts_implementation` in a `config.json` may be a repository of compiled code.
    `flash_attention_2` is replaced by such a repository if the library is missing. `transformers_weights` may be the
    name of a pickle.
    """
    config._attn_implementation_internal = None
    config._experts_implementation_internal = None
    if getattr(config, "transformers_weights", None) is not None:
        config.transformers_weights = None
    for part in getattr(config, "sub_configs", {}):
        inner = getattr(config, part, None)
        if hasattr(inner, "to_dict"):
            without_kernels(inner)
    return config


def read_config(name: str, revision: str | None = None, *, hint: str = "") -> Any:
    """Read the configuration of a checkpoint."""
    import transformers
    from transformers import AutoConfig

    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise FileNotFoundError(f"The folder {name!r} has no config.json. Pass a folder written by save_pretrained.")
    path = find_file(name, "config.json", revision)
    content = {} if path is None else read_object(path)
    try:
        return without_kernels(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False))
    except OSError as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder nor a reachable model on the Hub with a readable config.json. Check the "
            "name. Offline, only folders and downloaded models can be loaded."
        ) from error
    except Exception as error:  # from a validator of transformers or huggingface_hub, or an attribute of a wrong type
        kind = content.get("model_type")
        known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
        if brings_code(name, ("config.json",), revision) and not known:
            reason = (
                "needs custom code (auto_map in config.json), which is never executed here. Load a checkpoint of the same "
                "model that uses a class of transformers (its name often ends in -hf), or convert it"
            )
        elif known or (kind is not None and not isinstance(kind, str)):
            said = " ".join(str(error).split())
            reason = (
                f"has a config.json with values of a wrong type ({type(error).__name__}: {said[:200]}). Use an intact copy of the "
                "checkpoint"
            )
        else:
            reason = (
                f"has a model type that the installed transformers ({transformers.__version__}) does not support. Update "
                "transformers, or check model_type in its config.json"
            )
        raise ValueError(f"{name!r} {reason}. {hint}".rstrip()) from error


def check_checkpoint(
    name: str, revision: str | None = None, config: Any | None = None, *, adapters: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check the files of a model before it is loaded; returns arguments of `from_pretrained` for them."""
    from transformers import GenerationConfig

    revision = usable_revision(name, revision, ("config.json", "adapter_config.json"))
    if path := find_file(name, "adapter_config.json", revision):
        # transformers loads the base model too: check both, and use the configuration of the base model.
        base = read_object(path).get("base_model_name_or_path")
        if isinstance(base, str) and base.startswith("."):
            base = os.path.normpath(os.path.join(name, base))  # relative to the adapter, so that both can be moved
        if not isinstance(base, str) or os.path.realpath(base) in map(os.path.realpath, (*adapters, name)):
            raise ValueError(
                f"adapter_config.json of {name!r} has {base!r} as its base model. Use the name or folder of the model "
                "that it was trained on."
            )
        find_weights(name, revision, ADAPTER_FILES)
        return {
            "config": check_checkpoint(base, None, config, adapters=(*adapters, name))["config"],
            "revision": revision,
        }
    check_json_files(name, revision, ("config.json", "generation_config.json"))
    config = read_config(name, revision) if config is None else config
    weights = find_weights(name, revision)
    config._commit_hash = weights.commit
    found = {"config": config, "revision": weights.revision}
    if weights.revision != revision and find_file(name, "generation_config.json", revision):
        found["generation_config"] = GenerationConfig.from_pretrained(name, revision=revision)
    return found


def load_pretrained(
    loader: Any, name: str, *, revision: str | None = None, config: Any | None = None, **kwargs: Any
) -> tuple[Any, set[str]]:
    """Load a model of transformers from safetensors."""
    name, kwargs = model_path(name), check_kwargs(kwargs)
    loader_name = getattr(loader, "__name__", str(loader))
    checked = check_checkpoint(name, revision, config)
    # from_pretrained accepts settings of the configuration as arguments only if no configuration is passed.
    for key in [key for key in kwargs if key in checked["config"].to_dict() and key not in _FOR_MODEL]:
        setattr(checked["config"], key, kwargs.pop(key))
    try:
        model, info = loader.from_pretrained(
            name,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **{**checked, **kwargs},
        )
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        if "out of memory" in str(error):
            raise
        said = " ".join(str(error).split())
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", said):
            raise ValueError(
                f"{loader_name} has no argument {unknown[1]!r} (model_init_kwargs). Use arguments of from_pretrained."
            ) from error
        raise ValueError(
            f"The weights of {name!r} do not match its config.json ({said[:300]}). Use an intact copy of the checkpoint."
        ) from error
    except ValueError as error:
        attention = kwargs.get("attn_implementation")
        if attention is not None and "does not support" in str(error) and "ttention" in str(error):
            raise ValueError(
                f"attn_implementation is {attention!r}, which {str(error).split()[0]} does not support. Use 'eager', or leave it "
                "out for the best one that the model supports."
            ) from error
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = getattr(checked.get("config"), "model_type", None)
        raise ValueError(
            f"{name!r} has model type {kind!r}, which {loader_name} does not support. Use a model of another type."
        ) from error
    except ImportError as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{name!r} needs a library that is not installed ({said[:300]}). Install it.") from error
    return model, set(info["missing_keys"])


def load_language_model(name: str, *, revision: str | None = None, **kwargs: Any) -> Any:
    """Load a causal language model in eval mode; raises if weights are missing."""
    from transformers import AutoModelForCausalLM

    model, missing = load_pretrained(AutoModelForCausalLM, name, revision=revision, **kwargs)
    check_complete(name, model, missing)
    return model.eval()


def check_complete(name: str, model: Any, missing: set[str], *, unused: tuple[str, ...] = ()) -> None:
    """Raise if the checkpoint lacks weights, which would be random."""
    missing = {weight for weight in missing if not any(part in weight for part in unused)}
    if missing:
        raise ValueError(
            f"{name!r} lacks {len(missing)} weights of {type(model).__name__}, such as {min(missing)}, which would be random. "
            "Use a checkpoint of a complete model of this kind."
        )
