"""Whole recipes: caches and the package's decoding loop beside the same recipe without them.

Each run is a process of its own. Runs of the two settings alternate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.shapes_file import measure_each
from scripts.benchmarks.spread import summary, to_cell
from scripts.make_small_blip import make_small_blip
from tests.data.coco_photographs import make_photographs, read_rows

ROOT = Path(__file__).resolve().parents[2]
_IMAGES = 24
FEATURES = ("--freeze_vision_tower", "true", "--cache_image_features")
"""Options that need a frozen vision tower; the value of the last one follows."""


@dataclass(frozen=True)
class Case:
    """A recipe, and the options that are off before and on after."""

    title: str
    recipe: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    photographs: bool = False  # a captioner of BLIP-base's size on photographs; else the embedded world
    samples: bool = False  # whether training generates captions


_NO_EVALUATION = (
    *("--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false", "--logging_steps", "1"),
)
_PHOTOGRAPHS = (
    *(
        "--dataset_name",
        "imagefolder",
        "--perplexity_name_or_path",
        "none",
        "--scorer_name_or_path",
        "scenes:clip-reward",
    ),
    *("--held_out_scorer_name_or_path", "scenes:siglip-held-out", "--max_eval_images", "2"),
    *("--generation_num_beams", "1", "--generation_max_new_tokens", "4", *_NO_EVALUATION),
)

_ALONE = ("--compare_mle_weights", "0")
"""SMILE without the runs that the table compares it with."""

CASES = {
    "smile_blip on scenes": Case(
        "`smile_blip`, embedded world",
        "smile_blip",
        (*FEATURES, "false"),
        (*FEATURES, "true"),
        ("--max_steps", "40", *_ALONE, *_NO_EVALUATION),
    ),
    "self_retrieval_blip on scenes": Case(
        "`self_retrieval_blip`, embedded world",
        "self_retrieval_blip",
        (*FEATURES, "false"),
        (*FEATURES, "true"),
        ("--max_steps", "20", "--variants", "null", *_NO_EVALUATION),
        samples=True,
    ),
    "smile_blip on photographs": Case(
        "`smile_blip`, BLIP-base, frozen vision tower",
        "smile_blip",
        (*FEATURES, "false"),
        (*FEATURES, "true"),
        ("--max_steps", "6", "--per_device_train_batch_size", "8", *_ALONE, *_PHOTOGRAPHS),
        photographs=True,
    ),
    "smile_blip on photographs, whole model": Case(
        "`smile_blip`, BLIP-base, whole model",
        "smile_blip",
        ("--freeze_vision_tower", "false", "--cache_image_features", "false"),
        ("--freeze_vision_tower", "false", "--cache_image_features", "false", "--cache_pixels", "uint8"),
        ("--max_steps", "3", "--per_device_train_batch_size", "4", *_ALONE, *_PHOTOGRAPHS),
        photographs=True,
    ),
    "self_retrieval_blip on photographs": Case(
        "`self_retrieval_blip`, BLIP-base, frozen vision tower",
        "self_retrieval_blip",
        (*FEATURES, "false"),
        (*FEATURES, "true"),
        (
            *(
                "--max_steps",
                "4",
                "--per_device_train_batch_size",
                "4",
                "--num_generations",
                "5",
                "--variants",
                "null",
            ),
            *("--max_completion_length", "12", "--guard", "off", *_PHOTOGRAPHS),
        ),
        photographs=True,
        samples=True,
    ),
}


def make_captioner(folder: Path, *, hidden_size: int, num_layers: int, image_size: int) -> tuple[str, ...]:
    """A folder of photographs with captions, and a captioner with random weights; returns the recipe's arguments."""
    images = folder / "photographs"
    make_photographs(images, _IMAGES)
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    words = ("".join(parts) for parts in itertools.islice(itertools.product(syllables, repeat=3), 31_000))
    texts = [*(caption for row in read_rows() for caption in row["captions"]), " ".join(words)]
    model, processor = make_small_blip(texts, hidden_size=hidden_size, num_layers=num_layers, image_size=image_size)
    model.save_pretrained(folder / "captioner")
    processor.save_pretrained(folder / "captioner")
    return "--model_name_or_path", str(folder / "captioner"), "--data_dir", str(images)


def run_once(case: Case, arguments: tuple[str, ...], folder: Path, *, loop: str) -> dict[str, Any]:
    """CPU-seconds of a whole run and of each step after the first, and the logged losses."""
    environment = {
        **os.environ,
        "CAPTIONRL_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    times = folder / "times.json"
    words = [str(times), loop, case.recipe, *arguments, "--output_dir", str(folder / "run"), "--use_cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.recipe_process", *words],
        cwd=ROOT,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{case.recipe} exited with {done.returncode}:\n{done.stdout[-3000:]}")
    found = json.loads(times.read_text(encoding="utf-8"))
    steps = [end - start for ends in found["trainings"] for start, end in itertools.pairwise(ends)]
    return {"whole": found["seconds"], "step": statistics.median(steps), "losses": found["losses"]}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the recipe before and after in turn, each time with empty caches."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = {"hidden_size": args.hidden_size, "num_layers": args.num_layers, "image_size": args.image_size}
        shared = (*case.arguments, *(make_captioner(folder, **size) if case.photographs else ()))
        taken: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
        for turn in range(args.rounds):
            for setting in sorted(taken, reverse=turn % 2 == 0):
                options = case.before if setting == "before" else case.after
                loop = "transformers" if setting == "before" else "package"
                place = folder / f"{setting}-{turn}"
                place.mkdir()
                taken[setting].append(run_once(case, (*shared, *options), place, loop=loop))
    result: dict[str, Any] = {}
    for part in ("step", "whole"):
        seconds = {setting: [run[part] for run in runs] for setting, runs in taken.items()}
        ratios = [a / b for a, b in zip(seconds["before"], seconds["after"], strict=True)]
        result[part] = {
            "seconds": {setting: statistics.median(values) for setting, values in seconds.items()},
            "speedup": summary(ratios),
        }
    losses = [run["losses"] for runs in taken.values() for run in runs]
    are_equal = None if case.samples else bool(losses[0]) and all(found == losses[0] for found in losses)
    if are_equal is False:
        raise RuntimeError(f"{name}: the losses of the runs differ: {losses}.")
    images = f"{_IMAGES} JPEG files of {len(read_rows())} photographs of COCO and cropped, partly mirrored copies"
    about = {"captioner": size, "images": images} if case.photographs else {"captioner": None, "images": None}
    return result | {"losses_equal": are_equal} | about


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="Which recipes."
    )
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each setting.")
    parser.add_argument("--hidden-size", type=int, default=768, help="Of the captioner on photographs.")
    parser.add_argument("--num-layers", type=int, default=12, help="Of its vision tower and of its language model.")
    parser.add_argument("--image-size", type=int, default=384, help="Side of its images in pixels.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the recipes on one thread."""
    return measure_each("cases", args.cases, lambda each: measure(each, args), args)


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    lines = [
        "## `recipe`: whole recipes",
        "",
        "`python scripts/benchmark.py recipe`: the recipe as a program, with the captioner's images cached and captions decoded by the package,",
        "and the same recipe without both: images opened and encoded at every use, captions decoded by `generate`. A step lies between the",
        "ends of two backward passes, and the whole run includes loading, caching and the final evaluation. CPU-seconds; ratios within a",
        "round: median [quartiles].",
        "",
        "| recipe | a step, before / after | speedup of a step | the whole run, before / after | speedup of the run |",
        "|:--|--:|--:|--:|--:|",
    ]
    for name, found in result["cases"].items():
        cells = [CASES[name].title]
        for part in ("step", "whole"):
            seconds = found[part]["seconds"]
            cells += [f"{seconds['before']:.2f} / {seconds['after']:.2f}", to_cell(found[part]["speedup"])]
        lines.append(f"| {' | '.join(cells)} |")
    versions = result["versions"]
    with_photographs = [found for found in result["cases"].values() if found["captioner"]]
    sizes = sorted({str(found["captioner"]["image_size"]) for found in with_photographs})
    images = sorted({found["images"] for found in with_photographs})
    photographs_note = (
        f" BLIP-base has random weights and {' or '.join(sizes)} pixels, and the images are {' or '.join(images)}."
    )
    lines += [
        "",
        f"{result['processor']}, 1 thread, torch {versions['torch']}, transformers {versions['transformers']}; {result['rounds']} rounds. The "
        "losses of `smile_blip` are equal to the last bit in all runs; sampled captions are drawn anew."
        + (photographs_note if sizes else ""),
        "The runs have few steps; a longer run fills its caches just once.",
    ]
    return "\n".join(lines)
