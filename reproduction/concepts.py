"""Self-retrieval by concept: do captions stop saying what differs between the views of a thing?

    python reproduction/concepts.py --output reproduction/results/concepts.json

A concept is a scene in three views, whose position and background differ. From `scenes:blip-mle`, with the settings of
`self_retrieval_blip/scenes` and random distractors, one run rewards captions by image and one by concept, on the same images.
reproduction/predictions.md holds what was expected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, load_captioner, load_scorer
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.recall import self_retrieval
from hf_captionrl.scenes import Scene, check, render_scene, sample_scene
from hf_captionrl.scenes.grammar import ANNOTATORS, annotate
from hf_captionrl.scenes.world import BACKGROUNDS, POSITIONS, has_possible_colours
from hf_captionrl.utils.io import installed_versions, write_json
from hf_captionrl.utils.model_files import model_path
from reproduction.measurements import difference, seed_interval
from reproduction.runs import CONFIGS, hardware, settings_in, world_version

START, VIEWS, CONCEPTS = "scenes:blip-mle", 3, {"train": 600, "test": 100}
DIFFERENT, EQUAL = ("position", "background"), ("kind", "count", "size", "second", "colour")


def views(rng: np.random.Generator) -> list[Scene]:
    """A thing in places and before backgrounds that all differ."""
    while True:
        scene = sample_scene(rng)
        rows, colours = rng.permutation(POSITIONS), rng.permutation(BACKGROUNDS)[:VIEWS]
        facts = [replace(scene.facts, position=str(a), background=str(b)) for a, b in zip(rows, colours, strict=True)]
        scenes = [Scene(one, scene.column, int(rng.integers(2**31))) for one in facts]
        cells = [cell for cell in (one.second_cell() for one in scenes) if cell is not None]
        # A second object above or below leaves the picture in some rows; nothing has the colour of its background.
        if all(0 <= row < len(POSITIONS) for row, _ in cells) and all(map(has_possible_colours, facts)):
            return scenes


def make_split(name: str, seed: int) -> datasets.Dataset:
    """Views with their concept, and the captions of all annotators."""
    rng, rows = np.random.default_rng((seed, *name.encode())), list[dict[str, Any]]()
    for concept in range(CONCEPTS[name]):
        for number, scene in enumerate(views(rng)):
            texts = [annotate(rng, scene.facts, annotator) for annotator in ANNOTATORS]
            row = {"image": render_scene(scene), "image_id": f"{name}-{concept}-{number}", "concept": str(concept)}
            rows.append(row | {"captions": texts, "facts": scene.facts.to_dict()})
    return datasets.Dataset.from_list(rows)


def numbers(captions: Sequence[str], test: datasets.Dataset, scorer: Any) -> dict[str, float]:
    """R@1 by image, by concept and of another view, shares of right facts that are stated, and of wrong claims."""
    text, images = scorer.text_features(spoken(captions)).cpu(), scorer_features(scorer, test)
    checks = [check(caption, facts) for caption, facts in zip(captions, test["facts"], strict=True)]
    claims = [*(claim for one in checks for claim in one.wrong), *(claim for one in checks for claim in one.right)]
    shares = {"different": DIFFERENT, "equal": EQUAL}
    result = {
        name: float(np.mean([fact in one.recalled for one in checks for fact in facts]))
        for name, facts in shares.items()
    }
    result["wrong"] = sum(len(one.wrong) for one in checks) / max(len(claims), 1)
    result["words"] = float(np.mean([len(caption.split()) for caption in captions]))
    result["image_recall_at_1"] = self_retrieval(text, images)["recall_at_1"]
    result["concept_recall_at_1"] = self_retrieval(text, images, concepts=test["concept"][:])["recall_at_1"]
    # Another view of the same thing, alone among the images of other things.
    scores, things, hits = text @ images.T, np.array(test["concept"][:]), list[bool]()
    for row, line in enumerate(scores):
        best = float(line[torch.from_numpy(things != things[row])].max())
        hits += [float(line[view]) > best for view in np.flatnonzero(things == things[row]) if view != row]
    return result | {"other_view_recall_at_1": float(np.mean(hits))}


def run(seed: int) -> dict[str, Any]:
    """Numbers of the start and of the two runs of a seed, and their captions."""
    train, test = make_split("train", seed), make_split("test", seed)
    held_out = load_scorer(model_path("scenes:siglip-held-out"))
    preset = settings_in(CONFIGS, "self_retrieval_blip/scenes")
    names = preset.keys() & SelfRetrievalConfig.__dataclass_fields__.keys() - {"bag_schedule"}
    more = {"seed": seed, "eval_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    rows, captions = {}, {}
    for name, data in (("start", None), ("by image", train.remove_columns("concept")), ("by concept", train)):
        with tempfile.TemporaryDirectory() as folder:
            args = SelfRetrievalConfig(
                **{n: preset[n] for n in names} | {"output_dir": folder, "use_cpu": True} | more
            )
            scorer, model = load_scorer(model_path("scenes:clip-reward")), load_captioner(model_path(START))
            trainer = SelfRetrievalTrainer(model, scorer, args, train if data is None else data)
            if data is not None:
                trainer.train()
            captions[name] = trainer.generate_captions(test)
        rows[name] = numbers(captions[name], test, held_out)
    return {"seed": seed, "rows": rows, "captions": {"image_id": test["image_id"][:], **captions}}


def main() -> None:
    """Run the seeds and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = [run(seed) for seed in args.seeds]
    cells = {
        name: {key: [one["rows"][name][key] for one in runs] for key in row} for name, row in runs[0]["rows"].items()
    }
    gains = {}
    for key in cells["start"]:
        gain = difference(*(seed_interval(cells[name][key]) for name in ("by concept", "by image")))
        gains[key] = {"mean": gain.value, "interval": [gain.low, gain.high], "values": gain.values}
    record = {
        "command": "python reproduction/concepts.py",
        "seeds": args.seeds,
        "rows": cells,
        "by concept minus by image": gains,
    }
    record |= {"captions": [one["captions"] for one in runs], "versions": installed_versions(), "hardware": hardware()}
    write_json(args.output, record | {"world": world_version()})


if __name__ == "__main__":
    main()
