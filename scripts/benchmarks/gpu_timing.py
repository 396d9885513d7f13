"""Time and memory of work on a GPU within a time budget, by CUDA events; on a CPU by the clock, to test the same code."""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from scripts.benchmarks.spread import spread

Work = Callable[[], Any]

LEAST_ROUNDS = 3
"""Fewer timed rounds say nothing; if they do not fit into the budget, the work is left out."""


class OverBudgetError(Exception):
    """A measurement does not fit into its time budget."""


@dataclass(frozen=True)
class Budget:
    """A deadline in seconds of `time.monotonic`."""

    deadline: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """A budget that begins now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def part(self, number: int) -> Budget:
        """The budget of the next of `number` parts; what a part leaves is shared by those after it."""
        return Budget.of(self.left / number)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Interrupt the work at the deadline, whatever it is doing."""
        if self.left <= 0:
            raise OverBudgetError("no time was left for it")
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            yield  # without signals, only the number of rounds is limited
            return
        seconds = self.left

        def interrupt(*_: object) -> NoReturn:
            raise OverBudgetError(f"it was interrupted after its {seconds:.0f} s")

        handler = signal.signal(signal.SIGALRM, interrupt)
        start = time.monotonic()
        before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if before:  # another timer was running
                signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 0.01))


def in_a_line(error: Exception) -> str:
    """Kind and beginning of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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


def _fitting(rounds: int, seconds: float, left: float) -> int:
    """Timed rounds that fit into the time left, together with one round that measures memory."""
    number = min(rounds, int(left / seconds) - 1)
    if number < min(LEAST_ROUNDS, rounds):
        raise OverBudgetError(
            f"one round takes {seconds:.1f} s, so {min(LEAST_ROUNDS, rounds)} of them do not fit into the {max(left, 0):.1f} s "
            "that were left of its budget"
        )
    return number


def measure(
    works: Mapping[str, Work],
    device: str,
    *,
    rounds: int,
    warm_up: int,
    seed: int = 0,
    budget: Budget | None = None,
) -> dict[str, dict[str, Any]]:
    """Time several pieces of work in turn, in a new order every round, with fewer rounds where the budget is short.

    Returns for each name `seconds` (median and quartiles), `rounds`, and `peak_bytes` above what was there before; what
    does not fit into the device's memory has `out_of_memory` instead, and what raises another error `failed` with it.
    Raises OverBudgetError if the budget is too short for a few rounds.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    without: dict[str, dict[str, Any]] = {}
    shuffle = random.Random(seed)

    def one_round(*, timed: bool) -> float:
        start = time.monotonic()
        order = [name for name in works if name not in without]
        shuffle.shuffle(order)
        for name in order:
            try:
                seconds = _seconds(works[name], device)
            except OverBudgetError:
                raise
            except torch.OutOfMemoryError:
                without[name] = {"out_of_memory": True}
                torch.cuda.empty_cache()
                continue
            except Exception as error:  # the others are still measured
                traceback.print_exc()
                without[name] = {"failed": in_a_line(error)}
                continue
            if timed:
                taken[name].append(seconds)
        return max(time.monotonic() - start, 1e-9)

    seconds = 0.0
    for number in range(warm_up):
        seconds = one_round(timed=False)
        if budget is not None and number:  # the first one compiles kernels
            _fitting(rounds, seconds, budget.left)
    if budget is not None and warm_up:
        rounds = _fitting(rounds, seconds, budget.left)
    for _ in range(rounds):
        one_round(timed=True)
    return {
        name: without.get(name)
        or {"seconds": spread(taken[name]), "rounds": rounds, "peak_bytes": _peak_bytes(work, device)}
        for name, work in works.items()
    }
