"""Finished folders, as written by a recipe."""

import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hf_captionrl.hub import write_manifest, write_model_card
from hf_captionrl.utils.io import write_json
from tests.hub.test_cards import FACTS, make_results
from tests.tiny import tiny_captioner


def complete(folder, captioner, model_id="smile", **facts):
    """Add card, manifest and results to a saved model."""
    results = make_results()
    changes = {"model_id": model_id, "family": captioner.family, "prompt": captioner.prompt, **facts}
    write_model_card(folder, results, replace(FACTS, **changes))
    write_manifest(
        folder,
        command=["recipe.py", "--seed", "3"],
        seeds={"seed": 3},
        data={"name": "scenes", "revision": None, "fingerprints": {"train": "0123"}},
    )
    write_json(Path(folder) / "results.json", results)
    return Path(folder)


def publishable(folder, family="blip", captioner=None, **facts):
    """A tiny captioner with all published files."""
    if captioner is not None or facts:
        captioner = captioner or tiny_captioner(family)
        captioner.save_pretrained(folder)
        return complete(folder, captioner, **facts)
    made = Path(_made().name) / family
    if not made.exists():
        captioner = tiny_captioner(family)
        captioner.save_pretrained(made)
        complete(made, captioner)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return Path(folder)


@functools.cache
def _made():
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory()
