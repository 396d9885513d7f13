"""Check that weights are finite, in one pass over those that training can change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["first_non_finite"]


def _local(parameter: Any) -> Tensor:
    """The part of a parameter that this process holds: all of it, or its shard."""
    shard = getattr(parameter, "ds_tensor", None)  # DeepSpeed, stage 3: the parameter itself is empty
    if shard is None:
        shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # DTensor of FSDP2
    return shard.detach()


def _changeable(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Names and values of trainable parameters and of buffers that are saved; whether each may hold infinity."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, _local(parameter), False
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            # Some buffers are masks with minus infinity.
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, _local(buffer), True


def first_non_finite(model: nn.Module) -> str | None:
    """Name of the first weight of this process with NaN or infinity, without copying weights."""
    names: list[str] = []
    bad: list[Tensor] = []
    for name, values, may_be_infinite in _changeable(model):
        if values.numel() and values.is_floating_point() and values.device.type != "meta":
            # The largest magnitude is NaN if any value is, and cannot overflow.
            largest = torch.linalg.vector_norm(values, ord=float("inf"))
            names.append(name.removeprefix("module."))
            bad.append(largest.isnan() if may_be_infinite else ~largest.isfinite())
    flags: list[bool] = []
    for flag in _together(bad):
        flags += flag
    return next((name for name, flag in zip(names, flags, strict=True) if flag), None)


def _together(bad: list[Tensor]) -> Iterator[list[bool]]:
    """The flags in order, fetched in one transfer per run of flags on the same device."""
    start = 0
    for stop in range(1, len(bad) + 1):
        if stop == len(bad) or bad[stop].device != bad[start].device:
            yield torch.stack(bad[start:stop]).tolist()
            start = stop
