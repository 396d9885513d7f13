"""How uncertain a captioner is while it reads given captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.eval_mode import evaluating

__all__ = ["caption_entropy"]


def caption_entropy(
    captioner: Captioner, images: Sequence[Any], captions: Sequence[str], *, batch_size: int = 16
) -> dict[str, Any]:
    """Entropy of a captioner's distributions along given captions, in nats.

    Source: the code of No Detail Left Behind (`evaluation/entropy.py`). The end token counts here; there it does not.

    Args:
        captioner: The captioner.
        images: N images (`PIL.Image.Image`).
        captions: One caption per image, for instance its own or those of another captioner.
        batch_size: Captions per forward pass.

    Returns:
        `dict`: `entropy`, the mean over captions of the mean over their tokens, and `per_sample`, the N means.

    Raises:
        ValueError: If the numbers differ or are 0.
    """
    if len(images) != len(captions) or not captions:
        raise ValueError(f"There are {len(images)} images and {len(captions)} captions. Pass one caption per image.")
    found: list[float] = []
    with evaluating(captioner.model), torch.no_grad():
        for start in range(0, len(captions), batch_size):
            chosen = slice(start, start + batch_size)
            batch = captioner.collate(list(images[chosen]), list(captions[chosen]))
            _, entropy = captioner.log_probs(batch, return_entropy=True)
            supervised = captioner.align_labels(batch["labels"]) != -100  # (B, T - 1)
            found += (entropy.double().cpu().sum(1) / supervised.cpu().sum(1)).tolist()
    return {"entropy": sum(found) / len(found), "per_sample": found}
