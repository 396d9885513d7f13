"""Adds ClipCap's code to a checkpoint, for users without this package.

transformers then loads the folder with `trust_remote_code=True`. A program that imports hf_captionrl uses its classes and
runs no code from the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_captionrl.io import atomic_write_text, write_json
from hf_captionrl.models import clipcap

__all__ = ["AUTO_MAPS", "MODULES", "export_code"]

AUTO_MAPS: dict[str, dict[str, str]] = {
    "config.json": {
        "AutoConfig": "configuration_clipcap.ClipCapConfig",
        "AutoModelForImageTextToText": "modeling_clipcap.ClipCapForConditionalGeneration",
    },
    "processor_config.json": {"AutoProcessor": "processing_clipcap.ClipCapProcessor"},
}
MODULES = ("configuration_clipcap", "modeling_clipcap", "processing_clipcap")


def export_code(folder: Path) -> list[Path]:
    """Write the code, and add it to the `auto_map` of the configurations."""
    configs: dict[Path, dict[str, Any]] = {}
    for name, auto_map in AUTO_MAPS.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} has no {name}. Save the model and its processor there first.")
        configs[path] = {**json.loads(path.read_text(encoding="utf-8")), "auto_map": auto_map}
    model_type = configs[folder / "config.json"].get("model_type")
    if model_type != "clipcap":
        raise ValueError(
            f"{folder} has a model of type {model_type!r}, not 'clipcap'. Use --with_code only for ClipCap."
        )
    source = Path(str(clipcap.__file__)).parent
    for module in MODULES:
        atomic_write_text(folder / f"{module}.py", (source / f"{module}.py").read_text(encoding="utf-8"))
    for path, config in configs.items():
        write_json(path, config)
    return [*(folder / f"{module}.py" for module in MODULES), *configs]
