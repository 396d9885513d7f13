"""Runs a recipe in a process of its own, and writes how long its steps took.

    python -m scripts.benchmarks.recipe_process TIMES.json {package,transformers} RECIPE [arguments of the recipe]

`transformers` decodes captions with the loop of `generate` instead of the package's.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from hf_captionrl.captioners import captioner as generation
from hf_captionrl.captioners import decoding
from hf_captionrl.utils.io import write_json


def _refuse(**_: Any) -> None:
    raise decoding.UndecodableError


class _Measured(TrainerCallback):
    """Times and losses of all trainings of this process."""

    losses: list[float] = []  # noqa: RUF012 - of this process
    trainings: list[list[float]] = []  # noqa: RUF012 - ends of backward passes, by training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainings.append([])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.losses += [float(logs["loss"])] if logs and "loss" in logs else []


def main(argv: list[str]) -> None:
    """Run a recipe; see the module."""
    path, loop, recipe, *arguments = argv
    torch.set_num_threads(1)
    backward = Accelerator.backward

    def timed(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
        backward(self, loss, **kwargs)
        _Measured.trainings[-1].append(time.process_time())

    # Between the ends of two backward passes lies one step: optimizer, images, captions, rewards, forward, backward.
    Accelerator.backward = timed  # type: ignore[method-assign]
    DEFAULT_CALLBACKS.append(_Measured)
    if loop == "transformers":
        generation.DecodingLoop = _refuse  # type: ignore[misc, assignment]
    start = time.process_time()
    importlib.import_module(f"recipes.{recipe}").main(arguments)
    seconds = time.process_time() - start
    write_json(Path(path), {"trainings": _Measured.trainings, "seconds": seconds, "losses": _Measured.losses})


if __name__ == "__main__":
    main(sys.argv[1:])
