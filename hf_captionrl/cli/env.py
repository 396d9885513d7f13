"""`captionrl env`: what is installed, for a report of a fault."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

from hf_captionrl.utils.options import CommandOptions, option


@dataclass
class EnvOptions(CommandOptions):
    """Print versions, devices, caches and optional parts. Exits with 1 if a package that is needed is missing or has another version."""

    examples: ClassVar[str] = """
        examples:
          captionrl env
          captionrl env --json --scorer scenes:clip-reward
    """

    scorer: str | None = option(None, metavar="NAME", help="show also how this scorer reads captions")


def report(options: EnvOptions) -> None:
    """Print the report."""
    import torch
    from huggingface_hub import constants
    from packaging.requirements import Requirement

    from hf_captionrl.retrieval.feature_cache import default_cache_dir
    from hf_captionrl.retrieval.scorer import load_scorer

    versions: dict[str, str] = {"hf-captionrl": metadata.version("hf-captionrl")}
    faults = []
    for package in map(Requirement, metadata.requires("hf-captionrl") or []):
        is_needed = package.marker is None or package.marker.evaluate({"extra": ""})
        try:
            versions[package.name] = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            extra = str(package.marker).rpartition("extra == ")[2].strip("\"'")
            name = f"{package.name}{package.specifier}" if is_needed else f"hf-captionrl[{extra}]"
            versions.setdefault(package.name, f"not installed (pip install '{name}')")
            faults += [package.name] * is_needed
            continue
        if is_needed and not package.specifier.contains(versions[package.name], prereleases=True):
            versions[package.name] += f", but needed: {package.specifier}"
            faults.append(package.name)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    places = {"feature cache": str(default_cache_dir()), "Hub cache": constants.HF_HUB_CACHE}
    places |= {name: shutil.which(name) or "not found" for name in ("java", "chromium")}
    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {"devices": ", ".join(gpus) or "CPU", "offline": constants.HF_HUB_OFFLINE}
    if options.scorer is not None:
        scorer: Any = load_scorer(options.scorer)
        text = scorer.canonical_text or "as written, for the tokenizer to normalise"
        facts |= {"scorer": scorer.signature, "tokens read": scorer.max_text_tokens, "canonical text": text}
    if options.json:
        print(json.dumps(facts | {"places": places, "packages": versions}, indent=1))
    else:
        print("\n".join(f"- {name}: {value}" for name, value in {**facts, **places, **versions}.items()))
    if faults:
        raise RuntimeError(f"missing or of another version: {', '.join(faults)}.")
