"""Times what this project claims to be fast, on a CPU or on a GPU.

    python scripts/benchmark.py                                # everything, on one thread
    python scripts/benchmark.py rl_step --shapes blip-base --rounds 9 --output rl_step.json
    python scripts/benchmark.py --device cuda --minutes 8      # everything on a GPU, in bf16

Works that are compared run in turn in one process on the same weights and data, after it was checked that they compute the same; a
work that computes something else is not timed. Weights are random, in the shapes of published models. Times are CPU seconds, or CUDA
events on a GPU; ratios are taken within a round: median [quartiles], and the bar that the median has to reach.
`--device cpu --shapes tiny` runs all of the code anywhere; its times say nothing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only scripts/ is on the path

from hf_captionrl.utils.io import installed_versions, write_json
from reproduction.runs import processor_name
from scripts.benchmarks import data, models, reinforcement, smile
from scripts.benchmarks.timing import Case, TooSlowError, in_a_line, measure

SECTIONS: dict[str, tuple[Callable[..., Case], Mapping[str, Any]]] = {
    "smile_head": (functools.partial(smile.head_case, trainable=True), smile.HEADS),
    "smile_head_frozen": (functools.partial(smile.head_case, trainable=False), smile.HEADS),
    "smile_step": (smile.step_case, models.STEP_SHAPES),
    "rl_step": (reinforcement.rl_case, models.RL_SHAPES),
    "generation": (reinforcement.generation_case, {k: v for k, v in models.RL_SHAPES.items() if k != "scenes"}),
    "metrics": (data.metrics_case, data.METRICS),
    "loader": (data.loader_case, data.SIDES),
}
"""What makes the case of a shape, and the shapes."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FOR_A_GPU = {"llama-3-8b", "llama-13b"}


def _measured(section: str, shape: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The numbers of a shape, or why it was `left_out` or `failed`."""
    started = time.monotonic()
    try:
        case = SECTIONS[section][0](shape, args.device, DTYPES[args.dtype], args.seed)
        left = seconds - (time.monotonic() - started)
        settings = {"rounds": args.rounds, "warm_up": args.warm_up, "seed": args.seed}
        return measure(case, args.device, **settings, seconds=left)
    except TooSlowError as error:
        return {"left_out": str(error)}
    except torch.OutOfMemoryError:
        return {"left_out": "out of memory"}
    except Exception as error:  # the others still have something to show
        traceback.print_exc()
        return {"failed": in_a_line(error)}
    finally:
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def to_lines(section: str, shape: str, found: Mapping[str, Any]) -> list[str]:
    """The numbers as text."""
    if "works" not in found:
        return [f"{section}, {shape}: {found}"]
    lines = [f"{section}, {shape} ({found['size']}), {found['rounds']} rounds"]
    for name, work in found["works"].items():
        memory = f", {work['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in work else ""
        what = f"{1e3 * work['seconds']['median']:.2f} ms{memory}" if "seconds" in work else str(work)
        if "operations" in work:
            what += f", {work['operations'] / 1e9:.1f} GFLOP, {work['share_of_product_rate']:.2f} of the product rate"
        lines.append(f"  {name}: {what}")
    for name, ratio in found["ratios"].items():
        bar = "" if ratio["bar"] is None else f", at least {ratio['bar']:.2f}"
        lines.append(f"  {name}: {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]{bar}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure sections; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted({shape for _, known in SECTIONS.values() for shape in known})
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--shapes", nargs="+", choices=shapes, help="which ones (default: all that fit the device)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights or autocast (default: fp32 on a CPU, else bf16)")
    parser.add_argument("--rounds", type=int, default=9, help="timed ones (default: %(default)s)")
    parser.add_argument("--warm_up", type=int, default=1, help="rounds before them (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="for everything; what does not fit is left out"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON to write, after each shape")
    args = parser.parse_args(argv)
    if unknown := set(args.sections) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}; use {', '.join(SECTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; try the code with --device cpu --shapes tiny")
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    wanted = args.shapes or [s for s in shapes if s != "tiny" and (args.device == "cuda" or s not in FOR_A_GPU)]
    todo = [(name, shape) for name in args.sections or SECTIONS for shape in SECTIONS[name][1] if shape in wanted]
    device = processor_name() if args.device == "cpu" else torch.cuda.get_device_name()
    settings = {"dtype": args.dtype, "threads": args.threads, "seed": args.seed}
    sections: dict[str, dict[str, Any]] = {}
    result = {"device": device, **settings, "versions": installed_versions(), "sections": sections}
    threads, deadline, failed = torch.get_num_threads(), time.monotonic() + 60 * args.minutes, False
    torch.set_num_threads(args.threads)
    try:
        for number, (name, shape) in enumerate(todo):
            # What a shape leaves of its time is shared by those after it.
            found = _measured(name, shape, args, (deadline - time.monotonic()) / (len(todo) - number))
            sections.setdefault(name, {})[shape] = found
            failed |= "failed" in found or any("failed" in work for work in found.get("works", {}).values())
            print(*to_lines(name, shape, found), sep="\n", flush=True)
            if args.output is not None:
                write_json(args.output, result)
    finally:
        torch.set_num_threads(threads)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
