"""Time and memory of work on a GPU, by CUDA events; on a CPU by the clock, to test the same code."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scripts.benchmarks.spread import spread

Work = Callable[[], Any]


def ready(device: str) -> str | None:
    """Why nothing can be measured on a device."""
    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device here, so nothing was measured; run this on a machine with one, "
            "or try the code at tiny shapes with --device cpu --shapes tiny."
        )
    return None


def _seconds(work: Work, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3  # milliseconds


def _peak_bytes(work: Work, device: str) -> int | None:
    """Most bytes that the allocator held during the work above what it held before; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    works: Mapping[str, Work], device: str, *, rounds: int, warm_up: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Time several pieces of work in turn, in a new order every round.

    Returns for each name `seconds` (median and quartiles) and `peak_bytes` above what was there before; what does not
    fit into the device's memory has `out_of_memory` instead.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    full: set[str] = set()
    shuffle = random.Random(seed)
    for number in range(warm_up + rounds):
        order = [name for name in works if name not in full]
        shuffle.shuffle(order)
        for name in order:
            try:
                seconds = _seconds(works[name], device)
            except torch.OutOfMemoryError:
                full.add(name)
                torch.cuda.empty_cache()
                continue
            if number >= warm_up:
                taken[name].append(seconds)
    return {
        name: {"out_of_memory": True}
        if name in full
        else {"seconds": spread(taken[name]), "peak_bytes": _peak_bytes(work, device)}
        for name, work in works.items()
    }
