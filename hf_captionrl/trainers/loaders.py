"""DataLoader settings of a configuration."""

from __future__ import annotations

from typing import Any

from hf_captionrl.trainers.caption_config import CaptionConfig

__all__ = ["loader_settings"]


def loader_settings(args: CaptionConfig) -> dict[str, Any]:
    """Arguments of a `DataLoader` for workers and memory."""
    settings: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory,
        # Older releases of transformers do not have this field, nor that of the context.
        "in_order": getattr(args, "dataloader_in_order", True),
    }
    if args.dataloader_num_workers:
        settings |= {
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor or 2,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        }
    return settings
