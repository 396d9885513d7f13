"""Names, files and safe loading of checkpoints: only from safetensors, without custom code and kernels of the checkpoint.

`from_pretrained(use_safetensors=True, trust_remote_code=False)` does most of it. Added here: names of shipped models, refusal of file
names that lead to pickles, and the pull request of the Hub's bot with converted weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

PREFIX = "scenes:"
"""Prefix of the names of shipped models."""
MODELS: dict[str, str] = {
    "blip-mle": "Captioner trained with maximum likelihood: correct but generic captions.",
    "blip-smile": "Adapter for blip-mle, trained with SMILE: detailed captions.",
    "blip-sr": "Adapter for blip-mle, trained with self-retrieval in bags of look-alikes: distinctive captions.",
    "clipcap-mle": "ClipCap trained with maximum likelihood on the frozen vision tower of clip-reward.",
    "clip-reward": "Reward scorer, which also selects checkpoints.",
    "siglip-held-out": "Held-out scorer of another architecture; only used for evaluation.",
    "gpt2-perplexity": "Language model that measures fluency.",
}
"""From names to descriptions."""


def model_path(name: str) -> str:
    """Resolve `scenes:NAME` to the folder of a shipped model; other names are returned unchanged."""
    model = name.removeprefix(PREFIX)
    if model == name:
        return name
    if model not in MODELS:
        raise ValueError(f"There is no shipped model {name!r}. Use one of {[PREFIX + m for m in MODELS]}.")
    return str(Path(__file__).parents[1] / "scenes" / "checkpoints" / model)


# --- Files in a folder or on the Hub ---------------------------------------------------------------------------------

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
"""Each of them contains a vocabulary; without one, transformers creates an empty tokenizer."""


def hub_name(name: str) -> str | None:
    """The name if it is a valid name of a repository on the Hub and not a folder, else None."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with contextlib.suppress(HFValidationError):
        validate_repo_id(name)
        return None if os.path.isdir(name) else name
    return None


def find_file(name: str, file: str, revision: str | None = None, *, local: bool = False) -> str | None:
    """Path of a file of a checkpoint, downloaded if needed and not `local`; None if it does not exist or cannot be downloaded."""
    from transformers.utils import cached_file

    if hub_name(name) is None and not os.path.isdir(name):
        return None
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    quiet: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    return cached_file(name, file, revision=revision, local_files_only=local, **quiet)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file whose content must be an object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Use an intact copy of the checkpoint.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object. Use an intact copy of the checkpoint.")
    return value


def brings_code(name: str, files: tuple[str, ...], revision: str | None) -> bool:
    """Whether one of the files refers to custom code (`auto_map`)."""
    paths = (find_file(name, file, revision) for file in files)
    return any('"auto_map"' in Path(path).read_text(encoding="utf-8") for path in paths if path is not None)


# --- Weights in safetensors, on the requested revision or in a pull request on the Hub -------------------------------
# Many older repositories have only pickles on their main revision. For most of them, a bot of the Hub has opened a pull
# request with the same weights in safetensors, which transformers loads too. Offline, the cache is used.

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
"""Weight files of transformers, in the order in which it looks for them."""
ADAPTER_FILES = ("adapter_model.safetensors",)
"""Weight files of PEFT."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
"""Weight files of older releases of both."""

_BOT = "SFconvertbot"
_TITLE = "Adding `safetensors` variant of this model"


class Weights(NamedTuple):
    """The safetensors file of a checkpoint's weights, or the index of several, and its revision on the Hub."""

    path: str
    revision: str | None


def convert_command(name: str) -> str:
    """The command that converts pickles to safetensors."""
    return f"`captionrl convert {shlex.quote(name)} OUT`"


def find_weights(name: str, revision: str | None = None, files: Sequence[str] = WEIGHT_FILES) -> Weights:
    """Find the weights of a checkpoint in safetensors."""
    for place in _revisions(name, revision):
        path = next(filter(None, (find_file(name, file, place) for file in files)), None)
        if path is None:
            continue
        if place != revision:
            logger.warning("%s has no safetensors on its main revision. Using those of %s.", name, place)
        if path.endswith(".index.json"):
            check_index(path)
        return Weights(path, place)
    what = f"{name!r} has no {files[0]}" if files == ADAPTER_FILES else f"{name!r} has no weights in safetensors"
    what += "" if revision is None else f" on revision {revision!r}"
    if others := [file for file in PICKLES if find_file(name, file, revision, local=True)]:
        what += f"; it has {others[0]}, but pickles can execute code when they are opened"
    raise FileNotFoundError(f"{what}. Use {convert_command(name)} and load OUT.")


def check_index(path: str | os.PathLike[str]) -> None:
    """Raise if an index refers to anything else than plain `*.safetensors` names in its folder."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map. Use an intact copy of the checkpoint.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise ValueError(
                f"{path} maps {tensor!r} to {file!r}, but every entry must be the plain name of a *.safetensors file "
                "in the same folder. Use a checkpoint written by save_pretrained or `captionrl convert`."
            )


def _revisions(name: str, revision: str | None) -> Iterator[str | None]:
    """Where weights are looked for: `revision`, and instead of main open pull requests of the Hub's bot, newest first."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import httpx

    yield revision
    if hub_name(name) is None or revision not in (None, "main"):
        return
    try:
        requests = HfApi().get_repo_discussions(
            name, author=_BOT, discussion_type="pull_request", discussion_status="open"
        )
        yield from [f"refs/pr/{r.num}" for r in requests if (r.author, r.title) == (_BOT, _TITLE)]
    except (OSError, httpx.HTTPError):  # no connection, or no such repository: those in the cache
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "refs/refs/pr")
        yield from (f"refs/pr/{path.name}" for path in folder.glob("[0-9]*"))


# --- Configurations and models ---------------------------------------------------------------------------------------

_FOR_MODEL = ("dtype", "torch_dtype", "quantization_config", "attn_implementation", "experts_implementation")
# Files with other names or in other folders are not checked before they are opened; the result is not a tuple.
_FIXED: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False, None),
    "use_safetensors": (True, None),
    **dict.fromkeys(("variant", "subfolder", "gguf_file", "weights_only", "output_loading_info"), (False, None, "")),
}


def check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for `from_pretrained` without those whose values are fixed; raises if they have other values.

    `load_in_4bit` or `load_in_8bit` becomes a `quantization_config`.
    """
    for name, allowed in _FIXED.items():
        if kwargs.get(name) not in allowed:
            raise ValueError(
                f"{name} is {kwargs[name]!r}, which is not supported: weights are only read from safetensors with their usual "
                "names, and custom code of a checkpoint is never executed. Omit it; `captionrl convert` converts pickles."
            )
    bits = {name: True for name in ("load_in_4bit", "load_in_8bit") if kwargs.get(name)}
    kwargs = {name: value for name, value in kwargs.items() if name not in (*_FIXED, "load_in_4bit", "load_in_8bit")}
    if bits:
        from transformers import BitsAndBytesConfig

        if len(bits) + (kwargs.get("quantization_config") is not None) > 1:
            raise ValueError("load_in_4bit, load_in_8bit and quantization_config exclude each other. Use one of them.")
        if "load_in_4bit" in bits and kwargs.get("dtype") not in (None, "auto"):
            bits["bnb_4bit_compute_dtype"] = kwargs["dtype"]
        kwargs["quantization_config"] = BitsAndBytesConfig(**bits)
    return kwargs


def _without_kernels(config: Any) -> Any:
    """Remove the settings that make transformers download kernels, or load weights with another file name.

    `attn_implementation` and `experts_implementation` in a `config.json` may be a repository of compiled code.
    `flash_attention_2` is replaced by such a repository if the library is missing. `transformers_weights` may be the
    name of a pickle.
    """
    config._attn_implementation_internal = config._experts_implementation_internal = None
    if getattr(config, "transformers_weights", None) is not None:
        config.transformers_weights = None
    for part in getattr(config, "sub_configs", {}):
        inner = getattr(config, part, None)
        if hasattr(inner, "to_dict"):
            _without_kernels(inner)
    return config


def read_config(name: str, revision: str | None = None, *, hint: str = "") -> Any:
    """Read the configuration of a checkpoint."""
    from transformers import AutoConfig

    try:
        return _without_kernels(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False))
    except OSError as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder nor a reachable model on the Hub with a readable config.json. Check the "
            "name. Offline, only folders and downloaded models can be loaded."
        ) from error
    except Exception as error:  # from a validator of transformers or huggingface_hub, or an attribute of a wrong type
        reason = " ".join(str(error).split())[:200]
        if brings_code(name, ("config.json",), revision):
            reason = "it needs custom code (auto_map), which is never executed here; names of converted checkpoints often end in -hf"
        raise ValueError(f"The config.json of {name!r} cannot be used: {reason}. {hint}".rstrip()) from error


def check_checkpoint(name: str, revision: str | None = None, config: Any | None = None) -> dict[str, Any]:
    """Check the files of a model before it is loaded; returns arguments of `from_pretrained` for them."""
    from transformers import GenerationConfig
    from transformers.utils.hub import extract_commit_hash

    if find_file(name, "adapter_config.json", revision):
        # transformers loads the base model too: check both, and use the configuration of the base model.
        find_weights(name, revision, ADAPTER_FILES)
        checked = check_checkpoint(adapter_base(name, revision), None, config)
        return {"config": checked["config"], "revision": revision}
    config = read_config(name, revision) if config is None else config
    weights = find_weights(name, revision)
    config._commit_hash = extract_commit_hash(weights.path, None)
    arguments = {"config": config, "revision": weights.revision}
    if weights.revision != revision and find_file(name, "generation_config.json", revision):
        arguments["generation_config"] = GenerationConfig.from_pretrained(name, revision=revision)
    return arguments


def adapter_base(name: str, revision: str | None) -> str:
    """The base model in the configuration of an adapter."""
    base = read_object(str(find_file(name, "adapter_config.json", revision))).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ValueError(
            f"adapter_config.json of {name!r} does not name its base model, but {base!r}. Pass base_model=..."
        )
    beside = os.path.normpath(os.path.join(name, base)) if base.startswith(".") else ""
    return beside if os.path.isdir(beside) else base  # relative to the adapter, so that both can be moved


_MISFITS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""What loading raises if weights, configuration and arguments do not fit."""


def load_pretrained(
    loader: Any, name: str, *, revision: str | None = None, config: Any | None = None, **kwargs: Any
) -> tuple[Any, set[str]]:
    """Load a model of transformers from safetensors; also returns the names of weights that the checkpoint lacks."""
    from safetensors import SafetensorError

    name, kwargs = model_path(name), check_kwargs(kwargs)
    checked = check_checkpoint(name, revision, config)
    # from_pretrained accepts settings of the configuration as arguments only if no configuration is passed.
    for key in [key for key in kwargs if key in checked["config"].to_dict() and key not in _FOR_MODEL]:
        setattr(checked["config"], key, kwargs.pop(key))
    try:
        model, info = loader.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **{**checked, **kwargs}
        )
    except (*_MISFITS, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        if "out of memory" in reason:
            raise
        raise ValueError(
            f"{name!r} cannot be loaded as {loader.__name__} ({reason}). Use a complete checkpoint of this kind whose weights match its "
            "config.json, and arguments of from_pretrained."
        ) from error
    return model, set(info["missing_keys"])


def check_width(config: Any, name: str) -> None:
    """Set `hidden_size` of a vision or text model's configuration to the width of its pooled output, if it has none."""
    if not isinstance(getattr(config, "hidden_size", None), int):
        # EfficientNet, ResNet
        width = getattr(config, "hidden_dim", None) or (getattr(config, "hidden_sizes", None) or [None])[-1]
        if not isinstance(width, int):
            raise ValueError(f"{name!r} ({config.model_type}) does not say its hidden_size. Use another model.")
        config.hidden_size = width


def load_image_processor(name: str) -> Any:
    """The image processor of a vision tower."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)


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
            f"{name!r} lacks weights of {type(model).__name__} ({len(missing)}), such as {min(missing)}, which would be random. "
            "Use a checkpoint of a complete model of this kind."
        )
