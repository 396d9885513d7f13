"""Versions of the packages of a run, and its configuration without secrets."""

import dataclasses
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.io import to_plain

__all__ = ["installed_versions", "is_secret", "plain_config"]

PACKAGES = ("torch", "transformers", "peft", "trl", "datasets", "accelerate")
"""Packages whose version can change a result."""

_SECRET = re.compile(r"(?<!^first_)(token|secret|password|api_?key)s?$", re.IGNORECASE)
"""`first_token`, an argument of SMILE, is not a secret."""
_LIMIT = re.compile(r"(^|_)(max|min|num)_(\w+_)?tokens?$")
"""Numbers of tokens are not secrets."""


def is_secret(name: str, value: object) -> bool:
    """Whether a setting must not be written down."""
    name = name.lstrip("-").replace("-", "_")
    if not isinstance(value, str) or (_LIMIT.search(name) and value.isdecimal()):
        return False
    return _SECRET.search(name) is not None


def installed_versions() -> dict[str, str]:
    """Versions of all packages that can change a result, read without importing them."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, "hf_captionrl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    revision = _git_revision(Path(__file__).resolve().parents[1])
    if revision:
        versions["git_revision"] = revision
    return versions


def _git_revision(package: Path) -> str | None:
    """Revision of the checkout whose top folder holds `package`; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # In a .venv inside another repository, git would give the revision of that repository.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.parent:
            return None
        revision = git("rev-parse", "HEAD")
        return revision + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def plain_config(config: Any) -> Any:
    """A configuration for JSON, without secrets; objects that JSON cannot hold become their text."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): plain_config(value) for key, value in config.items() if not is_secret(str(key), value)}
    if isinstance(config, list | tuple):
        return [plain_config(value) for value in config]
    try:
        return to_plain(config)
    except (TypeError, ValueError):
        # A dtype, a device or an infinite limit.
        return str(config)
