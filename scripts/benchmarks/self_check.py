"""How long the check before the first training step takes: of the whole batch, and of the two rows that it reads.

The check compares the captioner's tap with the model's own loss (`Captioner.self_check`), so it needs two forward passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from hf_captionrl.captioners import head_tap as head_tap_check
from scripts.benchmarks.shapes_file import measure_each
from scripts.benchmarks.spread import summary, to_cell
from scripts.benchmarks.step_models import SHAPES, Shape, build, draw_batch


def measure(shape: Shape, *, rounds: int) -> dict[str, Any]:
    """CPU-seconds of both checks and of one forward and backward pass of the batch, alternating; and their ratio."""
    model = build(shape, 0)
    captioner = SimpleNamespace(model=model, own_loss=lambda batch: model(**batch).loss, device=torch.device("cpu"))
    batch = draw_batch(shape, np.random.default_rng(0))

    def check() -> None:
        if not head_tap_check.check_tap(captioner, batch) < 1e-3:
            raise RuntimeError("The check failed, so it also computed full logits. Its time says nothing.")

    def check_all() -> None:
        with mock.patch.object(head_tap_check, "first_rows", lambda batch: batch):
            check()

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    works = {"whole batch": check_all, "two rows": check, "step": step}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):  # the first round is not counted
        for name in sorted(works, reverse=bool(turn % 2)):
            start = time.process_time()
            works[name]()
            if turn:
                seconds[name].append(time.process_time() - start)
    ratios = [a / b for a, b in zip(seconds["whole batch"], seconds["two rows"], strict=True)]
    return {
        "shape": dataclasses.asdict(shape),
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "speedup": summary(ratios),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8], help="Images per batch, one caption each.")
    parser.add_argument("--shape", choices=SHAPES, default="blip-base", help="Which model.")
    parser.add_argument("--rounds", type=int, default=5, help="Alternating ones.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the checks on one thread."""

    def measured(size: int) -> dict[str, Any]:
        return measure(dataclasses.replace(SHAPES[args.shape], batch_size=size), rounds=args.rounds)

    return measure_each("batch_sizes", args.batch_sizes, measured, args)


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    lines = [
        "## `self_check`: the check before the first step",
        "",
        "`python scripts/benchmark.py self_check`: `Captioner.self_check` compares the tap with the model's own loss on two captions of the",
        "first batch; here beside the same check of the whole batch, and beside forward and backward of a step. Random weights of",
        "BLIP-base, 224 pixels, one caption per image. CPU-seconds: medians, alternating in one process; ratio: median [quartiles].",
        "",
        "| images per batch | whole batch, s | two rows, s | ratio | a step, s |",
        "|--:|--:|--:|--:|--:|",
    ]
    for size, found in result["batch_sizes"].items():
        whole, two, step = (found["seconds"][name]["median"] for name in ("whole batch", "two rows", "step"))
        lines.append(f"| {size} | {whole:.2f} | {two:.2f} | {to_cell(found['speedup'])} | {step:.2f} |")
    versions = result["versions"]
    made_with = f"torch {versions['torch']}, transformers {versions['transformers']}; {result['rounds']} rounds"
    return "\n".join([*lines, "", f"{result['processor']}, 1 thread, {made_with}."])
