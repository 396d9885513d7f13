"""Measures the shapes of a benchmark one by one, and keeps those of earlier starts in its file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from hf_captionrl.io import write_json


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
