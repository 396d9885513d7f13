"""Which settings a result was made with: a digest per preset, to see that a preset changed afterwards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import load_row, read_yaml

UNKNOWN = "unknown"
IGNORED = {"title", "output_dir", "paper", "learning_curves", "gallery_size", "disable_tqdm", "logging_steps"} | {
    "dataloader_pin_memory",
    "per_device_eval_batch_size",
}
"""Settings that change no number of a result; `paper` and `learning_curves` add some."""


def presets_of(preset: str, *commands: str) -> list[str]:
    """The presets of a run: its own and those that its commands name; none of a command that has no preset."""
    named = [preset] if "/" in preset else []
    for command in commands:
        named += re.findall(r"--row ([\w./-]+)", command)
        named += re.findall(r"--config recipes/configs/([\w/-]+)\.yaml", command)
    return list(dict.fromkeys(named))


def settings_in(configs: Path, preset: str) -> dict[str, Any]:
    """The settings of a preset in a folder of configurations."""
    base = configs / f"{preset}.yaml"
    return read_yaml(base) if base.is_file() else load_row(configs, preset).settings


def digest(settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the settings that matter to a result, in any order."""
    kept = {key: value for key, value in settings.items() if key not in IGNORED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def digests(presets: list[str], configs: Path) -> dict[str, str]:
    """The digest of each preset, for a result's key `settings`."""
    return {preset: digest(settings_in(configs, preset)) for preset in presets}


def changed(record: Mapping[str, Any], presets: list[str], configs: Path) -> dict[str, str]:
    """Presets of a result that are not as they were: "stale", or "unknown" where the result does not say."""
    made = record.get("settings", {})
    now = digests(presets, configs)
    return {
        preset: UNKNOWN if made.get(preset, UNKNOWN) == UNKNOWN else "stale"
        for preset in presets
        if made.get(preset) != now[preset]
    }
