"""The training manifest: with what, on what and how a published model was made, without anything of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.hub.publish_checks import redact
from hf_captionrl.io import write_json
from hf_captionrl.reports.versions import installed_versions, is_secret, plain_config

__all__ = ["MANIFEST_FILE", "public_command", "public_values", "write_manifest"]

MANIFEST_FILE = "training_manifest.json"
"""Its name in a published repository, by which a repository is known as one of ours."""

_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\)[^\s]")


def public_values(value: Any) -> Any:
    """A configuration for publication: without secrets, and with names instead of local paths.

    Args:
        value: A dataclass, a mapping, or anything nested of these.

    Returns:
        Dicts, lists, numbers, text and None.
    """
    return _public(plain_config(value))


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return _public_text(value) if isinstance(value, str) else value


def _public_text(text: str) -> str:
    """Text without tokens; of a path that leads anywhere on this machine only the last part."""
    if _ABSOLUTE.match(text) or ".." in re.split(r"[\\/]", text):
        text = re.split(r"[\\/]", text.rstrip("\\/"))[-1]
    return redact(text)


def public_command(argv: Sequence[str]) -> list[str]:
    """A command line for publication.

    Args:
        argv: As in `sys.argv`.

    Returns:
        `list[str]`: Values of options that are secrets are `***`; paths of this machine are names.
    """
    command: list[str] = []
    option = ""  # the one that the next part is the value of
    for part in argv:
        name, equals, value = part.partition("=")
        if option and is_secret(option, part):
            command.append("***")
        elif equals and name.startswith("-"):
            command.append(f"{name}={'***' if is_secret(name, value) else _public_text(value)}")
        else:
            command.append(_public_text(part))
        option = part if part.startswith("-") and not equals else ""
    return command


def write_manifest(
    folder: str | os.PathLike[str],
    *,
    command: Sequence[str],
    seeds: Mapping[str, int | None],
    data: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write `training_manifest.json`: versions, command, data, seeds and configuration.

    Args:
        folder: Folder of the checkpoint.
        command: As in `sys.argv`.
        seeds: By what they seed.
        data: Name, configuration, revision, and a fingerprint of each split.
        config: What the run was told.

    Returns:
        `pathlib.Path`: The file.
    """
    # Others cannot use the revision of a private checkout.
    versions = {name: version for name, version in installed_versions().items() if name != "git_revision"}
    manifest = {
        "made_with": "hf_captionrl",
        "versions": versions,
        "command": public_command(command),
        "data": public_values(data),
        "seeds": dict(seeds),
        "config": public_values(config or {}),
    }
    return write_json(Path(folder) / MANIFEST_FILE, manifest)
