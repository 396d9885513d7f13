"""Names, files and safe loading of checkpoints: only from safetensors, without custom code and kernels of the checkpoint.

`from_pretrained(use_safetensors=True, trust_remote_code=False)` does most of it. Added here: names of shipped models, checks of
files whose errors would not name them, refusal of file names that lead to pickles, and the pull request of the Hub's bot with
converted weights, which is also found offline.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
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

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "adapter_config.json",
)
"""Files that must contain a JSON object for transformers and PEFT."""
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
    from huggingface_hub.utils import httpx
    from transformers.utils import cached_file

    if hub_name(name) is None and not os.path.isdir(name):
        return None
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    quiet: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    try:
        return cached_file(name, file, revision=revision, local_files_only=local, **quiet)
    except httpx.HTTPError:  # the connection was interrupted
        return cached_file(name, file, revision=revision, local_files_only=True, **quiet)


def shown(path: str | os.PathLike[str]) -> str:
    """Name of a file for error messages: `owner/name: file` if it is in the Hub's cache, else its path."""
    path = Path(path)
    cached = re.search(r"models--(.+)$", path.parent.parent.parent.name)  # .../models--a--b/snapshots/COMMIT/file
    return f"{cached[1].replace('--', '/')}: {path.name}" if cached else str(path)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file whose content must be an object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or "it is nested too deeply"
        raise ValueError(
            f"{shown(path)} is not valid JSON ({reason}). Use an intact copy of the checkpoint."
        ) from error
    if not isinstance(value, dict):
        what = f"contains {json.dumps(value)[:40]}, but must contain a JSON object"
        raise ValueError(f"{shown(path)} {what}. Use an intact copy of the checkpoint.")
    return value


def check_json_files(name: str, revision: str | None = None, files: Iterable[str] = JSON_FILES) -> None:
    """Raise if one of the files is not a JSON object, or gives a part of the model an impossible size."""
    for path in filter(None, (find_file(name, file, revision) for file in files)):
        _check_sizes(shown(path), read_object(path))


# Zero divides deep inside a model, or gives one without layers; an image of 2**14 x 2**14 pixels needs 0.8 GiB.
_SIZES = {
    **dict.fromkeys(("height", "width", "patch_size", "merge_size", "temporal_patch_size", "image_size"), 2**14),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), 2**20),
}


def _check_sizes(where: str, content: dict[str, Any]) -> None:
    rest = [content]
    while rest:
        for key, value in rest.pop().items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, dict):
                    rest.append(number)
                elif key in _SIZES and isinstance(number, int) and not 1 <= number <= _SIZES[key]:
                    raise ValueError(
                        f"{key} in {where} is {number}, but must be from 1 to {_SIZES[key]}. Use an intact copy of the checkpoint."
                    )


def brings_code(name: str, files: tuple[str, ...], revision: str | None) -> bool:
    """Whether one of the files refers to custom code (`auto_map`)."""
    paths = (find_file(name, file, revision) for file in files)
    return any('"auto_map"' in Path(path).read_text(encoding="utf-8") for path in paths if path is not None)


# --- Tokenizers, which are small programs: a few lines of them can fill the memory ------------------------------------

_MAX_GROWTH = 1000


def check_text_files(name: str, revision: str | None = None) -> None:
    """Raise if the tokenizer of a checkpoint needs far more memory than its text."""
    if path := find_file(name, "tokenizer.json", revision):
        content = read_object(path)
        try:
            growth = _growth([content.get("normalizer"), content.get("pre_tokenizer")])
        except RecursionError:
            growth = math.inf
        if growth > _MAX_GROWTH:
            raise ValueError(
                f"The normalizer in {shown(path)} makes a text up to {growth:.3g} times as long, but at most {_MAX_GROWTH} is "
                "accepted. Use an intact copy of the checkpoint."
            )


def _growth(part: Any) -> float:
    """How many times longer the normalizers of a tokenizer can make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    content = part.get("content") if part.get("type") == "Replace" else None
    # A table of sentencepiece has few characters in place of one, but a damaged one may have many.
    own = max(1, len(content)) if isinstance(content, str) else 32 if part.get("type") == "Precompiled" else 1
    return own * _growth([value for value in part.values() if isinstance(value, dict | list)])


# --- Weights in safetensors, on the requested revision or in a pull request on the Hub -------------------------------
# Many older repositories have only pickles on their main revision. For most of them, a bot of the Hub has opened a pull
# request with the same weights in safetensors, which transformers loads too. Here the conditions are stricter: the bot is
# the author, and the pull request contains the same pickle as the main revision. Offline, the cache is used.

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
"""Weight files of transformers, in the order in which it looks for them."""
ADAPTER_FILES = ("adapter_model.safetensors",)
"""Weight files of PEFT."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
"""Weight files of older releases of both."""

_BOT = "SFconvertbot"
_TITLE = "Adding `safetensors` variant of this model"


class Weights(NamedTuple):
    """Weights that were found: the safetensors file, or the index of several, and its revision on the Hub."""

    path: str
    revision: str | None


def convert_command(name: str) -> str:
    """The command that converts pickles to safetensors."""
    return f"`captionrl convert {shlex.quote(name)} OUT`"


def usable_revision(name: str, revision: str | None, files: Sequence[str] = ("config.json",)) -> str | None:
    """The revision to read a checkpoint from; offline, this may be a cached pull request."""
    if revision is not None or hub_name(name) is None or any(find_file(name, file) for file in files):
        return revision
    candidates = _cached_pull_requests(name)
    return next((pr for pr in candidates if any(find_file(name, file, pr) for file in files)), None)


def find_weights(name: str, revision: str | None = None, files: Sequence[str] = WEIGHT_FILES) -> Weights:
    """Find the weights of a checkpoint in safetensors, and check that they are complete."""
    found, converted = _find(name, revision, files), None
    if found is None and hub_name(name) is not None:
        requests = [*_open_pull_requests(name), *_cached_pull_requests(name)]
        converted = next(filter(None, (_find(name, request, files) for request in requests)), None)
        if revision in (None, "main"):
            found = converted
    if found is None:
        raise FileNotFoundError(_missing(name, revision, files, converted))
    if found.revision != revision:
        _warn_once(name, str(found.revision))
    shards = check_index(found.path) if found.path.endswith(".index.json") else [os.path.basename(found.path)]
    paths = [find_file(name, shard, found.revision) for shard in shards]
    for shard, path in zip(shards, paths, strict=True):
        if path is None:
            raise FileNotFoundError(
                f"{shown(found.path)} lists {shard}, which is missing. Use an intact copy of the checkpoint."
            )
    for path in paths:
        check_safetensors(str(path))
    return found


def check_index(path: str | os.PathLike[str]) -> list[str]:
    """Names of the shards in an index; each must be a plain `*.safetensors` name in the same folder."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{shown(path)} has no weight_map. Use an intact copy of the checkpoint.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise ValueError(
                f"{shown(path)} maps {tensor!r} to {file!r}, but every entry must be the plain name of a *.safetensors file "
                "in the same folder. Use a checkpoint written by save_pretrained or `captionrl convert`."
            )
    return sorted(set(weight_map.values()))


def check_safetensors(path: str) -> None:
    """Raise if a file is empty, truncated, or in another format; reads only its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            pass
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{shown(path)} ({os.path.getsize(path):,} bytes) is truncated or not a safetensors file: {error}. Use an intact "
            "copy of the checkpoint."
        ) from error


@functools.lru_cache(maxsize=64)
def _warn_once(name: str, revision: str) -> None:
    said = "%s has no safetensors on its main revision. Using the weights of %s, converted by the Hub's bot."
    logger.warning(said, name, revision)


def _find(name: str, revision: str | None, files: Sequence[str]) -> Weights | None:
    paths = filter(None, (find_file(name, file, revision) for file in files))
    return next((Weights(path, revision) for path in paths), None)


def _missing(name: str, revision: str | None, files: Sequence[str], converted: Weights | None) -> str:
    """The error message if there are no safetensors; pickles on the Hub are not downloaded to find out."""
    what = f"{name!r} has no weights in safetensors"
    if files == ADAPTER_FILES:
        what = f"The adapter {name!r} has no {files[0]}"
    if revision is not None:
        what += f" on revision {revision!r}"
    if others := [file for file in PICKLES if find_file(name, file, revision, local=True)]:
        what += f"; it has {others[0]}, but pickles can execute code when they are opened"
    elif hub_name(name) is not None:
        what += ". With a connection to the Hub, a copy converted by its bot would be used, if there is one"
    if converted is not None:
        what += f". Revision {converted.revision!r} has the same weights in safetensors"
    return f"{what}. Use {convert_command(name)} and load OUT."


def _open_pull_requests(name: str) -> list[str]:
    """Revisions that the Hub's bot converted from the pickles of the main revision; newest first."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import httpx

    if constants.HF_HUB_OFFLINE:
        return []
    api = HfApi()

    def pickles(revision: str | None = None) -> set[Any]:
        """Names and content hashes."""
        found = api.get_paths_info(name, list(PICKLES), revision=revision)
        return {
            (f.path, getattr(getattr(f, "lfs", None), "sha256", None) or getattr(f, "blob_id", None)) for f in found
        }

    try:
        asked = api.get_repo_discussions(name, author=_BOT, discussion_type="pull_request", discussion_status="open")
        numbers = [d.num for d in asked if d.is_pull_request and d.author == _BOT and d.title == _TITLE]
        current = pickles() if numbers else set()
        revisions = [f"refs/pr/{number}" for number in sorted(numbers, reverse=True)]
        return [revision for revision in revisions if current & pickles(revision)]
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        logger.info("Could not look for a copy of %s in safetensors on the Hub: %s", name, error)
        return []


def _cached_pull_requests(name: str) -> list[str]:
    """Revisions `refs/pr/N` in the cache of the Hub; newest first."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "refs" / "refs" / "pr"
    numbers = sorted((int(path.name) for path in folder.glob("*") if path.name.isdigit()), reverse=True)
    return [f"refs/pr/{number}" for number in numbers]


# --- Configurations and models ---------------------------------------------------------------------------------------

_FOR_MODEL = ("dtype", "torch_dtype", "quantization_config", "attn_implementation", "experts_implementation")
_BITS = ("load_in_4bit", "load_in_8bit")
# Files with other names or in other folders are not checked before they are opened; the result is not a tuple.
_FIXED: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False, None),
    "use_safetensors": (True, None),
    **dict.fromkeys(("variant", "subfolder", "gguf_file", "weights_only", "output_loading_info"), (False, None, "")),
}


def check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for `from_pretrained` without those whose values are fixed; raises if they have other values.

    `load_in_4bit` or `load_in_8bit` becomes a `quantization_config`; raises where bitsandbytes cannot run.
    """
    for name, allowed in _FIXED.items():
        if kwargs.get(name) not in allowed:
            raise ValueError(
                f"{name} is {kwargs[name]!r}, which is not supported: weights are only read from safetensors with their usual "
                "names, and custom code of a checkpoint is never executed. Omit it; `captionrl convert` converts pickles."
            )
    asked = [name for name in _BITS if kwargs.get(name)]
    names = asked + ["quantization_config"] * (kwargs.get("quantization_config") is not None)
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are given together. Use one of them.")
    kwargs = {name: value for name, value in kwargs.items() if name not in (*_FIXED, *_BITS)}
    if asked:
        import torch
        from transformers import BitsAndBytesConfig

        missing = [] if find_spec("bitsandbytes") else ["bitsandbytes, which is not installed"]
        missing += [] if torch.cuda.is_available() else ["a GPU, which torch does not see"]
        if missing:
            raise ValueError(
                f"{asked[0]} is set, but needs {' and '.join(missing)}. Use dtype='bfloat16' for a frozen base in 16 bits, or "
                "run on a GPU with bitsandbytes (pip install bitsandbytes)."
            )
        dtype = kwargs.get("dtype")
        compute = {} if asked == ["load_in_8bit"] or dtype in (None, "auto") else {"bnb_4bit_compute_dtype": dtype}
        kwargs["quantization_config"] = BitsAndBytesConfig(**{asked[0]: True}, **compute)
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


# What loading raises if weights and configuration do not fit.
_MISFITS = (RuntimeError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError)
# Model types with code in their checkpoints, and what to load instead.
_INSTEAD = {
    "moondream1": "Use a model of similar size, such as HuggingFaceTB/SmolVLM2-2.2B-Instruct",
    "internvl_chat": "Use the repository with -HF at the end of its name, such as OpenGVLab/InternVL3_5-2B-HF",
    "minicpmv": "Use openbmb/MiniCPM-V-4.6",
    "molmo": "Use allenai/Molmo2-8B",
}


def read_config(name: str, revision: str | None = None, *, hint: str = "") -> Any:
    """Read the configuration of a checkpoint."""
    import transformers

    if os.path.isdir(name) and not Path(name, "config.json").is_file():
        raise FileNotFoundError(f"The folder {name!r} has no config.json. Pass a folder written by save_pretrained.")
    path = find_file(name, "config.json", revision)
    kind = None if path is None else read_object(path).get("model_type")
    try:
        found = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        return _without_kernels(found)
    except OSError as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder nor a reachable model on the Hub with a readable config.json. Check the "
            "name. Offline, only folders and downloaded models can be loaded."
        ) from error
    except Exception as error:  # from a validator of transformers or huggingface_hub, or an attribute of a wrong type
        said = " ".join(str(error).split())[:200]
        if not isinstance(kind, str) or kind in transformers.CONFIG_MAPPING:
            reason = f"has a config.json with values of a wrong type ({said}). Use an intact copy of the checkpoint"
        elif brings_code(name, ("config.json",), revision):
            instead = "Load a checkpoint of the same model that uses a class of transformers (its name often ends in -hf), or convert it"
            reason = f"needs custom code (auto_map in config.json), which is never executed here. {_INSTEAD.get(kind, instead)}"
        else:
            reason = (
                f"has a model type that transformers {transformers.__version__} does not support. Update transformers, or check "
                "model_type in its config.json"
            )
        raise ValueError(f"{name!r} {reason}. {hint}".rstrip()) from error


def check_checkpoint(
    name: str, revision: str | None = None, config: Any | None = None, *, adapters: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check the files of a model before it is loaded; returns arguments of `from_pretrained` for them."""
    from transformers import GenerationConfig
    from transformers.utils.hub import extract_commit_hash

    revision = usable_revision(name, revision, ("config.json", "adapter_config.json"))
    if find_file(name, "adapter_config.json", revision):
        # transformers loads the base model too: check both, and use the configuration of the base model.
        base = adapter_base(name, revision, adapters)
        find_weights(name, revision, ADAPTER_FILES)
        checked = check_checkpoint(base, None, config, adapters=(*adapters, name))
        return {"config": checked["config"], "revision": revision}
    check_json_files(name, revision, ("config.json", "generation_config.json"))
    check_text_files(name, revision)
    config = read_config(name, revision) if config is None else config
    weights = find_weights(name, revision)
    config._commit_hash = extract_commit_hash(weights.path, None)
    found = {"config": config, "revision": weights.revision}
    if weights.revision != revision and find_file(name, "generation_config.json", revision):
        found["generation_config"] = GenerationConfig.from_pretrained(name, revision=revision)
    return found


def adapter_base(name: str, revision: str | None, adapters: tuple[str, ...] = ()) -> str:
    """The base model in the configuration of an adapter; `adapters` are those already loaded, to detect cycles."""
    base = read_object(str(find_file(name, "adapter_config.json", revision))).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ValueError(
            f"adapter_config.json of {name!r} does not name its base model, but {base!r}. Pass base_model=..."
        )
    beside = os.path.normpath(os.path.join(name, base)) if base.startswith(".") else ""
    if os.path.isdir(beside):  # relative to the adapter, so that both can be moved
        base = beside
    places = {os.path.realpath(place) if os.path.isdir(place) else place for place in (*adapters, name)}
    if (os.path.realpath(base) if os.path.isdir(base) else base) in places:
        raise ValueError(
            f"adapter_config.json of {name!r} has {base!r} as its base model, which is the adapter itself. Pass "
            "base_model=..., the model that it was trained on."
        )
    return base


def load_pretrained(
    loader: Any, name: str, *, revision: str | None = None, config: Any | None = None, **kwargs: Any
) -> tuple[Any, set[str]]:
    """Load a model of transformers from safetensors; also returns the names of weights that the checkpoint lacks."""
    name, kwargs = model_path(name), check_kwargs(kwargs)
    checked = check_checkpoint(name, revision, config)
    # from_pretrained accepts settings of the configuration as arguments only if no configuration is passed.
    for key in [key for key in kwargs if key in checked["config"].to_dict() and key not in _FOR_MODEL]:
        setattr(checked["config"], key, kwargs.pop(key))
    try:
        model, info = loader.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **{**checked, **kwargs}
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(  # the original error lists hundreds of classes
            f"{name!r} has model type {checked['config'].model_type!r}, which {loader.__name__} does not support. Use a model of "
            "another type."
        ) from error
    except _MISFITS as error:
        said = " ".join(str(error).split())[:300]
        if "out of memory" in said:
            raise
        if isinstance(error, ImportError):
            raise ValueError(f"{name!r} needs a library that is not installed ({said}). Install it.") from error
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", said):
            raise ValueError(
                f"{loader.__name__} has no argument {unknown[1]!r} (model_init_kwargs). Use arguments of from_pretrained."
            ) from error
        raise ValueError(
            f"The weights of {name!r} do not match its config.json ({said}). Use an intact copy of the checkpoint."
        ) from error
    return model, set(info["missing_keys"])


def check_width(config: Any, name: str) -> None:
    """Set `hidden_size` of a vision or text model's configuration to the width of its pooled output, if it has none."""
    if not isinstance(getattr(config, "hidden_size", None), int):
        # ResNet, EfficientNet
        sizes = [*(getattr(config, "hidden_sizes", None) or []), getattr(config, "hidden_dim", None)]
        if not (widths := [size for size in sizes if isinstance(size, int)]):
            raise ValueError(
                f"{name!r} ({config.model_type}) does not say its width (hidden_size). Use another model."
            )
        config.hidden_size = widths[-1]


def load_image_processor(name: str) -> Any:
    """The image processor of a vision tower."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:  # of several lines, or with the address of a website
        raise ValueError(
            f"{name!r} has no image processor that can be read (preprocessor_config.json). Use a vision tower with one."
        ) from error


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
