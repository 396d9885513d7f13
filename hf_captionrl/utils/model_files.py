"""The shipped models of the embedded world, by name. They are resolved in `checkpoints/shipped_models.py`, below all loaders."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# --- Finds the files of a checkpoint in a folder or on the Hub, and checks them before transformers reads them -------

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

_SHARD = re.compile(r"[^/\\]+\.safetensors")


def hub_name(name: str) -> str | None:
    """The name if it is a valid name of a repository on the Hub and not a folder, else None."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if os.path.isdir(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def find_file(name: str, file: str, revision: str | None = None) -> str | None:
    """Path of a file of a checkpoint, downloaded if needed; None if it does not exist or cannot be downloaded."""
    from huggingface_hub.utils import httpx
    from transformers.utils import cached_file

    quiet: dict[str, Any] = {
        "revision": revision,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    try:
        return cached_file(name, file, **quiet)
    except httpx.HTTPError:  # the connection was interrupted
        return cached_file(name, file, local_files_only=True, **quiet)


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
        kind = {type(None): "null", list: "a list", str: "a string", bool: "true or false"}.get(
            type(value), "a number"
        )
        raise ValueError(
            f"{shown(path)} contains {kind}, but must contain a JSON object. Use an intact copy of the checkpoint."
        )
    return value


def check_json_files(name: str, revision: str | None = None, files: Iterable[str] = JSON_FILES) -> None:
    """Raise if one of the files is not a JSON object."""
    for file in files:
        path = find_file(name, file, revision)
        if path is not None:
            read_object(path)


def check_index(path: str | os.PathLike[str]) -> list[str]:
    """Names of the shards in an index; each must be a plain `*.safetensors` name in the same folder."""
    content = read_object(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{shown(path)} has no weight_map. Use an intact copy of the checkpoint.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise ValueError(
                f"{shown(path)} maps {tensor!r} to {file!r}, but every entry must be the plain name of a *.safetensors file "
                "in the same folder. Use a checkpoint written by save_pretrained or `captionrl convert`."
            )
    return sorted(set(weight_map.values()))


def check_safetensors(path: str | os.PathLike[str]) -> None:
    """Raise if a file is empty, truncated, or in another format; reads only its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            pass
    except (SafetensorError, ValueError) as error:
        size = os.path.getsize(path)
        state = "is empty" if not size else f"({size:,} bytes) is truncated or not a safetensors file: {error}"
        raise ValueError(f"{shown(path)} {state}. Use an intact copy of the checkpoint.") from error


# --- Finds the weights of a checkpoint in safetensors, on the requested revision or in a pull request on the Hub -----
# Many older repositories have only pickles on their main revision. For most of them, a bot of the Hub has opened a pull
# request with the same weights in safetensors, which transformers loads too. Here the conditions are stricter: the bot is
# the author, and the pull request contains the same pickle as the main revision. Offline, the cache is used.

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
"""Weight files of transformers, in the order in which it looks for them."""
ADAPTER_FILES = ("adapter_model.safetensors",)
"""Weight files of PEFT."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
"""Weight files of older releases of both."""

_BOT = "SFconvertbot"
_TITLE = "Adding `safetensors` variant of this model"
_MAIN = (None, "main")


@dataclass(frozen=True)
class Weights:
    """Weights that were found."""

    path: str
    """The safetensors file, or the index of several files."""
    revision: str | None
    """Revision on the Hub."""

    @property
    def commit(self) -> str | None:
        """Commit on the Hub; None in a folder."""
        from transformers.utils.hub import extract_commit_hash

        return extract_commit_hash(self.path, None)


def convert_command(name: str) -> str:
    """The command that converts pickles to safetensors."""
    return f"`captionrl convert {shlex.quote(name)} OUT`"


def usable_revision(name: str, revision: str | None, files: Sequence[str] = ("config.json",)) -> str | None:
    """The revision to read a checkpoint from; offline, this may be a cached pull request."""
    if revision is not None or hub_name(name) is None or any(find_file(name, file) for file in files):
        return revision
    for pull_request in _cached_pull_requests(name):
        if any(find_file(name, file, pull_request) for file in files):
            return pull_request
    return None


def find_weights(name: str, revision: str | None = None, files: Sequence[str] = WEIGHT_FILES) -> Weights:
    """Find the weights of a checkpoint in safetensors, and check that they are complete."""
    found = _find(name, revision, files)
    pull_request = None
    if found is None and hub_name(name) is not None:
        pull_request = _pull_request(name, files)
        if pull_request is not None and revision in _MAIN:
            found = _find(name, pull_request, files)
    if found is None:
        raise FileNotFoundError(_missing(name, revision, files, pull_request))
    if found.revision != revision:
        _warn_once(name, str(found.revision))
    _check_shards(name, found)
    return found


@functools.lru_cache(maxsize=64)
def _warn_once(name: str, revision: str) -> None:
    logger.warning(
        "%s has no safetensors on its main revision. Using the weights of %s, converted by the Hub's bot.",
        name,
        revision,
    )


def _find(name: str, revision: str | None, files: Sequence[str]) -> Weights | None:
    for file in files:
        path = find_file(name, file, revision)
        if path is not None:
            return Weights(path, revision)
    return None


def _check_shards(name: str, weights: Weights) -> None:
    if not weights.path.endswith(".index.json"):
        check_safetensors(weights.path)
        return
    for shard in check_index(weights.path):
        path = find_file(name, shard, weights.revision)
        if path is None:
            raise FileNotFoundError(
                f"{shown(weights.path)} lists {shard}, which is missing. Use an intact copy of the checkpoint."
            )
        check_safetensors(path)


def _missing(name: str, revision: str | None, files: Sequence[str], pull_request: str | None) -> str:
    """The error message if there are no safetensors."""
    is_adapter = files is ADAPTER_FILES or files == ADAPTER_FILES
    what = f"The adapter {name!r} has no {files[0]}" if is_adapter else f"{name!r} has no weights in safetensors"
    at = f" on revision {revision!r}" if revision is not None else ""
    others = _other_weights(name, revision)
    found = f"; it has {others[0]}" if others else ""
    lead = f"{what}{at}{found}. Other formats can execute code when they are opened."
    if pull_request is not None:
        lead += f" Revision {pull_request!r} has the same weights in safetensors."
    elif hub_name(name) is not None and not others:
        lead += " With a connection to the Hub, a copy converted by its bot would be used, if there is one."
    if os.path.isdir(name) and not others:
        return f"{lead} Use save_pretrained to save the model there, or {convert_command(name)} on pickles."
    return f"{lead} Use {convert_command(name)} and load OUT."


def _other_weights(name: str, revision: str | None) -> list[str]:
    """Names of weights in other formats; for the Hub only those in the cache, because pickles are not downloaded."""
    if os.path.isdir(name):
        endings = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
        found = sorted(path.name for path in Path(name).iterdir() if path.suffix in endings)
        return sorted(found, key=lambda file: not file.startswith(("pytorch_model", "adapter_model")))
    from huggingface_hub import try_to_load_from_cache

    return [file for file in PICKLES if isinstance(try_to_load_from_cache(name, file, revision=revision), str)]


def _pull_request(name: str, files: Sequence[str]) -> str | None:
    """The pull request with safetensors, from the Hub or, if it cannot be reached, from the cache."""
    for pull_request in [*_open_pull_requests(name), *_cached_pull_requests(name)]:
        if _find(name, pull_request, files) is not None:
            return pull_request
    return None


def _open_pull_requests(name: str) -> list[str]:
    """Revisions that the Hub's bot converted from the pickles of the main revision; newest first."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import httpx

    if constants.HF_HUB_OFFLINE:
        return []
    api = HfApi()
    try:
        asked = api.get_repo_discussions(name, author=_BOT, discussion_type="pull_request", discussion_status="open")
        numbers = [f"refs/pr/{d.num}" for d in asked if d.is_pull_request and d.author == _BOT and d.title == _TITLE]
        if not numbers:
            return []
        current = {(info.path, _blob(info)) for info in api.get_paths_info(name, list(PICKLES))}
        return [
            revision
            for revision in sorted(numbers, key=lambda r: int(r.rpartition("/")[2]), reverse=True)
            if current
            & {(info.path, _blob(info)) for info in api.get_paths_info(name, list(PICKLES), revision=revision)}
        ]
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        logger.info("Could not look for a copy of %s in safetensors on the Hub: %s", name, error)
        return []


def _blob(info: object) -> str | None:
    """Content hash of a file on the Hub."""
    lfs = getattr(info, "lfs", None)
    return getattr(lfs, "sha256", None) or getattr(info, "blob_id", None)


def _cached_pull_requests(name: str) -> list[str]:
    """Revisions `refs/pr/N` in the cache of the Hub; newest first."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "refs" / "refs" / "pr"
    if not folder.is_dir():
        return []
    numbers = sorted((int(path.name) for path in folder.iterdir() if path.name.isdigit()), reverse=True)
    return [f"refs/pr/{number}" for number in numbers]


# --- Arguments of `from_pretrained` that need a GPU or a library: quantization and implementations of attention ------

_BITS = ("load_in_4bit", "load_in_8bit")


def with_quantization(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with `load_in_4bit` or `load_in_8bit` as a `quantization_config`; raises where bitsandbytes cannot run."""
    asked = [name for name in _BITS if kwargs.get(name)]
    kwargs = {name: value for name, value in kwargs.items() if name not in _BITS}
    config = kwargs.get("quantization_config")
    if len(asked) > 1 or (asked and config is not None):
        names = " and ".join([*asked, *(["quantization_config"] if config is not None else [])])
        raise ValueError(f"{names} are given together. Use one of them.")
    settings = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    in_config = [name for name in _BITS if settings.get(name) or settings.get(f"_{name}")]
    for name in (*asked, *in_config):
        _check_bitsandbytes(name)
    if asked:
        from transformers import BitsAndBytesConfig

        dtype = kwargs.get("dtype")
        compute = {} if dtype in (None, "auto") else {"bnb_4bit_compute_dtype": dtype}
        kwargs["quantization_config"] = BitsAndBytesConfig(
            **{asked[0]: True}, **(compute if asked == ["load_in_4bit"] else {})
        )
    return kwargs


def _check_bitsandbytes(name: str) -> None:
    import torch

    missing = [
        *(["bitsandbytes, which is not installed"] if find_spec("bitsandbytes") is None else []),
        *(["a GPU, which torch does not see"] if not torch.cuda.is_available() else []),
    ]
    if missing:
        raise ValueError(
            f"{name} is set, but needs {' and '.join(missing)}. Use dtype='bfloat16' for a frozen base in 16 bits, or run on a "
            "GPU with bitsandbytes (pip install bitsandbytes)."
        )


def check_attention(value: Any) -> None:
    """Refuse an implementation of attention that transformers does not have, or that needs a GPU where there is none.

    `value` is a name, or names by part of the model. Names with a slash are kernels on the Hub and are not checked.
    """
    if value is None:
        return
    if isinstance(value, dict):
        for name in value.values():
            check_attention(name)
        return
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *sorted(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)]
    if not isinstance(value, str) or (value not in known and "|" not in value and "/" not in value):
        raise ValueError(f"attn_implementation is {value!r}. Use one of {', '.join(map(repr, known))}.")
    if value.startswith("flash_attention") and not torch.cuda.is_available():
        raise ValueError(
            f"attn_implementation is {value!r}, which needs a GPU, but torch does not see one. Use 'sdpa' or 'eager'."
        )


# --- Names (`scenes:NAME`) and folders of the shipped models of the embedded world -----------------------------------

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

_FOLDER = Path(__file__).parents[1] / "scenes" / "checkpoints"


def model_path(name: str) -> str:
    """Resolve `scenes:NAME` to the folder of a shipped model; other names are returned unchanged.

    Args:
        name (`str`): For instance `"scenes:blip-mle"`, a folder, or a name on the Hub.

    Returns:
        `str`: A folder, or `name` itself.

    Raises:
        ValueError: If no shipped model has that name.
    """
    if not name.startswith(PREFIX):
        return name
    model = name.removeprefix(PREFIX)
    if model not in MODELS:
        raise ValueError(f"There is no shipped model {name!r}. Use one of {[PREFIX + m for m in MODELS]}.")
    return str(_FOLDER / model)


# --- Loads configurations and models: only from safetensors, without custom code and kernels of the checkpoint -------

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


# --- The shipped models of the embedded world, by name. They are resolved in `checkpoints/shipped_models.py`, below all loaders ---
