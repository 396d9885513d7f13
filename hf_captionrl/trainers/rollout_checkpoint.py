r"""The rollout in use, stored in a checkpoint between two iterations over it.

Images are not stored: the data loader reads them again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["load_rollout", "save_rollout"]

_NORMALIZER = "normalizer"


def _file(folder: str | os.PathLike[str], process_index: int) -> Path:
    return Path(folder) / f"caption_rl_rollout_{process_index}.safetensors"


def save_rollout(
    folder: str | os.PathLike[str],
    process_index: int,
    micro_batches: Sequence[Mapping[str, Any]],
    normalizer: Tensor | float,
    images: Collection[str],
) -> Path:
    """Store the micro-batches of this process."""
    tensors = {_NORMALIZER: torch.as_tensor(normalizer, dtype=torch.float64).reshape(1).cpu()}
    for index, inputs in enumerate(micro_batches):
        for name, value in inputs.items():
            if isinstance(value, Tensor) and name not in images:
                tensors[f"{index}/{name}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    os.makedirs(folder, exist_ok=True)  # the main process may not have created it yet
    path = _file(folder, process_index)
    save_file(tensors, path)
    return path


def load_rollout(
    folder: str | os.PathLike[str], process_index: int, device: torch.device
) -> tuple[list[dict[str, Any]], float]:
    """The micro-batches that [`save_rollout`] stored."""
    tensors = load_file(_file(folder, process_index))
    normalizer = float(tensors.pop(_NORMALIZER))
    micro_batches: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition("/")
        micro_batches.setdefault(int(index), {"micro_batch": int(index)})[name] = value.to(device)
    return [micro_batches[index] for index in sorted(micro_batches)], normalizer
