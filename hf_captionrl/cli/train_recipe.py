"""A recipe as `captionrl train --json` runs it: `python train_recipe.py SAID RECIPE ARGUMENTS`.

As if the recipe had been called directly; the main process writes the place of the results into the file SAID.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run_recipe(said: str, recipe: str, arguments: Sequence[str]) -> Path | None:
    """Run a recipe in this process."""
    from hf_captionrl.utils.io import write_json

    sys.argv = [recipe, *arguments]  # the manifest says how the recipe was called
    spec = importlib.util.spec_from_file_location(Path(recipe).stem, recipe)
    if spec is None or spec.loader is None:
        raise ValueError(f"{recipe!r} is not a Python file. Use a recipe, such as recipes/smile_blip.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their annotations there
    spec.loader.exec_module(module)
    found: Path | None = module.main(list(arguments))
    if os.environ.get("RANK", "0") == "0":
        write_json(said, {"results": None if found is None else str(found)})
    return found


if __name__ == "__main__":
    if not sys.flags.safe_path:  # else this file's folder, whose `metrics.py` and others would hide packages
        del sys.path[0]
    from hf_captionrl.utils.console import run_main

    run_main(lambda: run_recipe(sys.argv[1], sys.argv[2], sys.argv[3:]), Path(sys.argv[2]).name)
