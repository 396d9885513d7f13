"""The shipped adapters of the embedded world: a recipe's LoRA, taken out of the folder that the recipe leaves.

Called by `scripts/train_scenes_models.py adapter`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_captionrl.utils.io import write_json

ROOT = Path(__file__).resolve().parents[2]
BASE = "blip-mle"
ADAPTERS = {"blip-smile": ("smile_blip", "smile/scenes/lora"), "blip-sr": ("self_retrieval_blip", "ndlb/scenes/lora")}
"""Names, and the recipe and row of each."""

_SHIPPED = (
    *("adapter_config.json", "adapter_model.safetensors", "captioner.json"),
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json"),
)


def train_adapter(name: str, seed: int, checkpoints: Path) -> dict[str, Any]:
    """Run the recipe and keep its adapter."""
    recipe, row = ADAPTERS[name]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"recipes/{recipe}.py", "--row", row, "--seed", str(seed)]
        # One thread, so that the result is the same everywhere.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--output_dir", folder], check=True, cwd=ROOT, env=environment)
        keep_adapter(Path(folder) / "model", checkpoints / name)
    return {
        "stage": "adapter",
        "name": name,
        "seed": seed,
        "base_model": BASE,
        "recipe": f"recipes/{recipe}.py --row {row}",
        "seconds": round(time.perf_counter() - start),
    }


def keep_adapter(source: Path, target: Path) -> None:
    """Copy an adapter beside its base model, and let it say so."""
    target.mkdir(parents=True, exist_ok=True)
    for file in _SHIPPED:
        shutil.copyfile(source / file, target / file)
    config = json.loads((target / "adapter_config.json").read_text(encoding="utf-8"))
    # The package may lie anywhere, so the base model is found from the adapter's own folder.
    config["base_model_name_or_path"] = f"../{BASE}"
    write_json(target / "adapter_config.json", config)
