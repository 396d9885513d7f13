"""Head and loss, forward and backward: the fused SMILE loss against Algorithm 1 and plain cross-entropy.

Legend: B captions, T tokens, V vocabulary, D features.

All methods run interleaved in one process on one thread, in a new order every round; time is the process's CPU time, so
that a busy machine disturbs it little, and ratios are taken within a round. Hidden states, weight and labels are the
same for all. Releasing the gradients belongs to the optimiser and is not timed.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss
from hf_captionrl.metrics.table import installed_versions
from scripts.benchmarks.allocations import allocations
from scripts.benchmarks.spread import spread
from scripts.machine_facts import processor_name

Method = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A head and a batch: B captions of `mean` +- `std` supervised tokens in [`shortest`, `longest`], after a prompt."""

    B: int
    V: int
    D: int
    prompt: int
    mean: float
    std: float
    shortest: int
    longest: int


# COCO captions are 10.5 words; with sub-words and the end token about 12.5 tokens. BLIP's prompt "a picture of " adds
# three ignored positions. LLaMA: the batch of the SMILE paper's appendix B, with answers of Alpaca's length truncated to 64.
SHAPES = {
    "blip-base": Shape(B=32, V=30524, D=768, prompt=3, mean=12.5, std=2.8, shortest=7, longest=24),
    "gpt2": Shape(B=32, V=50257, D=768, prompt=0, mean=12.5, std=2.8, shortest=7, longest=24),
    "llama-32k": Shape(B=8, V=32000, D=4096, prompt=0, mean=48.0, std=24.0, shortest=8, longest=64),
}
LAMBDA = 0.01
RATIOS = {
    # name: (slower, faster, the least it should be)
    "Algorithm 1 / SMILE": ("algorithm_1", "smile", {"trainable": 8.0, "frozen": 15.0}),
    "cross-entropy / SMILE": ("cross_entropy", "smile", {"trainable": 7.0, "frozen": 12.0}),
    "cross-entropy of supervised rows / SMILE": ("supervised_cross_entropy", "smile", {}),
    "naive mixture / mixture": ("naive_mixture", "mixture", {"trainable": 1.2, "frozen": 1.2}),
    "cross-entropy / mixture": ("cross_entropy", "mixture", {"trainable": 0.91, "frozen": 0.91}),
    "cross-entropy / mixture without padding": ("cross_entropy", "mixture_without_padding", {}),
}


def _restricted(logits: Tensor, labels: Tensor) -> Tensor:
    """Algorithm 1 of the paper to the letter, on labels with the prompt in front already ignored."""
    B, T, V = logits.shape
    supervised = labels != IGNORE_INDEX
    first = supervised.int().argmax(1)
    # Ignored positions repeat a supervised word, so that the scatter adds nothing.
    words = torch.where(supervised, labels, labels.gather(1, first.unsqueeze(1)))
    mask = torch.zeros(B, V, dtype=torch.bool).scatter_(1, words, True)
    mask = mask.unsqueeze(1).expand(-1, T, -1).clone()
    mask[torch.arange(B), first] = True
    selected = logits.masked_fill(~mask, float("-inf"))
    # An ignored row of -inf everywhere but V_D is harmless here: its label is ignored.
    return F.cross_entropy(selected.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def algorithm_1(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _restricted(F.linear(hidden, weight), labels)


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _plain(F.linear(hidden, weight), labels)


def supervised_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # What skipping padding and prompt gives without SMILE.
    supervised = labels != IGNORE_INDEX
    return F.cross_entropy(F.linear(hidden[supervised], weight), labels[supervised])


def naive_mixture(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return LAMBDA * _plain(logits, labels) + (1 - LAMBDA) * _restricted(logits, labels)


def mixture(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return fused_smile_loss(hidden, weight, labels, mle_weight=LAMBDA)


def mixture_without_padding(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # Part of the mixture's speed is that ignored rows are not multiplied; this shows what is left without any.
    return fused_smile_loss(hidden, weight, labels.clamp(min=0), mle_weight=LAMBDA)


METHODS: dict[str, Method] = {
    "algorithm_1": algorithm_1,
    "cross_entropy": cross_entropy,
    "supervised_cross_entropy": supervised_cross_entropy,
    "smile": fused_smile_loss,
    "naive_mixture": naive_mixture,
    "mixture": mixture,
    "mixture_without_padding": mixture_without_padding,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="Which heads to measure.")
    parser.add_argument("--rounds", type=int, default=9, help="Timed rounds after one that warms up.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the batch and of the order within a round.")


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    return {**spread(values), "min": min(values), "max": max(values)}


def _batch(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `(B, T, D)`, weight `(V, D)`, labels `(B, T)` padded to the longest caption."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(shape.B, generator=generator) * shape.std + shape.mean
    lengths = lengths.round().clamp(shape.shortest, shape.longest).long()
    T = shape.prompt + int(lengths.max())
    # Ranks drawn from a Zipf-like law, so that words repeat within a caption as they do in English.
    ranks = torch.exp(torch.rand(shape.B, T, generator=generator) * torch.tensor(float(shape.V)).log()).long()
    labels = torch.randperm(shape.V, generator=generator)[ranks.clamp(max=shape.V - 1)]
    positions = torch.arange(T)
    labels[(positions < shape.prompt) | (positions >= shape.prompt + lengths.unsqueeze(1))] = IGNORE_INDEX
    hidden = torch.randn(shape.B, T, shape.D, generator=generator)
    return hidden, torch.randn(shape.V, shape.D, generator=generator) * shape.D**-0.5, labels


def _step(
    method: Method, hidden: Tensor, weight: Tensor, labels: Tensor, trainable: bool
) -> tuple[float, Tensor, Tensor]:
    """CPU-seconds of one forward and backward, and the leaves that hold the gradients."""
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_(trainable)
    start = time.process_time()
    method(hidden, weight, labels).backward()
    return time.process_time() - start, hidden, weight


def _peak_bytes(method: Method, hidden: Tensor, weight: Tensor, labels: Tensor, trainable: bool) -> int:
    """Most bytes live at once in torch's allocator during a step, without (one) gradient of the weight."""
    weight_bytes = weight.numel() * weight.element_size()
    live = of_weights_size = peak = 0
    for size in allocations(lambda: _step(method, hidden, weight, labels, trainable)):
        live += size
        if abs(size) == weight_bytes:
            of_weights_size += 1 if size > 0 else -1
        peak = max(peak, live - weight_bytes * min(of_weights_size, int(trainable)))
    return peak


def _agreement(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, float]:
    """The fast forms against the naive ones: relative difference of the gradients of hidden states and weight."""
    worst = {}
    pairs = {"smile": "algorithm_1", "mixture": "naive_mixture", "supervised_cross_entropy": "cross_entropy"}
    for mine, other in pairs.items():
        _, h1, w1 = _step(METHODS[mine], hidden, weight, labels, True)
        _, h2, w2 = _step(METHODS[other], hidden, weight, labels, True)
        for name, a, b in (("hidden", h1, h2), ("weight", w1, w2)):
            assert a.grad is not None
            assert b.grad is not None
            worst[f"{mine}_{name}"] = float((a.grad - b.grad).norm() / b.grad.norm())
    if max(worst.values()) > 1e-4:
        raise RuntimeError(f"The gradients are wrong ({worst}), so the times mean nothing. Run the tests.")
    return worst


def _measure_head(shape: Shape, trainable: bool, rounds: int, seed: int) -> dict[str, Any]:
    hidden, weight, labels = _batch(shape, seed)
    shuffle = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for round_ in range(rounds + 1):
        order = list(METHODS)
        shuffle.shuffle(order)
        for name in order:
            elapsed, *leaves = _step(METHODS[name], hidden, weight, labels, trainable)
            del leaves
            if round_ > 0:  # the first one warms caches and allocators up
                seconds[name].append(elapsed)
    ratios = {}
    for name, (slow, fast, least) in RATIOS.items():
        per_round = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        ratios[name] = {**_spread(per_round), "target": least.get("trainable" if trainable else "frozen")}
    peaks = {name: _peak_bytes(method, hidden, weight, labels, trainable) for name, method in METHODS.items()}
    return {
        "seconds": {name: _spread(values) for name, values in seconds.items()},
        "ratios": ratios,
        "transient_bytes": peaks,
        "transient_share_of_algorithm_1": {name: peak / peaks["algorithm_1"] for name, peak in peaks.items()},
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time every method at every shape, with a trainable and with a frozen head.

    Returns under "shapes", for each head CPU-seconds, ratios and transient bytes, with the command and versions.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shapes: dict[str, Any] = {}
    try:
        for name in args.shapes:
            shape = SHAPES[name]
            hidden, weight, labels = _batch(shape, args.seed)
            shapes[name] = {
                **asdict(shape),
                "T": labels.size(1),
                "supervised": int((labels != IGNORE_INDEX).sum()),
                "gradient_difference": _agreement(hidden, weight, labels),
            }
            del hidden, weight
            for head in ("trainable", "frozen"):
                shapes[name][head] = _measure_head(shape, head == "trainable", args.rounds, args.seed)
    finally:
        torch.set_num_threads(threads)
    result = {
        "command": f"python scripts/benchmark.py smile_head --shapes {' '.join(args.shapes)} "
        f"--rounds {args.rounds} --seed {args.seed}",
        "rounds": args.rounds,
        "seed": args.seed,
        "lambda": LAMBDA,
        "threads": 1,
        "processor": processor_name(),
        "versions": installed_versions(),
        "shapes": shapes,
    }
    return result


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch"))
    lines = [
        "## `smile_head`: head and loss, forward and backward",
        "",
        f"`{result['command']}`: {result['rounds']} rounds, seed {result['seed']}, fp32, one "
        f"thread of {result['processor']}, {versions}. Ratios of CPU-seconds within a round: median [quartiles]. "
        f"Mixtures have lambda = {result['lambda']}.",
        "",
        "| shape | head | ratio | median [quartiles] | at least | CPU-seconds |",
        "|---|---|---|---|---|---|",
    ]
    memory = ["| shape | head | " + " | ".join(name.replace("_", " ") for name in METHODS) + " |"]
    memory.append("|---|---" + "|---" * len(METHODS) + "|")
    for name, shape in result["shapes"].items():
        size = f"{name} (B {shape['B']}, T {shape['T']}, {shape['supervised']} supervised, V {shape['V']}, D {shape['D']})"
        for head in ("trainable", "frozen"):
            row = shape[head]
            for ratio, value in row["ratios"].items():
                slow, fast = (row["seconds"][method]["median"] for method in RATIOS[ratio][:2])
                target = "" if value["target"] is None else f"{value['target']:g}"
                quartiles = f"{value['median']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
                lines.append(f"| {size} | {head} | {ratio} | {quartiles} | {target} | {slow:.3f} / {fast:.3f} |")
            share = row["transient_share_of_algorithm_1"]
            cells = [f"{row['transient_bytes'][m] / 2**20:.0f} MiB ({share[m]:.1%})" for m in METHODS]
            memory.append(f"| {name} | {head} | " + " | ".join(cells) + " |")
    worst = max(max(shape["gradient_difference"].values()) for shape in result["shapes"].values())
    lines += [
        "",
        "Transient memory is the peak of torch's allocator during a step, from the allocation events of `torch.profiler` "
        "on a step that is not timed. It includes the gradient of the hidden states, but neither the gradient of the "
        "weight nor workspace inside the matrix library. The share of Algorithm 1's memory is in parentheses.",
        "",
        *memory,
        "",
        f"The gradients of the fast losses differ from the naive ones by at most {worst:.0e} (relative norm). The mixture "
        "and cross-entropy of supervised rows multiply supervised rows only; for the ratio without padding, every position "
        "is supervised.",
    ]
    return "\n".join(lines)
