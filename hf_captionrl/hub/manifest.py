"""The training manifest: versions, command, data and configuration of a published model, without local paths."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.hub.publish_checks import redact
from hf_captionrl.io import write_json
from hf_captionrl.reports.versions import installed_versions, is_secret, plain_config

__all__ = ["MANIFEST_FILE", "public_command", "public_values", "public_versions", "write_manifest"]

MANIFEST_FILE = "training_manifest.json"
"""File name in a published repository; it identifies repositories that this package has pushed."""

_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\)[^\s]")


def public_values(value: Any) -> Any:
    """A configuration for publication: without secrets, and with names instead of local paths.

    Args:
        value: A dataclass, a mapping, or nested ones.

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
    """Text without tokens; a local path is reduced to its last part."""
    if _ABSOLUTE.match(text) or ".." in re.split(r"[\\/]", text):
        text = re.split(r"[\\/]", text.rstrip("\\/"))[-1]
    return redact(text)


def public_command(argv: Sequence[str]) -> list[str]:
    """A command line for publication.

    Args:
        argv: The arguments, as in `sys.argv`.

    Returns:
        `list[str]`: The arguments; secrets are replaced by `***`, and local paths by names.
    """
    command: list[str] = []
    option = ""  # the option whose value is the next argument
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


def public_versions(versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions, by default the installed ones, without the revision of a private checkout."""
    versions = installed_versions() if versions is None else versions
    return {name: version for name, version in versions.items() if name != "git_revision"}


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
        command: The arguments of the program, as in `sys.argv`.
        seeds: From what is seeded to the seed.
        data: Name, configuration and revision of the data, and a fingerprint of each split.
        config: Configuration of the run.

    Returns:
        `pathlib.Path`: The file.
    """
    manifest = {
        "made_with": "hf_captionrl",
        "versions": public_versions(),
        "command": public_command(command),
        "data": public_values(data),
        "seeds": dict(seeds),
        "config": public_values(config or {}),
    }
    return write_json(Path(folder) / MANIFEST_FILE, manifest)
