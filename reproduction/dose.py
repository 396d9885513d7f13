"""SMILE by dose: captions after few steps, greedy and with 3 beams. reproduction/predictions.md holds what was expected.

    python reproduction/dose.py scenes --starts clipcap blip epochs-8 omission-random_40 --output reproduction/results/dose_scenes.json
    python reproduction/dose.py photographs --starts mle-400 --data DATA --output reproduction/results/dose_photographs.json
    python reproduction/dose.py controls --data DATA --output reproduction/results/dose_controls.json

runs what is missing, one file per start, lambda (1: MLE of equal captions) and seed, and puts these together. R@1 by the reward scorer on validation
images selects a step. DATA: dataset_flickr8k.json, images/, starts/NAME-SEED, and the scorers reward/ and held-out/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import SmileConfig, SmileTrainer, load_scenes, load_scorer
from hf_captionrl.apps.experiments.arguments import ModelArguments
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data.loading import load_caption_splits
from hf_captionrl.evaluation.evaluator import draw_references
from hf_captionrl.metrics import paired_test
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.suites import SuiteRow
from hf_captionrl.scenes import Facts, bags, check
from hf_captionrl.trainers.policy import autocast
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
DENSE, SPARSE = (*range(2, 17, 2), *range(20, 51, 5)), (8, 25, 50)
STEPS = {  # of each decoding; on photographs, three beams cost three times as much; lambdas above 0 are compared at SPARSE, and 1 greedily
    "scenes": dict.fromkeys(BEAMS, (5, 10, 20, 40, 80, 158)),
    "photographs": {1: DENSE, 3: (4, 8, 16, 25, 50)},
}
CHANGES: dict[str, dict[str, Any]] = {
    "scenes": {},
    "photographs": {
        "max_steps": 50,
        "lr_scheduler_type": "constant",
        # In bf16 on a CPU, its backward takes a fifth of the time of SDPA's.
        "model_init_kwargs": {"attn_implementation": "eager"},
    },
}
RATIOS = (1.1, 1.2, 1.3, 1.5, 2.0)
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
        self.splits = {name: rows.select(range(NUM_IMAGES.get(name, len(rows)))) for name, rows in splits.items()}
        self.scorers = dict(zip((HELD_OUT, REWARD), (load_scorer(model_path(name)) for name in names), strict=True))
        pairs = itertools.product(self.scorers, NUM_IMAGES)
        self.features = {pair: scorer_features(self.scorers[pair[0]], self.splits[pair[1]]) for pair in pairs}

    def numbers(self, captions: Sequence[str], split: str) -> dict[str, Any]:
        """Numbers of the captions of a split; `samples`: R@1 among 100 of each image by scorer."""
        rows, keys = self.splits[split], ["length", "cider_d", "unmentioned_objects"]
        more: dict[str, Any] = {"references": list(rows["captions"])}
        if self.data is None:
            keys[2:] = ["hallucination", "fact_recall", *[TRUTH] * (split == "test")]
            more |= {"facts": list(rows["facts"]), "check": check}
            more["bags"] = {7: bags(list(rows["bag_id"]), 7)} if split == "test" else {}
        found = SuiteRow(captions=captions, **more).compute(*keys).numbers
        numbers: dict[str, Any] = {key: found[key] for key in keys} | {"samples": {}, "captions": captions}
        for key, scorer in self.scorers.items():
            texts, images = scorer.text_features(spoken(captions)).cpu(), self.features[key, split]
            row = SuiteRow(captions=captions, text_features=texts, image_features=images).compute(HELD_OUT)
            numbers[key], numbers["samples"][key] = row.numbers[HELD_OUT], row.per_sample[HELD_OUT].round(4).tolist()
        return numbers

    def trainer(self, model: Any, train: Any, folder: str, callbacks: Any = None, **changes: Any) -> SmileTrainer:
        """A trainer with the settings of the world's preset."""
        preset = settings_in(CONFIGS, PRESETS[self.name])
        settings = {name: preset[name] for name in preset.keys() & SmileConfig.__dataclass_fields__.keys()}
        settings |= {"eval_strategy": "no", "save_strategy": "no", "report_to": "none", "use_cpu": True}
        settings |= {"output_dir": folder, "disable_tqdm": True, **changes}
        return SmileTrainer(model, SmileConfig(**settings), train, callbacks=callbacks)

    def start(self, name: str, seed: int, runs_dir: Path) -> tuple[str, Any]:
        """The folder of a start, and its training data; a decoder from scratch is trained as in the rows scenes/weak-start-*."""
        train, folder = self.splits["train"], runs_dir / "starts" / f"{name}-{seed}"
        if self.data is not None or name in SHIPPED:
            return str(self.data / "starts" / folder.name) if self.data else model_path(SHIPPED[name]), train
        kind, value = name.split("-")
        if kind == "omission":
            rng = np.random.default_rng(0)
            texts = [omission.captions(rng, Facts(**facts))[value] for facts in train["facts"]]
            train = train.remove_columns("captions").add_column("captions", texts)
        if not (folder / "config.json").exists():
            set_seed(seed)
            fresh = ModelArguments(model_path(SHIPPED["blip"]), fresh_language_model=True).load()
            settings = {"seed": seed, "num_train_epochs": 20 if kind == "omission" else int(value)}
            trainer = self.trainer(fresh, train, str(folder), learning_rate=1e-3, mle_weight=1.0, **settings)
            trainer.train()
            trainer.save_model()
        return str(folder), train

    def run(self, start: str, weight: float | None, seed: int, runs_dir: Path) -> dict[str, Any]:
        """Captions and numbers by step, decoding and split, without a weight of the start; test photographs at the selected step alone."""
        points: list[dict[str, Any]] = []
        best: dict[int, tuple[float, int, Any]] = {}
        scenes = self.data is None
        few = weight or "learning_rate" in CHANGES[self.name]
        steps = STEPS[self.name] if scenes or not few else {1: SPARSE, 3: () if weight == 1 else SPARSE}
        folder, train = self.start(start, seed, runs_dir)

        def judge(step: int, beams: int, split: str) -> None:
            with autocast(trainer.args):
                captions = trainer.generate_captions(self.splits[split], num_beams=beams)
            numbers = self.numbers(captions, split)
            points.append({"step": step, "beams": beams, "split": split, **numbers})

        class Judge(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                for beams in (b for b in BEAMS if state.global_step in steps[b]):
                    step = state.global_step
                    judge(step, beams, "validation")
                    if scenes:
                        judge(step, beams, "test")
                    elif beams not in best or points[-1][REWARD] > best[beams][0]:
                        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
                        best[beams] = (points[-1][REWARD], step, weights)

        settings = {"mle_weight": weight or 0.0, "seed": seed, **CHANGES[self.name]}
        trainer = self.trainer(folder, train, str(runs_dir / "trainer"), [Judge()], **settings)
        for beams, split in itertools.product(BEAMS, NUM_IMAGES) if weight is None else ():
            judge(0, beams, split)
        if weight is not None:
            trainer.train()
        for beams, (_, step, weights) in best.items():
            trainer.model.load_state_dict(weights)
            judge(step, beams, "test")
        return {"points": points, "versions": installed_versions()}


def selected(points: Sequence[dict[str, Any]], *decodings: int) -> dict[str, Any]:
    """The test point of the step and decoding with the best R@1 by the reward scorer on validation images."""
    allowed = [point for point in points if point["split"] == "validation" and point["beams"] in decodings]
    best = max(allowed, key=lambda point: point[REWARD])
    return next(p for p in points if p["split"] == "test" and (p["step"], p["beams"]) == (best["step"], best["beams"]))


def summary(cells: dict[Any, Path], seeds: Sequence[int], world: str, output: Path) -> dict[str, Any]:
    """Curves, selected steps, and gains over the start's better and same decoding: by seed, with one seed image by image."""
    rows, split = list[dict[str, Any]](), "test" if world == "scenes" else "validation"
    curves: list[dict[str, Any]] = [{} for _ in seeds]
    read = {cell: json.loads(path.read_text("utf-8")) for cell, path in cells.items()}
    for start, weight in dict.fromkeys(cell[:2] for cell in cells):
        runs = [read[start, weight, seed]["points"] for seed in seeds]
        first = [read[start, None, seed]["points"] for seed in seeds]
        before = [selected(points, *BEAMS) for points in first]
        decodings = [beams for beams in BEAMS if all(any(p["beams"] == beams for p in points) for points in runs)]
        for beams in decodings:
            decoding = BEAMS[beams]
            name = f"{start}, {decoding}" if weight is None else f"{start}, lambda {weight:g}, {decoding}"
            after, same = ([selected(points, beams) for points in some] for some in (runs, first))
            (row,) = aggregate([[{**point, "name": name}] for point in after])
            for key in row.keys() - {"name", "step", "beams"}:
                for gain, start_points in (("gain", before), ("gain_same_decoding", same)):
                    found = difference(*(seed_interval([p[key] for p in points]) for points in (after, start_points)))
                    row[key][gain] = {"mean": found.value, "interval": [found.low, found.high], "values": found.values}
                    if len(seeds) == 1 and key in after[0]["samples"]:
                        row[key][gain] |= paired_test(after[0]["samples"][key], start_points[0]["samples"][key])
            rows.append(row)
            for curve, pair in zip(curves, zip(first, runs, strict=True), strict=True):
                curve[name] = [p for points in pair for p in points if (p["beams"], p["split"]) == (beams, split)]
        for seed, points in zip(seeds, runs, strict=True):
            shown = [selected(points, beams) for beams in decodings]
            columns = [[f"{BEAMS[point['beams']]}, step {point['step']}", *point["captions"]] for point in shown]
            file = output / "dose_captions" / "_".join(cells[start, weight, seed].with_suffix(".txt").parts[-3:])
            atomic_write_text(file, "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n")
    revisions = sorted({run["versions"]["git_revision"] for run in read.values()})
    record = {"seeds": list(seeds), "revisions": revisions, "settings": digests([PRESETS[world]], CONFIGS)}
    return record | {"rows": rows, "learning_curves": aggregate_curves(curves)}


def controls(world: World) -> dict[str, Any]:
    """R@1 of a human caption, of two joined, and of one with a sentence of the nearest look-alike, by each scorer."""
    drawn = draw_references(list(world.splits["test"]["captions"]), 0)
    similarity: Any = sum(world.features[key, "test"] @ world.features[key, "test"].T for key in world.scorers)
    nearest = similarity.fill_diagonal_(-9).argmax(1).tolist()
    second = {"two joined": [texts[1] for texts in drawn], "with the look-alike's": [drawn[i][0] for i in nearest]}
    rows = [{"name": "one", **world.numbers([texts[0] for texts in drawn], "test")}]
    for name, more in second.items():
        row = world.numbers([f"{a[0].rstrip(' .')}. {b}" for a, b in zip(drawn, more, strict=True)], "test")
        row["against_one"] = {key: paired_test(row["samples"][key], rows[0]["samples"][key]) for key in world.scorers}
        rows.append({"name": name, **row})
    return {"rows": [{k: value for k, value in row.items() if k not in ("samples", "captions")} for row in rows]}


def by_other_scorers(world: World, folder: Path) -> dict[str, Any]:
    """R@1 of the recorded greedy captions of photographs by the scorers of `world`, and its gain over the start's."""
    rows = list[dict[str, Any]]()
    for first in sorted(folder.glob("dose_captions/mle-400_start_seed-*.txt")):
        start: Any = None
        for path in (
            first,
            *sorted(folder.glob(f"dose_captions/mle-400_lambda-*_{first.stem.rpartition('_')[2]}.txt")),
        ):
            name, *captions = (line.split("\t")[0] for line in path.read_text("utf-8").splitlines())
            numbers = world.numbers(captions, "test")
            rows.append({"file": path.name, "name": name, **{key: numbers[key] for key in world.scorers}})
            start = start or numbers["samples"]
            for key in () if path == first else world.scorers:
                rows[-1][f"{key}_gain"] = paired_test(numbers["samples"][key], start[key])
    return {"rows": rows}


def by_words(folder: Path) -> dict[str, Any]:
    """Where captions `ratio` times as long as the start's stop pure SMILE, and its R@1 there minus the start's, over recorded curves."""
    rows = list[dict[str, Any]]()
    for path in sorted({*folder.glob("dose_*.json")} - {folder / "dose_photographs.json"}):  # of photographs, by seed
        curves = json.loads(path.read_text("utf-8")).get("learning_curves", {})
        for name, curve in curves.items():
            if "lambda 0," in name:
                start, *points = ({key: point[key]["mean"] for key in ("length", HELD_OUT, REWARD)} for point in curve)
                for ratio in RATIOS:
                    long = (n for n, point in enumerate(points) if point["length"] >= ratio * start["length"])
                    at = next(long, len(points) - 1)
                    gains = {key: points[at][key] - start[key] for key in (HELD_OUT, REWARD)}
                    rows.append(
                        {"file": path.name, "name": name, "ratio": ratio, "step": curve[at + 1]["step"], **gains}
                    )
    ratios = list[dict[str, Any]]()
    for ratio in RATIOS:
        gains = {key: [row[key] for row in rows if row["ratio"] == ratio] for key in (HELD_OUT, REWARD)}
        above = sum(min(pair) > 0 for pair in zip(*gains.values(), strict=True))
        numbers = {key: {"mean": float(np.mean(values)), "worst": min(values)} for key, values in gains.items()}
        ratios.append({"ratio": ratio, "curves": len(gains[REWARD]), "above_by_both": above, **numbers})
    return {"ratios": ratios, "rows": rows}


def main() -> None:
    """Run what is missing, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenes", "photographs", "controls", "scorers", "words"])
    parser.add_argument("--starts", nargs="+", default=["clipcap", "blip"])
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.0, 1.0, 0.05, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="of photographs")
    parser.add_argument("--learning_rate", type=float, help="of photographs, other than the preset's")
    parser.add_argument("--beams", type=int, nargs="+", default=[*BEAMS], help="decodings; 1 is greedy")
    parser.add_argument("--runs_dir", type=Path, default=ROOT / "outputs" / "dose")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.what == "words":
        record = by_words(args.output.parent) | {"command": "python reproduction/dose.py words"}
        write_json(args.output, record | {"versions": installed_versions()})
        return
    world, cells = World(args.data), dict[Any, Path]()
    for beams in BEAMS.keys() - {*args.beams}:
        del BEAMS[beams]
    if args.learning_rate:
        CHANGES[world.name]["learning_rate"] = args.learning_rate
    starts = args.starts * (args.what in ("scenes", "photographs"))
    for seed, start, weight in itertools.product(args.seeds, starts, (None, *args.lambdas)):
        name = "start" if weight is None else f"lambda-{weight:g}"
        path = cells[start, weight, seed] = args.runs_dir / args.what / start / name / f"seed-{seed}.json"
        if not path.exists():
            write_json(path, world.run(start, weight, seed, args.runs_dir))
    if args.output:
        if cells:
            record = summary(cells, args.seeds, world.name, args.output.parent)
        else:
            record = by_other_scorers(world, args.output.parent) if args.what == "scorers" else controls(world)
        words = re.sub(r" --(runs_dir|output) \S+", "", " ".join(sys.argv[1:])).replace(str(args.data), "DATA")
        record |= {"command": f"python reproduction/dose.py {words}", "versions": installed_versions()}
        write_json(args.output, record | {"hardware": hardware(), "world": world_version()})


if __name__ == "__main__":
    main()
