"""Calls methods other than `forward` on a model that FSDP2 shards."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["is_sharded", "with_gathered_weights"]

Result = TypeVar("Result")


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 shards the model."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def with_gathered_weights(model: Any, function: Callable[[], Result]) -> Result:
    """Call a function as if it were the model's forward, so that FSDP2 gathers the outermost weights for it.

    Generation and image encoding call submodules directly, while FSDP2 gathers these weights in forward only.
    """
    if not is_sharded(model):
        return function()
    from torch.distributed.fsdp import register_fsdp_forward_method

    model.call_gathered = types.MethodType(lambda self: function(), model)
    register_fsdp_forward_method(model, "call_gathered")
    try:
        return model.call_gathered()
    finally:
        del model.call_gathered
