"""Numbers and objects of all processes, on every process."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object

__all__ = ["gather_values", "mean_over_processes", "means_over_processes"]


def means_over_processes(accelerator: Any, values: list[float]) -> list[float]:
    """Means of numbers over the processes, in float64."""
    if accelerator.num_processes == 1 or not values:
        return values
    mine = torch.tensor([values], dtype=torch.float64, device=accelerator.device)
    return accelerator.gather(mine).mean(0).tolist()


def mean_over_processes(accelerator: Any, value: float) -> float:
    """Mean of a number over the processes."""
    return means_over_processes(accelerator, [value])[0]


def gather_values(accelerator: Any, value: Any) -> list[Any]:
    """The value of each process."""
    return [value] if accelerator.num_processes == 1 else gather_object([value])
