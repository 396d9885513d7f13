"""Merges an adapter into its base model, for users who do not have the base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from hf_captionrl.io import write_json

__all__ = ["write_merged"]

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def write_merged(folder: str | Path, target: str | Path, names: Sequence[str]) -> None:
    """Write a folder with the merged model, and the adapter in `adapter/`."""
    from hf_captionrl.captioners import load_captioner

    folder, target = Path(folder), Path(target)
    for name in names:
        place = target / "adapter" / name if name in _ADAPTER else target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, place)
    captioner = load_captioner(str(folder))
    captioner.model = captioner.model.merge_and_unload()
    captioner.save_pretrained(target)
    # The base model was a local folder: keep only its name.
    path = target / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = Path(config.get("base_model_name_or_path") or "").name
    write_json(path, config)
