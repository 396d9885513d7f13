"""Numbers and objects of all processes, on every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object

__all__ = ["gather_values", "mean_over_processes", "means_over_processes", "on_main_process"]

_Found = TypeVar("_Found")


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


def on_main_process(accelerator: Any, function: Callable[[], _Found]) -> _Found:
    """Result or error of a function that only the main process calls, on every process."""
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = function()
        except (OSError, ValueError, RuntimeError) as error:
            found[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]
