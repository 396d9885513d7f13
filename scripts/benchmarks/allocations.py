"""What torch's allocator did during a measured piece of code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocations(step: Callable[[], object]) -> list[int]:
    """Bytes taken (> 0) and given back (< 0) during a step, in order; what the step returns is kept until it ends."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = step()
    kineto: Any = record.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]")
    del kept
    return [size for _, size in events]
