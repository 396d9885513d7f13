"""How uncertain a captioner is about given captions; the prompt that asks a chat model what makes an image different."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.head_tap import evaluating


def caption_entropy(
    captioner: Captioner, images: Sequence[Any], captions: Sequence[str], *, batch_size: int = 16
) -> dict[str, Any]:
    """Entropy of a captioner's distributions along one given caption per image, in nats: the mean over captions of token means.

    Source: the code of No Detail Left Behind (`evaluation/entropy.py`). The end token counts here; there it does not.
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


_CONTRASTIVE = "Similar images are described like this:\n{captions}\nSay what is different here, in one sentence."


def contrastive_prompt(prompt: str, captions: Sequence[str]) -> str:
    """The user's turn with the captions of similar images, one per line; without any, the prompt does not change."""
    lines = [f"- {' '.join(caption.split())}" for caption in dict.fromkeys(captions) if caption.strip()]
    told = _CONTRASTIVE.format(captions="\n".join(lines)) if lines else ""
    return "\n".join(filter(None, (prompt, told)))


def encode_with_prompts(captioner: Any, images: Sequence[Image.Image], prompts: Sequence[str]) -> dict[str, Tensor]:
    """`encode_images` of a chat captioner with a prompt per image; the captioner keeps its own."""
    if captioner.family != "chat":
        raise ValueError(f"Prompts per image need a chat model; this one is of the family {captioner.family!r}.")
    own, rows = captioner.prompt, []
    try:
        for image, captioner.prompt in zip(images, prompts, strict=True):
            rows.append(captioner._prefix_of(image.convert("RGB")))
    finally:
        captioner.prompt = own
    return captioner._stacked(rows)  # type: ignore[no-any-return]
