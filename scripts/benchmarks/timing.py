"""Times pieces of work in turn: CPU seconds of this process, or CUDA events on a GPU."""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Work = Callable[[], Any]

LEAST_ROUNDS = 3
"""Fewer timed rounds say nothing; work of which they do not fit into the time is left out."""


@dataclass(frozen=True)
class Case:
    """What is timed side by side, after it was checked to compute the same."""

    size: str
    works: Mapping[str, Work]
    bars: Sequence[tuple[str, str, float | None]] = ()
    """Slower and faster work, and the least that the ratio of their times has to be."""
    prepare: Work | None = None
    """Called before each round, untimed: another batch, other lengths."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """How far the works differ, and what was not timed for which reason."""
    counts_operations: bool = False
    """Whether the operations of a work, and their share of the machine's matrix products per second, are measured."""


class TooSlowError(Exception):
    """A case does not fit into its time."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """`median`, and `low` and `high` (the quartiles)."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "low": low, "high": high}


def in_a_line(error: Exception) -> str:
    """Kind and beginning of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _seconds(work: Work, device: str) -> float:
    if device == "cpu":
        start = time.process_time()  # a busy machine disturbs it little
        work()
        return time.process_time() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3  # milliseconds


def _peak_bytes(work: Work) -> int:
    """Most bytes that the GPU's allocator held during the work above what it held before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def product_rate(device: str, side: int = 1024) -> float:
    """Operations per second of a product of two matrices, in bf16 on a GPU: the fastest of ten."""
    matrix = torch.randn(side, side, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    return 2 * side**3 / min(_seconds(lambda: matrix @ matrix, device) for _ in range(10))


def operations(work: Work) -> int:
    """Operations of the products and convolutions of a work."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def measure(
    case: Case, device: str, *, rounds: int, warm_up: int = 1, seed: int = 0, seconds: float = float("inf")
) -> dict[str, Any]:
    """Time the works of a case in turn, in a new order every round, with fewer rounds where the time is short.

    Returns under `works` the `seconds` (median and quartiles) of each, its `operations` if the case counts them, on a GPU its `peak_bytes`; work that fails or does not
    fit into memory has `failed` or `out_of_memory` instead. `ratios` are taken within a round, so that a busy machine slows both.
    Raises TooSlowError if the seconds do not suffice for a few rounds.
    """
    deadline = time.monotonic() + seconds
    taken: dict[str, list[float]] = {name: [] for name in case.works}
    without: dict[str, dict[str, Any]] = {}
    shuffle = random.Random(seed)

    def one_round(*, timed: bool) -> float:
        start = time.monotonic()
        if case.prepare is not None:
            case.prepare()
        order = [name for name in case.works if name not in without]
        shuffle.shuffle(order)
        for name in order:
            try:
                found = _seconds(case.works[name], device)
            except torch.OutOfMemoryError:
                without[name] = {"out_of_memory": True}
                torch.cuda.empty_cache()
            except Exception as error:  # the others are still measured
                traceback.print_exc()
                without[name] = {"failed": in_a_line(error)}
            else:
                if timed:
                    taken[name].append(found)
        return max(time.monotonic() - start, 1e-9)

    for number in range(warm_up):
        one = one_round(timed=False)
        if number or warm_up == 1:  # the first of several compiles kernels
            rounds = min(rounds, int((deadline - time.monotonic()) / one)) if seconds < float("inf") else rounds
            if rounds < 1 or (seconds < float("inf") and rounds < LEAST_ROUNDS):
                raise TooSlowError(f"one round takes {one:.1f} s, so too few of them fit into {seconds:.0f} s")
    for _ in range(rounds):
        one_round(timed=True)
    works = {name: without.get(name) or {"seconds": spread(taken[name])} for name in case.works}
    if device != "cpu":
        for name in case.works.keys() - without.keys():
            works[name]["peak_bytes"] = _peak_bytes(case.works[name])
    rate = product_rate(device)
    for name in case.works.keys() - without.keys() if case.counts_operations else ():
        works[name]["operations"] = operations(case.works[name])
        works[name]["share_of_product_rate"] = works[name]["operations"] / works[name]["seconds"]["median"] / rate
    ratios = {
        f"{slow} / {fast}": {**spread([a / b for a, b in zip(taken[slow], taken[fast], strict=True)]), "bar": bar}
        for slow, fast, bar in case.bars
        if slow not in without and fast not in without
    }
    return {"size": case.size, "rounds": rounds, "works": works, "ratios": ratios, **case.notes}
