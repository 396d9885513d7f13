r"""How long a whole reinforcement step takes: generate, score, update, beside the step as it is usually written.

Both steps train the very same weights on the same images, in turn in one process. Ours is `SelfRetrievalTrainer` itself;
the other is `NaiveStep`. Before anything is timed, both update from one rollout, and their gradients have to agree.

Legend: B images, G captions per image, N = B * G captions.
"""

import argparse
import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Iterable
from typing import Any

import torch

from hf_captionrl.metrics.table import installed_versions
from scripts.benchmarks.generation import LENGTHS, planned_lengths
from scripts.benchmarks.rl_models import SHAPES, RLShape, World, build
from scripts.benchmarks.rl_timing import STEPS, Clock, check_equal, counted_images
from scripts.benchmarks.shapes_file import measure_shapes
from scripts.benchmarks.spread import summary, to_cell
from scripts.machine_facts import processor_name

TARGETS = {"blip-base": 4.5, "clipcap": 2.2}
"""How many times as fast as the naive step ours has to be, with captions of COCO's lengths."""

PARTS = ("generate", "score", "update")


def _step(name: str, world: World, optimizer: Any) -> dict[str, Any]:
    """Seconds of one step with its parts, images encoded, and tokens per caption."""
    clock = Clock()
    with counted_images(world) as images:
        lengths = STEPS[name](world, clock)
    with clock.part("update"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = {}
    for kind, parts in clock.seconds.items():
        parts = dict(parts)
        scorer_images = parts.pop("scorer_images", 0.0)
        parts["score"] += scorer_images
        seconds[kind] = {"step": sum(parts.values()), **parts, "scorer_images": scorer_images}
    return {**seconds, "images": sum(images), "tokens": float(lengths.float().mean())}


def plan_lengths(world: World) -> None:
    """Draw COCO's lengths for the captions of the next steps; the shipped captioner ends its captions by itself."""
    if world.shape.kind != "scenes":
        number = world.shape.num_images * world.shape.group_size
        world.lengths = planned_lengths(*LENGTHS["COCO"], number, longest=world.shape.num_tokens)


def measure(shape: RLShape, *, seeds: Iterable[int] = (0,), rounds: int = 3) -> dict[str, Any]:
    """Time the steps in turn.

    Returns CPU and wall `seconds` of each step and its parts (medians), `speedup` of ours over the naive step (median,
    quartiles and value of each round), images that the captioner's tower encoded in a step, tokens per caption, and how
    far advantages and gradients differ.
    """
    names = list(STEPS)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    differences = {"advantages": 0.0, "gradients": 0.0}
    parameters = trained = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            world = build(shape, seed, folder)
        weights = list(world.parameters.values())
        parameters = sum(p.numel() for p in world.captioner.model.parameters())
        trained = sum(p.numel() for p in weights)
        plan_lengths(world)
        for name, difference in check_equal(world).items():
            differences[name] = max(differences[name], difference)
        # The Trainer's default optimizer, at a rate that leaves the model as it is.
        optimizer = torch.optim.AdamW(weights, lr=1e-7, fused=True)
        _step("ours-cached", world, optimizer)  # makes the optimizer's state
        for turn in range(rounds):
            shift = (turn + seed) % len(names)
            plan_lengths(world)  # the same for all steps of a round
            for name in names[shift:] + names[:shift]:
                gc.collect()
                steps[name].append(_step(name, world, optimizer))
        del world, optimizer, weights
        gc.collect()
    kinds = ("cpu", "wall")
    columns = ("step", *PARTS, "scorer_images")
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": parameters,
        "trained_parameters": trained,
        "rounds": len(steps["ours"]),
        "images_encoded": {name: sorted({step["images"] for step in steps[name]}) for name in names},
        "tokens": {name: statistics.mean(step["tokens"] for step in steps[name]) for name in names},
        "seconds": {
            name: {
                kind: {column: statistics.median(step[kind][column] for step in taken) for column in columns}
                for kind in kinds
            }
            for name, taken in steps.items()
        },
        "speedup": {
            name: {kind: summary(_ratios(steps["naive"], steps[name], kind)) for kind in kinds}
            | {"cpu_scorer_images_too": summary(_ratios(steps["naive"], steps[name], "cpu", scorer_images=True))}
            for name in names
            if name != "naive"
        },
        "largest_difference": differences,
    }


def _ratios(
    naive: list[dict[str, Any]], ours: list[dict[str, Any]], kind: str, *, scorer_images: bool = False
) -> list[float]:
    """Of the whole steps, round by round; with `scorer_images` ours is charged for what the scorer's images cost there."""
    return [
        theirs[kind]["step"] / (mine[kind]["step"] + (theirs[kind]["scorer_images"] if scorer_images else 0.0))
        for theirs, mine in zip(naive, ours, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="Which models to train.")
    parser.add_argument("--rounds", type=int, default=3, help="Steps of each kind, for each seed.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Weights and images for each.")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="Of torch; on a busy machine several wait for each other, and waiting counts as CPU time.",
    )
    parser.add_argument("--images", type=int, default=None, help="Images per step; by default those of the shape.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the steps. Returns for each shape what [`measure`] returns, with seeds, threads and versions."""

    def measured(name: str) -> dict[str, Any]:
        shape = SHAPES[name]
        if args.images is not None:
            shape = dataclasses.replace(shape, num_images=args.images)
        found = measure(shape, seeds=args.seeds, rounds=args.rounds)
        machine = {"threads": args.threads, "processor": processor_name(), "versions": installed_versions()}
        return {**found, "seeds": list(args.seeds), **machine}

    return measure_shapes(args, measured, threads=args.threads)


def _row(name: str, step: str, shape: dict[str, Any]) -> str:
    seconds, speedup = shape["seconds"][step], shape["speedup"].get(step)
    cells = [
        name,
        {"ours": "ours", "ours-cached": "ours, images cached", "naive": "naive"}[step],
        f"{shape['shape']['num_images']} x {shape['shape']['group_size']}",
        f"{shape['tokens'][step]:.1f}",
        ", ".join(map(str, shape["images_encoded"][step])),
        " + ".join(f"{seconds['cpu'][part]:.2f}" for part in PARTS),
        f"{seconds['cpu']['step']:.2f}",
        to_cell(speedup["cpu"]) if speedup else "",
        f"{TARGETS[name]:g}" if speedup and name in TARGETS else "",
        to_cell(speedup["cpu_scorer_images_too"]) if speedup else "",
        f"{speedup['wall']['median']:.2f}" if speedup else "",
    ]
    return f"| {' | '.join(cells)} |"


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    shapes = {name: result["shapes"][name] for name in SHAPES if name in result["shapes"]}
    lines = [
        "## `rl_step`: the whole reinforcement step",
        "",
        "`python scripts/benchmark.py rl_step`: sample B x G captions, reward them by self-retrieval among the B images, "
        "forward, backward and AdamW in fp32; the vision tower is frozen.",
        "",
        "- *Ours* is `SelfRetrievalTrainer` (`roll_out`, `compute_loss`) with its guard off. The vision tower runs once per "
        "image, or never if the run-long cache holds its output. The package's decoding loop reads the prompt once per "
        "image and drops finished captions. With cross-attention, the captions of an image share its keys and values. Log-probabilities are computed from chunks of logits, without a separate pass for the sampling "
        "policy. The scorer pads to the longest caption and has encoded the images before the step.",
        "- *Naive* uses transformers alone, with models to which the package attached nothing. Each image is repeated for its "
        "captions and encoded in all three passes (generate, old log-probabilities, update). Captions come from transformers' "
        "`generate`. Logits are full. The scorer "
        "encodes the images in the step and pads to its full length (77; `scenes`: 40).",
        "",
        "Both train the same weights on the same images and alternate in one process. Ratios are those of the whole step "
        "within a round, above 1 if ours is faster: median [quartiles] of CPU-seconds; the same with the scorer's images "
        "added to the time of ours; and the median of wall time.",
        "",
        "| shape | step | B x G | tokens per caption | images encoded | generate + score + update, CPU-s | step, CPU-s "
        "| naive / ours | at least | with the scorer's images | wall |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in shapes.items():
        lines += [_row(name, step, shape) for step in STEPS]
    made_with = {
        f"{shape['processor']}, {shape['threads']} thread(s), torch {shape['versions']['torch']}, transformers "
        f"{shape['versions']['transformers']}"
        for shape in shapes.values()
    }
    worst = {
        name: max(shape["largest_difference"][name] for shape in shapes.values())
        for name in ("advantages", "gradients")
    }
    rounds = ", ".join(f"{shape['rounds']} ({name})" for name, shape in shapes.items())
    lines += [
        "",
        f"{'; '.join(sorted(made_with))}; rounds: {rounds}. Before the timing, both steps computed an update from the same rollout. The "
        f"gradients of all weights differ by at most {worst['gradients']:.0e} (relative norm; equal in float64, see the "
        f"tests), the advantages by {worst['advantages']:.0e} nats. *Images encoded* is counted by a hook on the embeddings "
        "of the captioner's vision tower. `blip-base` (ViT-B/16, 224 px) and `clipcap` (CLIP ViT-B/32, 10 prefix "
        "vectors, GPT-2 small) have random weights. Both steps of a round write captions of the same planned lengths: COCO's, "
        "12 tokens with standard deviation 2.6, at most 20. Their scorer has the shape of CLIP ViT-B/32. `scenes` is the shipped captioner with 0.9 M weights and "
        "captions of any length; in this model the overhead of the calls exceeds the arithmetic.",
    ]
    return "\n".join(lines)
