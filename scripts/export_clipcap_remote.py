"""Put the code of ClipCap beside a checkpoint, for people who do not have this package.

    python scripts/export_clipcap_remote.py FOLDER

FOLDER is one that `save_pretrained` wrote, with the processor in it. Afterwards, transformers alone loads it with
`trust_remote_code=True`; where hf_captionrl is imported, its own classes are used and nothing in the folder is run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_captionrl.io import atomic_write_text, write_json
from hf_captionrl.models import clipcap

AUTO_MAPS: dict[str, dict[str, str]] = {
    "config.json": {
        "AutoConfig": "configuration_clipcap.ClipCapConfig",
        "AutoModelForImageTextToText": "modeling_clipcap.ClipCapForConditionalGeneration",
    },
    "processor_config.json": {"AutoProcessor": "processing_clipcap.ClipCapProcessor"},
}
MODULES = ("configuration_clipcap", "modeling_clipcap", "processing_clipcap")


def export(folder: Path) -> list[Path]:
    """Write the code, and name it in the configurations.

    Args:
        folder (`pathlib.Path`): With `config.json` and `processor_config.json` of a ClipCap.

    Returns:
        `list[pathlib.Path]`: What was written.

    Raises:
        ValueError: If a configuration is missing, or the model is no ClipCap.
    """
    configs: dict[Path, dict[str, Any]] = {}
    for name, auto_map in AUTO_MAPS.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} has no {name}. Save the model and its processor there first.")
        configs[path] = {**json.loads(path.read_text(encoding="utf-8")), "auto_map": auto_map}
    model_type = configs[folder / "config.json"].get("model_type")
    if model_type != "clipcap":
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}, not 'clipcap'. Only ClipCap's code is exported."
        )
    source = Path(str(clipcap.__file__)).parent
    for module in MODULES:
        atomic_write_text(folder / f"{module}.py", (source / f"{module}.py").read_text(encoding="utf-8"))
    for path, config in configs.items():
        write_json(path, config)
    return [*(folder / f"{module}.py" for module in MODULES), *configs]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a ClipCap checkpoint with its processor")
    for path in export(parser.parse_args(argv).folder):
        print(path)


if __name__ == "__main__":
    main()
