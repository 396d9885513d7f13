"""Finds the files of a checkpoint in a folder or on the Hub, and checks them before transformers reads them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "JSON_FILES",
    "TOKENIZER_FILES",
    "check_index",
    "check_json_files",
    "check_safetensors",
    "find_file",
    "hub_name",
    "read_object",
    "shown",
]

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
