"""`captionrl env`: what is installed, for a report of a fault."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

from hf_captionrl.utils.options import CommandOptions


@dataclass
class EnvOptions(CommandOptions):
    """Print versions, devices, caches and optional parts. Exits with 1 if a package that is needed is missing or has another version."""

    examples: ClassVar[str] = """
        examples:
          captionrl env
          captionrl env --json
    """


def report(options: EnvOptions) -> None:
    """Print the report."""
    import torch
    from huggingface_hub import constants
    from packaging.requirements import Requirement

    from hf_captionrl.retrieval.feature_cache import default_cache_dir

    versions: dict[str, str] = {"hf-captionrl": metadata.version("hf-captionrl")}
    faults = []
    for line in metadata.requires("hf-captionrl") or []:
        package = Requirement(line)
        is_needed = package.marker is None or package.marker.evaluate({"extra": ""})
        try:
            versions[package.name] = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            extra = str(package.marker).rpartition("extra == ")[2].strip("\"'")
            remedy = (
                f"pip install '{package.name}{package.specifier}'"
                if is_needed
                else f"pip install 'hf-captionrl[{extra}]'"
            )
            versions.setdefault(package.name, f"not installed ({remedy})")
            faults += [package.name] * is_needed
            continue
        if is_needed and not package.specifier.contains(versions[package.name], prereleases=True):
            versions[package.name] += f", but needed: {package.specifier}"
            faults.append(package.name)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    places = {"feature cache": str(default_cache_dir()), "Hub cache": constants.HF_HUB_CACHE}
    places |= {name: shutil.which(name) or "not found" for name in ("java", "chromium")}
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": gpus or ["CPU"],
    }
    facts |= {"offline": constants.HF_HUB_OFFLINE, "places": places, "packages": versions}
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        rows = {**{name: facts[name] for name in ("python", "platform", "devices", "offline")}, **places, **versions}
        print(
            "\n".join(
                f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in rows.items()
            )
        )
    if faults:
        raise RuntimeError(f"missing or of another version: {', '.join(faults)}.")
