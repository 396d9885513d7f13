"""SMILE by dose: captions after few steps, greedy and with 3 beams. reproduction/predictions.md holds what was expected.

    python reproduction/dose.py scenes --starts clipcap blip --runs_dir outputs/dose --output reproduction/results/dose_scenes.json
    python reproduction/dose.py photographs --starts mle-400 --data DATA --output reproduction/results/dose_photographs.json
    python reproduction/dose.py controls --data DATA --output reproduction/results/dose_controls.json

runs what is missing, one file per start, lambda and seed, and puts these together. Lambda 1 is the MLE control of equal captions. A start is a
shipped captioner, a decoder from scratch after epochs of MLE (`epochs-8`; `omission-random_40` on captions of omission.py), or DATA/starts/NAME-SEED.
DATA also holds dataset_flickr8k.json, images/ and two scorers, reward/ and held-out/. The reward scorer's R@1 on validation images selects a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import SmileConfig, SmileTrainer, load_captioner, load_scenes, load_scorer
from hf_captionrl.apps.experiments.arguments import ModelArguments
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data.loading import load_caption_splits
from hf_captionrl.evaluation.evaluator import draw_references
from hf_captionrl.metrics import paired_test
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.suites import SuiteRow
from hf_captionrl.scenes import Facts, bags, check
from hf_captionrl.utils.io import atomic_write_text, installed_versions, write_json
from hf_captionrl.utils.model_files import model_path
from reproduction import ROOT, omission
from reproduction.measurements import difference, seed_interval
from reproduction.run_seeds import aggregate, aggregate_curves
from reproduction.runs import CONFIGS, digests, hardware, settings_in, world_version

BEAMS = {1: "greedy", 3: "3 beams"}
HELD_OUT, REWARD, TRUTH = "rd100_recall_at_1", "reward_rd100_recall_at_1", "bag_7_truth_recall_at_1"
SHIPPED = {"clipcap": "scenes:clipcap-mle", "blip": "scenes:blip-mle"}
PRESETS = {"scenes": "smile_blip/scenes", "photographs": "smile_blip/flickr8k"}
STEPS = {"scenes": (5, 10, 20, 40, 80, 158), "photographs": (*range(2, 17, 2), *range(20, 51, 5))}
CHANGES: dict[str, dict[str, Any]] = {"scenes": {}, "photographs": {"max_steps": 50, "lr_scheduler_type": "constant"}}
NUM_IMAGES = {"validation": 300, "test": 1000}


class World:
    """Images, two scorers, and what these say of captions."""

    def __init__(self, data: Path | None) -> None:
        self.data, self.name = data, "photographs" if data else "scenes"
        if data is None:
            splits, names = load_scenes(), ["scenes:siglip-held-out", "scenes:clip-reward"]
        else:
            splits = load_caption_splits(str(data / "dataset_flickr8k.json"), image_root=str(data / "images"))
            names = [str(data / "held-out"), str(data / "reward")]
        self.splits = {"train": splits["train"]} | {
            name: splits[name].select(range(n)) for name, n in NUM_IMAGES.items()
        }
        self.scorers = {
            key: load_scorer(model_path(name)) for key, name in zip((HELD_OUT, REWARD), names, strict=True)
        }
        self.features = {
            (key, split): scorer_features(scorer, self.splits[split])
            for key, scorer in self.scorers.items()
            for split in NUM_IMAGES
        }

    def numbers(self, captions: Sequence[str], split: str) -> dict[str, Any]:
        """Numbers of the captions of a split; `samples`: R@1 among 100 of each image by scorer."""
        rows, keys = self.splits[split], ["length", "cider_d", "unmentioned_objects"]
        more: dict[str, Any] = {"references": list(rows["captions"])}
        if self.data is None:
            keys[2:] = ["hallucination", "fact_recall", *[TRUTH] * (split == "test")]
            more |= {"facts": list(rows["facts"]), "check": check}
            more["bags"] = {7: bags(list(rows["bag_id"]), 7)} if split == "test" else {}
        found = SuiteRow(captions=captions, **more).compute(*keys).numbers
        numbers: dict[str, Any] = {key: found[key] for key in keys} | {"samples": {}}
        for key, scorer in self.scorers.items():
            texts, images = scorer.text_features(spoken(captions)).cpu(), self.features[key, split]
            row = SuiteRow(captions=captions, text_features=texts, image_features=images).compute(HELD_OUT)
            numbers[key], numbers["samples"][key] = row.numbers[HELD_OUT], row.per_sample[HELD_OUT].round(4).tolist()
        return numbers

    def trainer(self, model: Any, train: Any, folder: str, callbacks: Any = None, **changes: Any) -> SmileTrainer:
        """A trainer with the settings of the world's preset."""
        fields = {field.name for field in dataclasses.fields(SmileConfig)}
        settings = {key: value for key, value in settings_in(CONFIGS, PRESETS[self.name]).items() if key in fields}
        settings |= {
            "output_dir": folder,
            "eval_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
        }
        return SmileTrainer(
            model, SmileConfig(**settings | {"disable_tqdm": True} | changes), train, callbacks=callbacks
        )

    def start(self, name: str, seed: int, runs_dir: Path) -> tuple[str, Any]:
        """The folder of a start, and its training data; a decoder from scratch is trained as in the rows scenes/weak-start-*."""
        train, folder = self.splits["train"], runs_dir / "starts" / f"{name}-{seed}"
        if self.data is not None:
            return str(self.data / "starts" / folder.name), train
        if name in SHIPPED:
            return model_path(SHIPPED[name]), train
        kind, value = name.split("-")
        if kind == "omission":
            rng = np.random.default_rng(0)
            texts = [omission.captions(rng, Facts(**facts))[value] for facts in train["facts"]]
            train = train.remove_columns("captions").add_column("captions", texts)
        if not (folder / "config.json").exists():
            set_seed(seed)
            fresh = ModelArguments(model_path(SHIPPED["blip"]), fresh_language_model=True).load()
            settings = {
                "num_train_epochs": 20 if kind == "omission" else int(value),
                "learning_rate": 1e-3,
                "mle_weight": 1.0,
            }
            trainer = self.trainer(fresh, train, str(folder), seed=seed, **settings)
            trainer.train()
            trainer.save_model()
        return str(folder), train

    def run(self, start: str, weight: float | None, seed: int, runs_dir: Path) -> dict[str, Any]:
        """Captions and numbers by step, decoding and split; without a weight, those of the start."""
        points: list[dict[str, Any]] = []
        best: dict[int, tuple[float, int, Any]] = {}

        def judge(step: int, beams: int, split: str) -> None:
            captions = trainer.generate_captions(self.splits[split], num_beams=beams)
            points.append(
                {"step": step, "beams": beams, "split": split, **self.numbers(captions, split), "captions": captions}
            )

        class Judge(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step = state.global_step
                for beams in BEAMS if step in steps else ():
                    judge(step, beams, "validation")
                    if scenes:
                        judge(step, beams, "test")
                    elif (
                        beams not in best or points[-1][REWARD] > best[beams][0]
                    ):  # of photographs, only the selected step is tested
                        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
                        best[beams] = (points[-1][REWARD], step, weights)

        steps, scenes = STEPS[self.name], self.data is None
        folder, train = self.start(start, seed, runs_dir)
        with tempfile.TemporaryDirectory() as temporary:
            captioner, settings = (
                load_captioner(folder, dtype=torch.float32),
                {"mle_weight": weight or 0.0, "seed": seed},
            )
            trainer = self.trainer(captioner, train, temporary, [Judge()], **settings, **CHANGES[self.name])
            if weight is None:
                for beams in BEAMS:
                    judge(0, beams, "validation")
                    judge(0, beams, "test")
            else:
                trainer.train()
            for beams, (_, step, weights) in best.items():
                trainer.model.load_state_dict(weights)
                judge(step, beams, "test")
        return {"points": points, "versions": installed_versions()}


def selected(points: Sequence[dict[str, Any]], *decodings: int) -> dict[str, Any]:
    """The test point of the step and decoding with the best R@1 by the reward scorer on validation images."""
    best = max(
        (p for p in points if p["split"] == "validation" and p["beams"] in decodings), key=lambda point: point[REWARD]
    )
    return next(p for p in points if p["split"] == "test" and (p["step"], p["beams"]) == (best["step"], best["beams"]))


def summary(
    cells: dict[tuple[Any, ...], Path], seeds: Sequence[int], captions: Path, curves_of: str
) -> dict[str, Any]:
    """Curves, selected steps, and gains over the start's better decoding: paired by seed, with one seed image by image."""
    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = [{} for _ in seeds]
    points_of = {cell: json.loads(path.read_text("utf-8"))["points"] for cell, path in cells.items()}
    for start, weight in dict.fromkeys(cell[:2] for cell in cells):
        runs = [points_of[start, weight, seed] for seed in seeds]
        first = [points_of[start, None, seed] for seed in seeds]
        before = [selected(points, *BEAMS) for points in first]
        for beams, decoding in BEAMS.items():
            name = f"{start}, {decoding}" if weight is None else f"{start}, lambda {weight:g}, {decoding}"
            after = [selected(points, beams) for points in runs]
            gains = {}
            for key in (key for key, value in after[0].items() if isinstance(value, float)):
                pair = [seed_interval([point[key] for point in points]) for points in (after, before)]
                gain = difference(*pair)
                gains[key] = {"mean": gain.value, "interval": [gain.low, gain.high], "values": gain.values}
                if len(seeds) == 1 and key in after[0]["samples"]:
                    test = paired_test(after[0]["samples"][key], before[0]["samples"][key])
                    gains[key] |= {"interval": list(test["interval"]), "p_value": test["p_value"]}
            rows += [{**aggregate([[{**point, "name": name}] for point in after])[0], "gain": gains}]
            for curve, points in zip(curves, runs, strict=True):
                curve[name] = [p for p in points if (p["beams"], p["split"]) == (beams, curves_of)]
        for seed, points in zip(seeds, runs, strict=True):
            shown = [selected(points, beams) for beams in BEAMS]
            lines = ["\t".join(f"{BEAMS[point['beams']]}, step {point['step']}" for point in shown)]
            lines += map("\t".join, zip(*(point["captions"] for point in shown), strict=True))
            name = f"{start}_start_{seed}" if weight is None else f"{start}_lambda-{weight:g}_{seed}"
            atomic_write_text(captions / f"{name}.txt", "\n".join(lines) + "\n")
    return {"rows": rows, "learning_curves": aggregate_curves(curves), "curves_of": curves_of, "seeds": list(seeds)}


def controls(world: World) -> dict[str, Any]:
    """R@1 of a human caption, of two joined, and of one with a sentence of the nearest look-alike, by each scorer."""
    drawn = draw_references(list(world.splits["test"]["captions"]), 0)
    similarity: Any = sum(world.features[key, "test"] @ world.features[key, "test"].T for key in world.scorers)
    nearest = similarity.fill_diagonal_(-9).argmax(1).tolist()
    second = {"two joined": [texts[1] for texts in drawn], "with the look-alike's": [drawn[i][0] for i in nearest]}
    one = world.numbers([texts[0] for texts in drawn], "test")
    rows = [{"name": "one", **one}]
    for name, more in second.items():
        row = world.numbers([f"{a[0].rstrip(' .')}. {b}" for a, b in zip(drawn, more, strict=True)], "test")
        tests = {f"{key}_against_one": paired_test(row["samples"][key], one["samples"][key]) for key in world.scorers}
        rows.append({"name": name, **row, **tests})
    return {"rows": [{key: value for key, value in row.items() if key != "samples"} for row in rows]}


def main() -> None:
    """Run what is missing, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenes", "photographs", "controls"])
    parser.add_argument("--starts", nargs="+", default=["clipcap", "blip"])
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.0, 1.0, 0.05, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="of photographs")
    parser.add_argument("--runs_dir", type=Path, default=ROOT / "outputs" / "dose")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    chosen = [
        (start, weight, seed) for seed in args.seeds for start in args.starts for weight in (None, *args.lambdas)
    ]
    folders = {None: "start"} | {weight: f"lambda-{weight:g}" for weight in args.lambdas}
    cells = {one: args.runs_dir / args.what / one[0] / folders[one[1]] / f"seed-{one[2]}.json" for one in chosen}
    missing = [] if args.what == "controls" else [one for one, path in cells.items() if not path.exists()]
    world = World(args.data) if missing or args.what == "controls" else None
    for one in missing:
        write_json(cells[one], world.run(*one, args.runs_dir))
        print(cells[one], flush=True)
    if args.output is None:
        return
    if args.what == "controls":
        record = controls(world)
    else:
        split = "test" if args.what == "scenes" else "validation"
        record = summary(cells, args.seeds, args.output.parent / "dose_captions", split)
        record["settings"] = digests([PRESETS[args.what]], CONFIGS)
    words = ["DATA" if word == str(args.data) else word for word in sys.argv[1:]]
    record |= {"command": " ".join(["python reproduction/dose.py", *words]), "versions": installed_versions()}
    write_json(args.output, record | {"hardware": hardware(), "world": world_version()})


if __name__ == "__main__":
    main()
