"""Trainable weights are fp32: with a usual learning rate, 16-bit weights round most updates to zero.

A weight w in bfloat16 has 8 significant bits, so an update below |w| / 512 is lost. Adam's first updates are as large as the
learning rate, 1e-5 or less here, and weights are around 1e-2.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["keep_adapters_in_fp32", "refuse_trainable_16_bit", "require_fp32"]

logger = logging.getLogger(__name__)

_TRUE = {"1", "true", "yes", "on", "y", "t"}


def _is_low(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.element_size() < 4


def _to_fp32(parameter: nn.Parameter) -> None:
    # In place, so that an existing optimizer keeps its parameters.
    parameter.data = parameter.data.to(torch.float32)


def _inputs_to_fp32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and _is_low(value) else value

    return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}


class _OutputsTo:
    """Forward hook that casts the output to the dtype of the frozen modules after it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self.cast(part) for part in value)
        if isinstance(value, dict):  # transformers' ModelOutput is one
            for name, part in value.items():
                value[name] = self.cast(part)
        return value

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.cast(output)


def keep_adapters_in_fp32(model: nn.Module) -> list[str]:
    """Turn the trainable 16-bit weights of adapters into fp32: those of PEFT's tuners, and of `modules_to_save`.

    PEFT does so by default for the weights of its tuners, and leaves `modules_to_save` in the dtype of the base. The frozen
    base keeps its dtype; activations are cast between it and the modules of `modules_to_save`.
    """
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    adapters: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for key, copy in module.modules_to_save.items():
                low = {p.dtype for p in copy.parameters() if p.requires_grad and _is_low(p)}
                if low:
                    adapters |= {id(p): f"{name}.modules_to_save.{key}.{n}" for n, p in copy.named_parameters()}
                    copy.register_forward_pre_hook(_inputs_to_fp32, with_kwargs=True)
                    copy.register_forward_hook(_OutputsTo(low.pop()))
                    for buffer in copy.buffers():
                        if _is_low(buffer):
                            buffer.data = buffer.data.float()
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            for names in module.adapter_layer_names:
                part = getattr(module, names, None)
                if isinstance(part, (nn.ModuleDict, nn.ParameterDict)):
                    adapters |= {id(p): f"{name}.{names}.{n}" for n, p in part.named_parameters()}
    changed = []
    for parameter in model.parameters():
        if id(parameter) in adapters and parameter.requires_grad and _is_low(parameter):
            _to_fp32(parameter)
            changed.append(adapters[id(parameter)])
    if changed:
        logger.info("%d adapter weights were kept in fp32, among them %s.", len(changed), changed[0])
    return changed


def _has_master_copy(args: Any) -> bool:
    """Whether 16-bit weights have an fp32 master copy: DeepSpeed, and FSDP with mixed precision."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        return True
    fsdp = bool(getattr(args, "fsdp_plugin_args", None) or getattr(args, "fsdp", None))
    fsdp = fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in _TRUE
    return fsdp and getattr(args, "mixed_precision", "no") != "no"


def refuse_trainable_16_bit(model: nn.Module, args: Any) -> None:
    """Refuse trainable weights in 16 bits or less without an fp32 master copy.

    Quantised weights are frozen and never refused. DeepSpeed, and FSDP with mixed precision, update an fp32 copy.
    """
    if _has_master_copy(args):
        return
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    low = [(name, p) for name, p in trainable if _is_low(p)]
    if not low:
        return
    name, example = low[0]
    kind = str(example.dtype).removeprefix("torch.")
    remedy = (
        "Add the adapter without it (for LoRA bias='none'), or load the base in fp32"
        if hasattr(model, "peft_config")
        else "Load the model with dtype='float32' (the trainers do where it is given by name and model_init_kwargs names no "
        "dtype), or call model.float(); bf16=True still computes in 16 bits. To keep the base in 16 bits, train a LoRA: "
        "peft_config=LoraConfig(...)"
    )
    raise ValueError(
        f"{len(low)} of {len(trainable)} trainable weights are {kind} ({name}, ...). At this precision nearly every "
        f"update is rounded to zero, so almost nothing is learned. {remedy}."
    )


def require_fp32(model: nn.Module, args: Any) -> None:
    """Keep adapters in fp32, and refuse other trainable weights in 16 bits."""
    # DeepSpeed's ZeRO-3 needs adapters in the dtype of the base, and updates an fp32 copy.
    if getattr(args, "deepspeed_plugin", None) is None:
        keep_adapters_in_fp32(model)
    refuse_trainable_16_bit(model, args)
