"""`torch.compile` of the decoding step."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["check_compiler", "compiled_forward"]


def check_compiler(device: torch.device) -> None:
    """Raise if the machine lacks what `torch.compile` needs to generate code for a device."""
    if device.type == "cpu":
        # As torch's inductor chooses it.
        compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if shutil.which(compiler) is not None:
            return
        missing = f"a C++ compiler ({compiler}), which is not on the PATH"
    else:
        if find_spec("triton") is not None:
            return
        missing = "Triton, which is not installed"
    raise ValueError(
        f"compile_decoding is True, but torch.compile needs {missing}. Install it, or leave compile_decoding out."
    )


def compiled_forward(model: Any) -> Callable[..., Any]:
    """The model's forward, compiled once for any number of rows and tokens."""
    from transformers import CompileConfig

    return model.get_compiled_call(CompileConfig(dynamic=True, mode="default"))
