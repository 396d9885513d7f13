"""Models that do not change in training: the reference model of the KL penalty, and the scorers."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import str_to_bool
from torch import Tensor, nn

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.captioners.loading import load_captioner


def refuse_data_parallel(args: Any, model: Any = None) -> None:
    """Refuse `torch.nn.DataParallel`, in which a Trainer wraps the model when one process sees several GPUs.

    It would split the batch of a step, but bags, rollouts and the number of supervised tokens belong to a process.
    """
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    if args.n_gpu > 1 and not spread:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs. Use one process per GPU (`accelerate launch --num_processes {args.n_gpu} train.py`), "
            "or CUDA_VISIBLE_DEVICES=0."
        )


def autocast(args: Any) -> torch.autocast:
    """The run's mixed precision, outside a Trainer's loss: captions are generated as they are trained."""
    return torch.autocast(
        args.device.type, torch.bfloat16 if args.bf16 else torch.float16, enabled=bool(args.bf16 or args.fp16)
    )


# --- Trainable weights are fp32: with a usual learning rate, 16-bit weights round most updates to zero ---------------
# A weight w in bfloat16 has 8 significant bits, so an update below |w| / 512 is lost. Adam's first updates are as large as the
# learning rate, 1e-5 or less here, and weights are around 1e-2.


def _is_low(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.element_size() < 4


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of an output in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_cast(part, dtype) for part in value)
    if isinstance(value, dict):  # transformers' ModelOutput is one
        for name, part in value.items():
            value[name] = _cast(part, dtype)
    return value


def _inputs_in_fp32(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Only the tensors themselves: a dict may be shared with the frozen modules."""

    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and _is_low(value) else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def keep_adapters_in_fp32(model: nn.Module) -> None:
    """Turn the trainable 16-bit weights of PEFT's tuners and of `modules_to_save` into fp32.

    The frozen base keeps its dtype; activations are cast between it and the modules of `modules_to_save`.
    """
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    adapters: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                low = {p.dtype for p in copy.parameters() if p.requires_grad and _is_low(p)}
                if low:
                    adapters.append(copy)
                    copy.register_forward_pre_hook(_inputs_in_fp32, with_kwargs=True)
                    dtype = low.pop()
                    copy.register_forward_hook(lambda _, __, output, dtype=dtype: _cast(output, dtype))
                    for buffer in copy.buffers():
                        if _is_low(buffer):
                            buffer.data = buffer.data.float()
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            parts = (getattr(module, name, None) for name in module.adapter_layer_names)
            adapters += [part for part in parts if isinstance(part, (nn.ModuleDict, nn.ParameterDict))]
    for parameter in (p for part in adapters for p in part.parameters()):
        if parameter.requires_grad and _is_low(parameter):
            # In place, so that an existing optimizer keeps its parameters.
            parameter.data = parameter.data.to(torch.float32)


def require_fp32(model: nn.Module, args: Any) -> None:
    """Keep adapters in fp32; refuse other trainable 16-bit weights without an fp32 copy, as DeepSpeed and mixed FSDP have one."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        return  # ZeRO-3 needs adapters in the dtype of the base
    keep_adapters_in_fp32(model)
    fsdp = getattr(args, "fsdp_plugin_args", None) or getattr(args, "fsdp", None)
    fsdp = fsdp or str_to_bool(os.environ.get("ACCELERATE_USE_FSDP") or "0")
    if fsdp and getattr(args, "mixed_precision", "no") != "no":
        return
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    low = [(name, p) for name, p in trainable if _is_low(p)]
    if not low:
        return
    name, example = low[0]
    raise ValueError(
        f"{len(low)} of {len(trainable)} trainable weights are {str(example.dtype)[6:]} ({name}, ...), so that nearly every update is "
        "rounded to zero. Load the model with dtype='float32' (bf16=True still computes in 16 bits), or train a LoRA with bias='none': "
        "peft_config=LoraConfig(...)."
    )


# --- The captioner that a trainer trains, made from its argument `model`: loading, adapter, frozen tower, precision ---


def check_model_init_kwargs(settings: Any) -> dict[str, Any] | None:
    """Loading arguments with the dtype by name; refuses arguments that `from_pretrained` does not accept."""
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ValueError(f'model_init_kwargs is {settings!r}. Use a dict or JSON, such as {{"dtype": "bfloat16"}}.')
    settings = dict(settings)
    if "torch_dtype" in settings:
        settings.setdefault("dtype", settings.pop("torch_dtype"))
    dtype = settings.get("dtype")
    if isinstance(dtype, torch.dtype):
        settings["dtype"] = str(dtype).removeprefix("torch.")  # as JSON has it
    elif dtype not in (None, "float32", "bfloat16", "float16", "auto"):
        raise ValueError(f"model_init_kwargs has dtype {dtype!r}. Use 'float32', 'bfloat16', 'float16' or 'auto'.")
    return settings


def default_output_dir(model: Any, method: str) -> str:
    """Output folder of a run without a configuration, named as in TRL."""
    if isinstance(model, (str, os.PathLike)):
        name: Any = os.fspath(model)
    else:
        inner = model.base_model if isinstance(model, Captioner) else model
        name = getattr(inner, "name_or_path", "") or getattr(getattr(inner, "config", None), "model_type", "")
    # Of "scenes:blip-mle" the part after the colon, which is not allowed in every file system.
    name = os.path.basename(str(name).rstrip("/")).rpartition(":")[2]
    return f"{name or 'captioner'}-{method}"


def make_policy(model: Any, args: Any, *, processor: Any = None, peft_config: Any = None) -> Captioner:
    """The captioner that a trainer trains."""
    settings: dict[str, Any] = {}
    if isinstance(model, (str, os.PathLike)):
        # fp32 by default, whatever the dtype of the checkpoint, as in TRL.
        settings = {"dtype": "float32", **(args.model_init_kwargs or {})}
    elif args.model_init_kwargs:
        raise ValueError("model_init_kwargs is set, but the model is loaded already. Pass it by name.")
    captioner = model
    if not isinstance(model, Captioner):
        captioner = load_captioner(model, processor=processor, prompt=args.prompt, **settings)
    elif args.prompt is not None:
        captioner.prompt = args.prompt
    if peft_config is not None:
        captioner.add_adapter(captioner.lora_config(**peft_config) if isinstance(peft_config, dict) else peft_config)
    if args.freeze_vision_tower:
        adapted = {n for n, p in captioner.model.named_parameters() if p.requires_grad}
        captioner.freeze_vision()
        lost = sorted(adapted - {n for n, p in captioner.model.named_parameters() if p.requires_grad})
        if lost and hasattr(captioner.model, "peft_config"):
            raise ValueError(
                f"The adapter has weights in the vision tower ({lost[0]}, ...). Use freeze_vision_tower=False, or other target_modules."
            )
    require_fp32(captioner.model, args)
    return captioner


def make_reference(captioner: Captioner) -> Captioner:
    """The current captioner as reference: itself if its adapter can be disabled, else a frozen copy."""
    if hasattr(captioner.model, "disable_adapter"):
        return captioner
    reference = copy.copy(captioner)
    reference.model = copy.deepcopy(captioner.model).requires_grad_(False).eval()
    return reference


@contextmanager
def reference_policy(reference: Captioner, policy: Captioner) -> Iterator[Captioner]:
    """The reference on the policy's device, in eval mode, adapter disabled."""
    if reference is not policy and reference.device != policy.device:
        reference.model.to(policy.device)
    without = reference.model.disable_adapter() if reference is policy else nullcontext()
    with without, evaluating(reference.model):
        yield reference
