"""A GPU at full size: heads and losses, the reinforcement step, the scorer, the search for similar images.

    python scripts/benchmark.py --device cuda --output docs/results/benchmark_device.json

Random weights of published shapes, bf16. Time is that of CUDA events after warm-up, memory the allocator's peak above what was there
before. `--device cpu --shapes tiny` runs the same code anywhere; its times say nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from hf_captionrl.io import write_json
from hf_captionrl.reports.versions import installed_versions
from scripts.benchmarks.device_heads import HEADS, measure_heads
from scripts.benchmarks.device_steps import MINES, RL_SHAPES, SCORERS, measure_mining, measure_rl, measure_scorer
from scripts.benchmarks.device_timing import ready
from scripts.machine import processor_name

PARTS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "smile_head": (measure_heads, HEADS),
    "rl_step": (measure_rl, RL_SHAPES),
    "scorer": (measure_scorer, SCORERS),
    "mining": (measure_mining, MINES),
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    shapes = sorted({name for _, of_part in PARTS.values() for name in of_part})
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu is for tests of the code.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="What to measure.")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=shapes,
        default=[name for name in shapes if name != "tiny"],
        help="At which sizes.",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="Of weights and hidden states.")
    parser.add_argument("--rounds", type=int, default=20, help="Timed ones.")
    parser.add_argument("--warm_up", type=int, default=5, help="Rounds before them.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights, batches and order.")


def _hardware(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": processor_name()}
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every part at every shape it has.

    Returns under `parts` by part and shape what was measured, with device, command and versions.
    """
    why = ready(args.device)
    if why is not None:
        raise SystemExit(why)
    parts: dict[str, Any] = {}
    result = {
        "command": f"python scripts/benchmark.py --device {args.device} --parts {' '.join(args.parts)} --shapes "
        f"{' '.join(args.shapes)} --dtype {args.dtype} --rounds {args.rounds} --warm_up {args.warm_up} --seed {args.seed}",
        "dtype": args.dtype,
        "rounds": args.rounds,
        **_hardware(args.device),
        "versions": installed_versions(),
        "parts": parts,
    }
    for part in args.parts:
        function, shapes = PARTS[part]
        for name in [name for name in args.shapes if name in shapes]:
            measured = function(
                name, args.device, _DTYPES[args.dtype], rounds=args.rounds, warm_up=args.warm_up, seed=args.seed
            )
            parts.setdefault(part, {})[name] = measured
            if args.output is not None:
                write_json(args.output, result)  # measurements are kept however the run ends
    return result


def _lines(title: str, measured: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, one in measured.items():
        if one.get("out_of_memory"):
            lines.append(f"| {title} | {name} | out of memory | |")
            continue
        seconds = one["seconds"]
        time = f"{seconds['median'] * 1e3:.2f} [{seconds['low'] * 1e3:.2f}, {seconds['high'] * 1e3:.2f}]"
        memory = "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**20:.0f} MiB"
        lines.append(f"| {title} | {name} | {time} | {memory} |")
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch", "transformers"))
    cuda = f", CUDA {result['cuda']}" if result.get("cuda") else ""
    lines = [
        "## On a GPU",
        "",
        f"`{result['command']}` on {result['device']}{cuda}, {versions}; {result['dtype']}, random weights. Milliseconds over "
        f"{result['rounds']} alternating rounds: median [quartiles]. Memory is the allocator's peak minus its value before.",
    ]
    missing: dict[str, None] = {}
    for part, shapes in result["parts"].items():
        lines += ["", f"### `{part}`", "", "| shape | | ms | memory |", "|:--|:--|--:|--:|"]
        for name, measured in shapes.items():
            missing |= dict.fromkeys(measured.get("not_installed", ()))
            if "steps" in measured:
                lines += _lines(name, measured["steps"])
                continue
            size = f"{name} (B {measured['B']}, T {measured['T']}, V {measured['V']}, D {measured['D']})"
            for head in ("trainable", "frozen"):
                lines += _lines(f"{size}, {head}", measured[head])
    if missing:
        lines += ["", f"Not installed, and so not compared: {', '.join(missing)}."]
    return "\n".join(lines)
