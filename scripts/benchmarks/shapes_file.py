"""Measures the shapes of a benchmark one by one, and keeps those of earlier starts in its file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.utils.io import write_json
from scripts.machine_facts import processor_name


def measure_each(
    kind: str, names: Sequence[Any], measure: Callable[[Any], dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure on one thread, and write `args.output` after each. Returns the results by name under `kind`, and how they were made."""
    threads = torch.get_num_threads()
    result: dict[str, Any] = {kind: {}, "rounds": args.rounds, "processor": processor_name()}
    result["versions"] = installed_versions()
    torch.set_num_threads(1)
    try:
        for name in names:
            result[kind][str(name)] = measure(name)
            if args.output is not None:
                write_json(args.output, result)
    finally:
        torch.set_num_threads(threads)
    return result


def measure_shapes(
    args: argparse.Namespace, measure: Callable[[str], dict[str, Any]], *, threads: int = 1
) -> dict[str, Any]:
    """Measure each of `args.shapes` and write it to `args.output`, where other shapes are kept. Returns `shapes`, by name."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    shapes: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        shapes = json.loads(args.output.read_text(encoding="utf-8"))["shapes"]
    result: dict[str, Any] = {"shapes": shapes}
    try:
        for name in args.shapes:
            shapes[name] = measure(name)
            if args.output is not None:
                write_json(args.output, result)
    finally:
        torch.set_num_threads(before)
    return result
