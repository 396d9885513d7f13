"""Finished folders, as written by a recipe."""

import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hf_captionrl.hub import ModelCardFacts, write_manifest, write_model_card
from hf_captionrl.utils.io import write_json
from tests.tiny import tiny_captioner

FACTS = ModelCardFacts(
    model_id="someone/blip-smile",
    base_model="Salesforce/blip-image-captioning-base",
    family="blip",
    dataset="scenes",
    dataset_description="5,000 training, 500 validation and 1,000 test images.",
    objective="smile",
    scorer="siglip-held-out @ 1f2e (float32)",
    scorer_max_text_tokens=77,
    generation={"num_beams": 3, "max_new_tokens": 12},
    row="SMILE",
    license="bsd-3-clause",
    truncated_fraction=0.0125,
)


def make_row(name, **changes):
    row = {
        "name": name,
        "length": 11.0,
        "lexical_diversity": 0.11,
        "pool_recall_at_1": 0.2,
        "pool_recall_at_5": 0.4,
        "rd100_recall_at_1": 0.658,
        "rd100_recall_at_1_ci": [0.637, 0.679],
        "rd100_recall_at_5": 0.9,
        "clip_score": 0.75,
        "perplexity": 12.0,
        "cider_d": 1.48,
        "hallucination": 0.325,
        "fact_recall": 0.76,
    }
    return {**row, **changes}


def make_results(**changes):
    before = make_row("MLE", rd100_recall_at_1=0.528, rd100_recall_at_1_ci=None, hallucination=0.065)
    return {"rows": [before, make_row("SMILE", **changes)], "seed": 3, "config": {}, "versions": {"torch": "2.15"}}


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
