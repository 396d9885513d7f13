"""Everything that a GPU has to show, in under 8 minutes: losses, training steps, generation, scorer, search, loading.

    python scripts/benchmark.py gpu

Random weights of published shapes, bf16, no network. Time is that of CUDA events after warm-up, memory the allocator's peak
above what was there before. Every section has a time budget; what does not fit into it is reported with the reason.
`--device cpu --shapes tiny` runs the same code anywhere; its times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.utils.io import write_json
from scripts.benchmarks.gpu_data import MINES, PHOTOS, SCORERS, measure_loader, measure_mining, measure_scorer
from scripts.benchmarks.gpu_heads import HEADS, measure_heads
from scripts.benchmarks.gpu_steps import (
    COMPILED_SHAPES,
    RL_SHAPES,
    STEP_SHAPES,
    measure_compiled,
    measure_generation,
    measure_rl,
    measure_smile_step,
)
from scripts.benchmarks.gpu_timing import Budget, OverBudgetError, in_a_line, ready
from scripts.machine_facts import processor_name

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "benchmark_gpu.json"


@dataclass(frozen=True)
class Section:
    """What is measured, at which shapes, and its share of the time."""

    measure: Callable[..., dict[str, Any]]
    shapes: Mapping[str, Any]
    share: float


SECTIONS = {
    "smile_head": Section(measure_heads, HEADS, 0.22),
    "smile_step": Section(measure_smile_step, STEP_SHAPES, 0.15),
    "rl_step": Section(measure_rl, RL_SHAPES, 0.22),
    "generation": Section(measure_generation, RL_SHAPES, 0.13),
    "scorer": Section(measure_scorer, SCORERS, 0.06),
    "loader": Section(measure_loader, PHOTOS, 0.04),
    "mining": Section(measure_mining, MINES, 0.06),
    "compiled_generation": Section(measure_compiled, COMPILED_SHAPES, 0.12),
}
"""The shares add up to 1; time that a section leaves is shared by those after it."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    shapes = sorted({name for section in SECTIONS.values() for name in section.shapes})
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu is for tests of the code.")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="What to measure.")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=shapes,
        default=[name for name in shapes if name != "tiny"],
        help="At which sizes.",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="Of weights and hidden states.")
    parser.add_argument("--minutes", type=float, default=7.5, help="Time budget of all sections together.")
    parser.add_argument("--rounds", type=int, default=20, help="Timed ones; fewer where the budget is short.")
    parser.add_argument("--warm_up", type=int, default=3, help="Rounds before them.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights, batches and order.")
    parser.set_defaults(write=True, output=OUTPUT)


def _hardware(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": processor_name()}
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def _measured(section: Section, shape: str, args: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Of one shape, with its `seconds_in_all`; or why it was `left_out`, or why it `failed`."""
    start = time.monotonic()
    try:
        with budget.enforced():
            found = section.measure(
                shape,
                args.device,
                _DTYPES[args.dtype],
                rounds=args.rounds,
                warm_up=args.warm_up,
                seed=args.seed,
                budget=budget,
            )
    except OverBudgetError as error:
        return {"left_out": str(error)}
    except torch.OutOfMemoryError:
        return {"left_out": "out of memory"}
    except Exception as error:  # the other sections still have something to show
        traceback.print_exc()
        return {"failed": in_a_line(error)}
    finally:
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return {**found, "seconds_in_all": time.monotonic() - start}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every section at every shape it has, within the budget.

    Returns under `sections` by section and shape what was measured, was left out or failed, with device, command and
    versions. `failed` counts the failures.
    """
    why = ready(args.device)
    if why is not None:
        raise SystemExit(why)
    sections: dict[str, dict[str, Any]] = {}
    result = {
        "command": f"python scripts/benchmark.py gpu --device {args.device} --sections {' '.join(args.sections)} --shapes "
        f"{' '.join(args.shapes)} --dtype {args.dtype} --minutes {args.minutes:g} --rounds {args.rounds} --warm_up "
        f"{args.warm_up} --seed {args.seed}",
        "dtype": args.dtype,
        "minutes": args.minutes,
        **_hardware(args.device),
        "versions": installed_versions(),
        "sections": sections,
        "failed": 0,
    }
    start, shares, used = time.monotonic(), sum(SECTIONS[name].share for name in args.sections), 0.0
    for name in args.sections:
        section, sections[name] = SECTIONS[name], {}
        used += section.share / shares
        whole = Budget(start + 60 * args.minutes * used)
        shapes = [shape for shape in args.shapes if shape in section.shapes]
        for index, shape in enumerate(shapes):
            found = _measured(section, shape, args, whole.part(len(shapes) - index))
            sections[name][shape] = found
            result["failed"] += sum("failed" in one for one in (found, *found.get("steps", {}).values()))
            write_json(args.output, result)  # measurements are kept however the run ends
            print(
                f"{time.monotonic() - start:5.0f} s  {name}, {shape}: {_outcome(found)}", file=sys.stderr, flush=True
            )
    return result


def _outcome(found: Mapping[str, Any]) -> str:
    """What became of a shape."""
    return next(
        (f"{key.replace('_', ' ')}: {found[key]}" for key in ("left_out", "failed") if key in found), "measured"
    )


def _lines(shape: str, measured: Mapping[str, Any]) -> list[str]:
    """Rows of the table of a section."""
    if "steps" not in measured:
        return [f"| {shape} | {_outcome(measured)} | | | |"]
    lines = []
    for name, one in measured["steps"].items():
        if "seconds" not in one:
            reason = f"failed: {one['failed']}" if "failed" in one else "out of memory"
            lines.append(f"| {shape} | {name} | {reason} | | |")
            continue
        seconds = one["seconds"]
        time_ms = f"{seconds['median'] * 1e3:.2f} [{seconds['low'] * 1e3:.2f}, {seconds['high'] * 1e3:.2f}]"
        memory = "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**20:.0f} MiB"
        lines.append(f"| {shape} | {name} | {time_ms} | {memory} | {one['rounds']} |")
    lines += [f"| {shape} | {name} | not timed: {why} | | |" for name, why in measured.get("refused", {}).items()]
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch", "transformers"))
    cuda = f", CUDA {result['cuda']}" if result.get("cuda") else ""
    lines = [
        "## `gpu`: everything on a GPU" if cuda else "## `gpu`: a test of its code on a CPU",
        "",
        f"`{result['command']}` on {result['device']}{cuda}, {versions}; {result['dtype']}, random weights. Milliseconds over "
        f"alternating rounds: median [quartiles]. Memory is the allocator's peak minus its value before. Budget: "
        f"{result['minutes']:g} minutes in all; what does not fit into its part of it is left out.",
    ]
    missing: dict[str, None] = {}
    for section, shapes in result["sections"].items():
        lines += ["", f"### `{section}`", "", "| shape | | ms | memory | rounds |", "|:--|:--|--:|--:|--:|"]
        for name, measured in shapes.items():
            missing |= dict.fromkeys(measured.get("not_installed", ()))
            size = f"{name} ({measured['size']})" if "size" in measured else name
            lines += _lines(size, measured)
    if missing:
        lines += ["", f"Not installed, and so not compared: {', '.join(missing)}."]
    return "\n".join(lines)
