"""The captioner that a trainer trains, made from its argument `model`: loading, adapter, frozen tower, precision."""

from __future__ import annotations

import os
from typing import Any

import torch

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import load_captioner
from hf_captionrl.trainers.precision import require_fp32

__all__ = ["check_model_init_kwargs", "default_output_dir", "make_policy"]

_DTYPES = ("float32", "bfloat16", "float16", "auto")


def check_model_init_kwargs(settings: Any) -> dict[str, Any] | None:
    """Loading arguments with the dtype by name; refuses arguments that `from_pretrained` does not accept."""
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ValueError(
            f"model_init_kwargs is {settings!r}. Use a dict or JSON, for instance "
            '{"dtype": "bfloat16", "attn_implementation": "sdpa"}.'
        )
    settings = dict(settings)
    if "torch_dtype" in settings:
        settings.setdefault("dtype", settings.pop("torch_dtype"))
    dtype = settings.get("dtype")
    if isinstance(dtype, torch.dtype):
        settings["dtype"] = str(dtype).removeprefix("torch.")  # as JSON has it
    elif dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"model_init_kwargs has dtype {dtype!r}. Use one of {', '.join(map(repr, _DTYPES))}.")
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


def _loaded(model: Any, args: Any, processor: Any) -> Captioner:
    if isinstance(model, (str, os.PathLike)):
        # fp32 by default, whatever the dtype of the checkpoint, as in TRL.
        settings = {"dtype": "float32", **(args.model_init_kwargs or {})}
        return load_captioner(model, processor=processor, prompt=args.prompt, **settings)
    if args.model_init_kwargs:
        raise ValueError(
            f"model_init_kwargs is {args.model_init_kwargs}, but the model is a {type(model).__name__}, which is loaded "
            "already. Pass the model by name, or leave model_init_kwargs out."
        )
    if isinstance(model, Captioner):
        if args.prompt is not None:
            model.prompt = args.prompt
        return model
    return load_captioner(model, processor=processor, prompt=args.prompt)


def _freeze_tower(captioner: Captioner) -> None:
    adapted = {n for n, p in captioner.model.named_parameters() if p.requires_grad}
    captioner.freeze_vision()
    if not hasattr(captioner.model, "peft_config"):
        return
    lost = sorted(adapted - {n for n, p in captioner.model.named_parameters() if p.requires_grad})
    if lost:
        raise ValueError(
            f"The adapter has weights in the vision tower ({lost[0]} and {len(lost) - 1} more), which freeze_vision_tower "
            "freezes. Use target_modules of the language model (language_lora(model), tune='language'), or "
            "freeze_vision_tower=False."
        )


def make_policy(model: Any, args: Any, *, processor: Any = None, peft_config: Any = None) -> Captioner:
    """The captioner that a trainer trains."""
    captioner = _loaded(model, args, processor)
    if peft_config is not None:
        if isinstance(peft_config, dict):
            peft_config = captioner.lora_config(**peft_config)
        captioner.add_adapter(peft_config)
    if args.freeze_vision_tower:
        _freeze_tower(captioner)
    require_fp32(captioner.model, args)
    return captioner
