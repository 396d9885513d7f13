r"""Represents an output projection, possibly wrapped by PEFT, as a single weight.

Legend: B captions, T tokens, V vocabulary, D features, r rank.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["head_projection", "is_tappable"]


def _active(module: nn.Module) -> Any:
    """The module that computes the output: PEFT's trained copy, or the base layer of a disabled or merged adapter."""
    if isinstance(module, nn.Linear):
        return module
    from peft.tuners.lora import Linear as LoraLinear
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        if module.disable_adapters or not module.active_adapters:
            return _active(module.original_module)
        return _active(module.modules_to_save[module.active_adapters[0]])
    if isinstance(module, LoraLinear) and (module.disable_adapters or module.merged or not _adapters(module)):
        return _active(module.base_layer)
    return module


def _adapters(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


def _is_plain(module: Any) -> bool:
    """Whether the module is a dense linear layer; quantised layers pack their weight."""
    return isinstance(module, nn.Linear) and module.weight.dim() == 2 and module.weight.is_floating_point()


def is_tappable(head: nn.Module) -> bool:
    """Whether the projection is a linear layer, possibly with LoRA or as one of PEFT's `modules_to_save`."""
    module = _active(head)
    if _is_plain(module):
        return True
    from peft.tuners.lora import Linear as LoraLinear

    return (
        type(module) is LoraLinear
        and _is_plain(module.base_layer)
        and not module.fan_in_fan_out
        and not any(name in module.lora_variant for name in _adapters(module))
    )


def head_projection(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Input `(B, T, D')`, weight `(V, D')` and bias such that `F.linear` of them equals the projection of `hidden`.

    LoRA on the head is `h W^T + s * dropout(h) A^T B^T = [h, s * dropout(h) A^T] [W, B]^T`, so that `D' = D + r`. This
    is exact, also with dropout. Without LoRA, `D' = D`.
    """
    module = _active(head)
    base = module if isinstance(module, nn.Linear) else module.base_layer
    weight, bias = base.weight, base.bias
    if hasattr(weight, "placements"):
        raise ValueError(
            "The output projection is a sharded DTensor. Use FSDP2 or ZeRO-3, which gather it in the model's "
            "forward, and exclude the output projection from the tensor-parallel plan."
        )
    if base is module:
        return hidden, weight, bias
    inputs, weights = [hidden], [weight]
    for name in _adapters(module):
        lora_a, lora_b, scaling = module.lora_A[name], module.lora_B[name], module.scaling[name]
        low_rank = lora_a(module.lora_dropout[name](hidden.to(lora_a.weight.dtype))) * scaling  # (B, T, r)
        inputs.append(low_rank.to(hidden.dtype))
        weights.append(lora_b.weight.to(weight.dtype))  # (V, r)
        if lora_b.bias is not None:
            extra = lora_b.bias.to(weight.dtype) * scaling
            bias = extra if bias is None else bias + extra
    return torch.cat(inputs, -1), torch.cat(weights, -1), bias
