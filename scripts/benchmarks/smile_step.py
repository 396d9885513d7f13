r"""How long a whole training step takes with SMILE: forward, backward and optimizer, beside the MLE step.

Both steps train one model on one batch, in turn in one process on one thread, so that a busy machine slows both; times
are CPU seconds of this process. Every repetition draws another batch and takes the paths in another order.
"""

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX, smile_loss
from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.trainers.smile_trainer import SmileObjective
from scripts.benchmarks.shapes_file import measure_shapes
from scripts.benchmarks.spread import summary, to_cell
from scripts.benchmarks.step_models import SHAPES, Shape, build, draw_batch
from scripts.machine_facts import processor_name

TARGETS = {"clipcap": 1.25}
"""How many times as fast as the MLE step a SMILE step has to be; 1, within noise, at every other shape."""


def _through_tap(mle_weight: float) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """The loss of `SmileTrainer`: the objective's sum over the supervised tokens, divided by their number."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch, head_objective=SmileObjective(mle_weight=mle_weight))
        return output["loss"] / (batch["labels"] != IGNORE_INDEX).sum()

    return loss


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


PATHS: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "smile": _through_tap(0.0),
    "mle": _own_loss,
    "mle-tapped": _through_tap(1.0),
}
"""From model and batch to the loss: SMILE and MLE through the package's tap, and `mle`, the model's forward and loss
over full logits."""


def check_losses(model: Any, batch: dict[str, Tensor], atol: float = 1e-3) -> dict[str, float]:
    """Make sure that the paths compute what they are named after, from full logits and without dropout.

    `atol` is the largest difference in nats.
    """
    model.eval()
    try:
        with torch.no_grad():
            losses = {name: float(path(model, batch)) for name, path in PATHS.items()}
            labels = batch["labels"][:, 1:]
            # The encoder-decoder reads the tokens without the last one; the others' last position predicts nothing.
            logits = model(**batch).logits
            logits = logits if model.config.is_encoder_decoder else logits[:, -labels.size(1) - 1 : -1]
            mle = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            expected = {"smile": float(smile_loss(logits, labels)), "mle": mle, "mle-tapped": mle}
    finally:
        model.train()
    differences = {name: abs(losses[name] - expected[name]) for name in PATHS}
    for name, difference in differences.items():
        if not difference <= atol:
            raise RuntimeError(
                f"The loss of path {name!r} is {losses[name]:.6f}, but {expected[name]:.6f} from full logits: a time "
                "would say nothing. Compare the captioner's tap with the model's loss (Captioner.self_check)."
            )
    return differences


def _timed_step(path: Callable[..., Tensor], model: Any, batch: dict[str, Tensor], optimizer: Any) -> list[float]:
    """CPU seconds of forward, backward and optimizer."""
    times = [time.process_time()]
    loss = path(model, batch)
    times.append(time.process_time())
    loss.backward()
    del loss
    times.append(time.process_time())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    times.append(time.process_time())
    return [end - start for start, end in itertools.pairwise(times)]


def _median_interval(values: list[float], level: float = 0.95) -> list[float]:
    """Order statistics that enclose the median with probability at least `level`; all values where they are few."""
    n, tail, rank = len(values), 0.0, 0
    while rank < n // 2 and (tail := tail + math.comb(n, rank) / 2**n) <= (1 - level) / 2:
        rank += 1
    rank = max(rank - 1, 0)
    ordered = sorted(values)
    return [ordered[rank], ordered[n - 1 - rank]]


def _with_interval(values: list[float]) -> dict[str, Any]:
    return {**summary(values), "interval_95": _median_interval(values)}


def measure(shape: Shape, *, seeds: Iterable[int] = (0, 1), repetitions: int = 4) -> dict[str, Any]:
    """Time the steps of all paths in turn.

    Returns `seconds` of each path (median of the step and of its parts), `speedup` of SMILE over each other path
    (median, quartiles, interval of the median and value of each repetition), and what was measured.
    """
    names = list(PATHS)
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    tokens, positions = [], []
    differences = dict.fromkeys(names, 0.0)
    parameters = trained = 0
    for seed in seeds:
        model = build(shape, seed)
        rng = np.random.default_rng(seed)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parameters, trained = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in weights)
        # The Trainer's default optimizer, at a rate that leaves the model as it is.
        optimizer = torch.optim.AdamW(weights, lr=1e-7, fused=True)
        batch = draw_batch(shape, rng)
        for name, difference in check_losses(model, batch).items():
            differences[name] = max(differences[name], difference)
        for name in names:  # makes the optimizer's state
            _timed_step(PATHS[name], model, batch, optimizer)
        for repetition in range(repetitions):
            batch = draw_batch(shape, rng)
            tokens.append(int((batch["labels"] != IGNORE_INDEX).sum()))
            positions.append(batch["labels"].size(1))
            shift = (repetition + seed) % len(names)
            gc.collect()
            for name in names[shift:] + names[:shift]:
                steps[name].append(_timed_step(PATHS[name], model, batch, optimizer))
        del model, optimizer, weights
        gc.collect()
    totals = {name: [sum(step) for step in taken] for name, taken in steps.items()}
    parts = ("forward", "backward", "optimizer")
    seconds = {}
    for name in names:
        medians = [statistics.median(column) for column in zip(*steps[name], strict=True)]
        seconds[name] = {"step": statistics.median(totals[name]), **dict(zip(parts, medians, strict=True))}
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": parameters,
        "trained_parameters": trained,
        "median_text_positions": statistics.median(positions),
        "median_supervised_tokens": statistics.median(tokens),
        "repetitions": len(tokens),
        "seconds": seconds,
        "speedup": {
            f"over_{name}": _with_interval([b / a for a, b in zip(totals["smile"], totals[name], strict=True)])
            for name in names
            if name != "smile"
        },
        "largest_loss_difference": differences,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="Which models to train.")
    parser.add_argument("--repetitions", type=int, default=4, help="Batches a seed that every path trains on.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="A model for each.")
    parser.add_argument(
        "--batch-size", type=int, default=None, help="Captions per batch; by default those of the shape."
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the steps. Returns for each shape what [`measure`] returns, with the seeds and versions."""

    def measured(name: str) -> dict[str, Any]:
        shape = SHAPES[name]
        if args.batch_size is not None:
            shape = dataclasses.replace(shape, batch_size=args.batch_size)
        found = measure(shape, seeds=args.seeds, repetitions=args.repetitions)
        machine = {"processor": processor_name(), "versions": installed_versions()}
        return {**found, "seeds": list(args.seeds), **machine}

    return measure_shapes(args, measured)


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    shapes = {name: result["shapes"][name] for name in SHAPES if name in result["shapes"]}
    lines = [
        "## `smile_step`: the whole training step",
        "",
        "`python scripts/benchmark.py smile_step`: forward, backward and AdamW in fp32 on one thread, random weights, "
        "captions of COCO's lengths. SMILE uses the captioner's tap with `SmileObjective`. MLE uses the model's "
        "forward and loss over full logits. *MLE, tapped* is `mle_weight=1` through the same tap, which computes logits of "
        "supervised tokens only. All paths train the same model on the same batches, alternating in one process. "
        "Speedups are ratios of CPU-seconds within a repetition, above 1 if SMILE is faster: median [quartiles], and "
        "an interval that contains the true median with at least 95 % from 6 repetitions on.",
        "",
        "| shape | B | supervised tokens | trained | MLE / tapped MLE / SMILE, s | over MLE | interval | at least "
        "| over MLE, tapped | repetitions (seeds) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in shapes.items():
        seconds = " / ".join(f"{shape['seconds'][path]['step']:.2f}" for path in ("mle", "mle-tapped", "smile"))
        over, tapped = (shape["speedup"][f"over_{path}"] for path in ("mle", "mle-tapped"))
        low, high = over["interval_95"]
        cells = [
            name,
            shape["shape"]["batch_size"],
            f"{shape['median_supervised_tokens']:.0f}",
            f"{shape['trained_parameters'] / 1e6:.0f} of {shape['parameters'] / 1e6:.0f} M",
            seconds,
            to_cell(over),
            f"{low:.2f} to {high:.2f}",
            f"{TARGETS.get(name, 1):g}",
            to_cell(tapped),
            f"{shape['repetitions']} ({', '.join(map(str, shape['seeds']))})",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    made_with = {
        f"{shape['processor']}, torch {shape['versions']['torch']}, transformers {shape['versions']['transformers']}"
        for shape in shapes.values()
    }
    worst = max(max(shape["largest_loss_difference"].values()) for shape in shapes.values())
    lines += [
        "",
        f"{'; '.join(sorted(made_with))}. Before the timing, the losses of all paths were compared with plain "
        f"computations from full logits: they differ by at most {worst:.0e} nats. `blip-base` (224 px) and `vit-gpt2` "
        "train all weights, including the vision tower. `llama-32k` is one layer of a 7B LLaMA with its embeddings and "
        "head, and reads text only; with image tokens, the ordinary step would compute logits for these, too. `clipcap` is "
        "GPT-2 small with 10 prefix embeddings from cached features; `clipcap-frozen` trains only its mapping network.",
        "",
        "How to read it: if the interval contains 1, no difference between the steps was shown. If it contains the value "
        "in *at least*, it is open whether the true median reaches that value. In large batches, most of the gain over the "
        "ordinary step comes from the tap, which skips the logits of prefix and padding: *over MLE, tapped* is the gain "
        "that SMILE's loss adds.",
    ]
    return "\n".join(lines)
