"""Measures whether the embedded world is hard enough to tell methods apart, before any method is compared.

    python scripts/scenes_acceptance.py --output docs/results/scenes_acceptance.json

Bars and measurements are those of docs/scenes.md. Each measurement is made on three test splits, drawn with seeds 0, 1
and 2, of 1,000 scenes each; swaps on 1,500 independent scenes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.metrics.suites import smile_suite
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check, full_caption, load_scenes
from hf_captionrl.scenes.world import Facts
from hf_captionrl.utils.io import write_json
from scripts.reproduction.numbers import seed_interval
from scripts.scenes_models.scorers import swap_objects

HELD_OUT, REWARD, MLE = "scenes:siglip-held-out", "scenes:clip-reward", "scenes:blip-mle"

NUM_SWAPS = 1500
"""Independent scenes on which swaps are measured; no scorer learned from them. The test split has few different pairs of objects, since
the images of a bag share theirs."""

BARS: dict[str, tuple[float, float]] = {
    "full_captions/rd100_recall_at_1": (0.95, 1.0),
    "full_captions/bag_7_recall_at_1": (0.85, 1.0),
    "references/rd100_recall_at_1": (0.5, 0.75),
    "swaps/held_out": (0.9, 1.0),
    "swaps/reward": (0.0, 0.7),
    "mle/length_to_references": (0.65, 1.35),
    "mle/rd100_minus_references": (-0.15, 0.15),
    "mle/hallucination": (0.05, 0.15),
}
"""Smallest and largest value of each measurement."""

REPORTED = (
    "mle_with_preferences/hallucination",
    "mle_against_preferences/hallucination",
    "swaps/held_out_in_bags",
    "swaps/reward_in_bags",
)
"""What has no bar: scenes that agree with the preferences of objects and the quarter that does not, and swaps on the test split."""


def lowered_by_swaps(scorer: Any, rows: datasets.Dataset, images: Any) -> np.ndarray:
    """For each scene that its caption with swapped objects does not describe, whether that caption's score is lower.

    `images` `(N, D)` are features of all rows.
    """
    true, false, at = [], [], []
    for row, values in enumerate(rows["facts"][:]):
        facts = Facts(**values)
        wrong = full_caption(swap_objects(facts)) if facts.second else ""
        if wrong and check(wrong, facts).wrong:
            true.append(full_caption(facts))
            false.append(wrong)
            at.append(row)
    mine = torch.as_tensor(images)[at]
    scores = [(torch.as_tensor(scorer.text_features(texts)) * mine).sum(1) for texts in (true, false)]
    return (scores[1] < scores[0]).numpy()


def measure_split(seed: int, num_beams: int) -> dict[str, dict[str, float]]:
    """All measurements on one test split."""
    splits = load_scenes(seed=seed, num_train=NUM_SWAPS, num_validation=0)
    rows = splits["test"]
    held_out, reward = load_scorer(HELD_OUT), load_scorer(REWARD)
    pictures = list(rows["image"])
    images = held_out.image_features(pictures)
    captioner = load_captioner(MLE, dtype=torch.float32)
    annotator = np.random.default_rng(seed).integers(5, size=len(rows))
    captions: dict[str, Sequence[str]] = {
        "full_captions": list(rows["full_caption"]),
        "references": [texts[at] for texts, at in zip(rows["captions"], annotator, strict=True)],
        "mle": generate_captions(captioner, pictures, batch_size=250, num_beams=num_beams, max_new_tokens=40),
    }
    found: dict[str, dict[str, float]] = {}
    for name, texts in captions.items():
        row = smile_suite(
            texts,
            references=list(rows["captions"]),
            text_features=held_out.text_features(texts),
            image_features=images,
            facts=list(rows["facts"]),
            check=check,
            bags={size: bags(list(rows["bag_id"]), size) for size in BAG_SIZES},
        )
        found[name] = {key: value for key, value in row.items() if isinstance(value, int | float)}
    against = list(rows["against_preferences"])
    for name, chosen in (("mle_against_preferences", True), ("mle_with_preferences", False)):
        at = [i for i, value in enumerate(against) if value == chosen]
        row = smile_suite([captions["mle"][i] for i in at], facts=[rows[i]["facts"] for i in at], check=check)
        found[name] = {"hallucination": row["hallucination"], "fact_recall": row["fact_recall"]}
    found["mle"]["length_to_references"] = found["mle"]["length"] / found["references"]["length"]
    found["mle"]["rd100_minus_references"] = (
        found["mle"]["rd100_recall_at_1"] - found["references"]["rd100_recall_at_1"]
    )
    found["swaps"] = {
        f"{name}{where}": float(lowered_by_swaps(scorer, split, scorer.image_features(list(split["image"]))).mean())
        for name, scorer in (("held_out", held_out), ("reward", reward))
        for where, split in (("", splits["train"]), ("_in_bags", rows))
    }
    return found


def as_table(bars: Sequence[dict[str, Any]], measured: dict[str, dict[str, list[float]]]) -> str:
    """The bars, mean and interval over the splits, and whether the mean lies between the bars, as Markdown."""
    lines = ["| measurement | required | mean [95 % interval] | each split | met |", "|:--|:--|--:|:--|:--|"]
    wanted = {bar["name"]: (f"{bar['low']:g} to {bar['high']:g}", "yes" if bar["met"] else "**no**") for bar in bars}
    for name in (*wanted, *REPORTED):
        system, key = name.split("/")
        values = measured[system][key]
        splits = ", ".join(f"{value:.3f}" for value in values)
        found = seed_interval(values)
        interval = "" if found.high is None else f" [{found.low:.3f}, {found.high:.3f}]"
        span, met = wanted.get(name, ("", ""))
        title = f"{system.replace('_', ' ')}: {key.replace('_', ' ')}"
        lines.append(f"| {title} | {span} | {found.value:.3f}{interval} | {splits} | {met} |")
    lines += ["", "Made by `python scripts/scenes_acceptance.py --output docs/results/scenes_acceptance.json`.", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line.

    The exit code is 0 if the mean over the seeds meets every bar, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    splits = [measure_split(seed, args.num_beams) for seed in args.seeds]
    measured = {
        system: {key: [split[system][key] for split in splits] for key in splits[0][system]} for system in splits[0]
    }
    bars = []
    for name, (low, high) in BARS.items():
        system, key = name.split("/")
        mean = float(np.mean(measured[system][key]))
        bars.append({"name": name, "low": low, "high": high, "mean": mean, "met": low <= mean <= high})
        values = " ".join(f"{value:.3f}" for value in measured[system][key])
        print(f"{'ok ' if bars[-1]['met'] else 'NO '} {name:34} {mean:.3f} in [{low}, {high}]: {values}")
    if args.output is not None:
        write_json(args.output, {"seeds": args.seeds, "num_beams": args.num_beams, "measured": measured, "bars": bars})
        args.output.with_suffix(".md").write_text(as_table(bars, measured), encoding="utf-8")
    return int(not all(bar["met"] for bar in bars))


if __name__ == "__main__":
    raise SystemExit(main())
