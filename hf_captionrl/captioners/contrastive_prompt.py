"""The prompt that asks a chat model what makes an image different, and images with a prompt each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

__all__ = ["contrastive_prompt", "encode_with_prompts"]

_CONTRASTIVE = "Similar images are described like this:\n{captions}\nSay what is different here, in one sentence."


def contrastive_prompt(prompt: str, captions: Sequence[str]) -> str:
    """The user's turn with the captions of similar images.

    Each caption is one line of the turn; without any, the prompt does not change.
    """
    lines = [f"- {' '.join(caption.split())}" for caption in dict.fromkeys(captions) if caption.strip()]
    if not lines:
        return prompt
    return "\n".join(filter(None, (prompt, _CONTRASTIVE.format(captions="\n".join(lines)))))


def encode_with_prompts(captioner: Any, images: Sequence[Image.Image], prompts: Sequence[str]) -> dict[str, Tensor]:
    """`encode_images` of a chat captioner with a prompt per image; the captioner keeps its own."""
    if captioner.family != "chat":
        raise ValueError(
            f"The captioner is of the family {captioner.family!r}. Use a chat model for prompts per image."
        )
    own, rows = captioner.prompt, []
    try:
        for image, captioner.prompt in zip(images, prompts, strict=True):
            rows.append(captioner._prefix_of(image.convert("RGB")))
    finally:
        captioner.prompt = own
    return captioner._stacked(rows)  # type: ignore[no-any-return]
