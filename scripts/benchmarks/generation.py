"""How long sampled captions take: the decoding loop of the package beside that of transformers.

Both write captions of the same lengths from the same images with the same weights, in turn in one process.

Legend: B images, G captions per image, N = B * G captions, T tokens.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_captionrl.captioners import Completions, decoding
from scripts.benchmarks.rl_models import SHAPES, World, build
from scripts.benchmarks.shapes_file import measure_each
from scripts.benchmarks.spread import summary

TARGET = 1.5
"""How many times as fast as transformers' loop ours has to be with captions of COCO's lengths."""

LENGTHS = {"COCO": (12.0, 2.6), "20 tokens": (20.0, 0.0)}
"""Mean and standard deviation of tokens per caption; COCO's captions have 10.5 words with standard deviation 2.4."""

_LONGEST = 20
_END = 3


def planned_lengths(mean: float, deviation: float, number: int, *, longest: int = _LONGEST) -> Tensor:
    """Tokens of each caption `(N,)`, with the end token, from 5 to `longest`."""
    return (mean + deviation * torch.randn(number)).round().long().clamp(min(5, longest), longest)


@contextmanager
def ending_at(lengths: Tensor, end: int = _END) -> Iterator[None]:
    """Both loops write the token `end` where a caption has its planned length, and no captions are shorter."""
    draw, multinomial, steps = decoding.draw_tokens, torch.multinomial, itertools.count(1)

    def uniforms(*size: int, **kwargs: Any) -> Tensor:
        numbers = torch.empty(size, **kwargs).uniform_(0.01, 1.0)  # (T, N)
        ends = torch.arange(1, size[0] + 1, device=numbers.device).unsqueeze(1) == lengths.to(numbers.device)
        return numbers.masked_fill(ends, 0.0)

    def drawn(scores: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers == 0, end, draw(scores, numbers))

    def sampled(probabilities: Tensor, num_samples: int) -> Tensor:
        ends = (lengths == next(steps)).to(probabilities.device)
        return torch.where(ends.unsqueeze(1), end, multinomial(probabilities, num_samples))

    with (
        mock.patch.object(decoding, "draw_tokens", drawn),
        mock.patch.object(torch, "rand", uniforms),
        mock.patch.object(torch, "multinomial", sampled),
    ):
        yield


def write(world: World, loop: str, lengths: Tensor, **settings: Any) -> Completions:
    """Sampled captions of the planned lengths `(N,)`, by our loop or that of transformers.

    Raises AssertionError if the loop wrote captions of other lengths.
    """
    if loop == "transformers":
        settings["custom_generate"] = GenerationMixin._sample  # what `generate` calls without our loop
    with ending_at(lengths):
        written = world.captioner.generate(
            image_features=world.cached_features,
            max_new_tokens=world.shape.num_tokens,
            do_sample=True,
            top_k=0,
            num_return_sequences=world.shape.group_size,
            suppress_tokens=world.suppressed,
            **settings,
        )
    wrote = written.mask.sum(1).tolist()
    if wrote != lengths.tolist():
        raise AssertionError(f"{loop} wrote captions of {wrote} tokens, not {lengths.tolist()}.")
    return written


def measure(name: str, *, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Time both loops in turn."""
    torch.manual_seed(seed)
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        world = build(shape, seed, folder)
    found: dict[str, Any] = {"images": shape.num_images, "captions_per_image": shape.group_size}
    for kind, (mean, deviation) in LENGTHS.items():
        taken: dict[str, list[float]] = {"ours": [], "transformers": []}
        for turn in range(rounds + 1):  # the first round is not counted
            number = shape.num_images * shape.group_size
            lengths = planned_lengths(mean, deviation, number, longest=shape.num_tokens)
            for loop in sorted(taken, reverse=bool(turn % 2)):
                start = time.process_time()
                write(world, loop, lengths)
                if turn:
                    taken[loop].append(time.process_time() - start)
        ratios = [theirs / ours for theirs, ours in zip(taken["transformers"], taken["ours"], strict=True)]
        found[kind] = {
            "seconds": {loop: summary(values)["median"] for loop, values in taken.items()},
            "speedup": summary(ratios),
        }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--shapes", nargs="+", choices=["blip-base", "clipcap"], default=["blip-base", "clipcap"])
    parser.add_argument("--rounds", type=int, default=5, help="Calls of each loop, for each kind of lengths.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the loops on one thread."""
    return measure_each("shapes", args.shapes, lambda each: measure(each, rounds=args.rounds), args)


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    lines = [
        "## `generation`: sampled captions",
        "",
        "`python scripts/benchmark.py generation`: sample B x G captions from cached image features, in fp32. The loop of the package reads",
        "the prompt once per image, removes finished captions, and samples tokens from the cumulative sum. The other loop is that of",
        "`generate` in transformers. Both generate captions of the same predetermined lengths.",
        "",
        "| model | B x G | lengths | transformers, CPU-s | ours, CPU-s | speedup [quartiles] | at least |",
        "|:--|:--|:--|--:|--:|--:|--:|",
    ]
    for name, shape in result["shapes"].items():
        for kind in LENGTHS:
            seconds, speedup = shape[kind]["seconds"], shape[kind]["speedup"]
            low, high = speedup["quartiles"]
            target = f"{TARGET:g}" if kind == "COCO" else ""
            lines.append(
                f"| {name} | {shape['images']} x {shape['captions_per_image']} | {kind} | {seconds['transformers']:.2f} | "
                f"{seconds['ours']:.2f} | {speedup['median']:.2f} [{low:.2f}, {high:.2f}] | {target} |"
            )
    versions = result["versions"]
    lines += [
        "",
        f"{result['processor']}, 1 thread, torch {versions['torch']}, transformers {versions['transformers']}; {result['rounds']} rounds; "
        "random weights in the shapes of the models. COCO: 12 tokens per caption with a standard deviation of 2.6.",
    ]
    return "\n".join(lines)
