"""Supported arrangements of GPUs."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse_data_parallel"]


def refuse_data_parallel(args: Any, model: Any = None) -> None:
    """Refuse `torch.nn.DataParallel`, in which a Trainer wraps the model when one process sees several GPUs.

    DataParallel would split the batch of a step, but bags, rollouts and the number of supervised tokens belong to a process.
    """
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    if args.n_gpu > 1 and not spread:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs, and torch.nn.DataParallel is not supported. Use one process per GPU: "
            f"`accelerate launch --num_processes {args.n_gpu} train.py` or `torchrun --nproc_per_node {args.n_gpu} train.py`. "
            "For a single GPU set CUDA_VISIBLE_DEVICES=0."
        )
