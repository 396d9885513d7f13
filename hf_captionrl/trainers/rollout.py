r"""Completions: the captions that the policy generates for a batch of images.

Legend: B images of this process, G captions per image, N = B * G captions, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_captionrl.captioners.base import Captioner
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.losses import IGNORE_INDEX

__all__ = ["Completions", "image_inputs", "reference_ids", "write_completions"]


@dataclass
class Completions:
    """What the policy wrote for a batch of images.

    Args:
        captions (`list[str]`): N captions, those of an image in a row.
        ids (`torch.Tensor` of shape `(N, T)`): Completions, right-padded.
        mask (`torch.Tensor` of shape `(N, T)`): True up to and including the end token.
        ended (`torch.Tensor` of shape `(N,)`): False where the length limit cut the caption.
    """

    captions: list[str]
    ids: Tensor
    mask: Tensor
    ended: Tensor


@contextmanager
def drawing_from_the_policy(captioner: Captioner) -> Iterator[None]:
    """Let generation draw from the policy itself, for a while.

    Published generation settings punish repetition, forbid n-grams or force an end. Captions written so are no samples of
    the distribution whose log-probabilities the gradient takes.
    """
    ids = {
        "bos_token_id": captioner.start_token_id,
        "decoder_start_token_id": captioner.start_token_id,
        "eos_token_id": list(captioner.end_token_ids),
        "pad_token_id": captioner.pad_token_id,
    }
    writers = [m for m in captioner.base_model.modules() if getattr(m, "generation_config", None) is not None]
    own = [writer.generation_config for writer in writers]
    for writer in writers:
        writer.generation_config = GenerationConfig(**ids)
    try:
        yield
    finally:
        for writer, config in zip(writers, own, strict=True):
            writer.generation_config = config


def image_inputs(captioner: Captioner, micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Images of the micro-batches for generation; a frozen tower encodes them once for it and for the update.

    Args:
        micro_batches (`Sequence[dict]`): Of the collator, on the device; pixels of a frozen tower become features.
    """
    images = []
    frozen = not any(p.requires_grad for p in captioner.vision_tower.parameters())
    for inputs in micro_batches:
        mine = {name: inputs[name] for name in captioner.image_inputs if name in inputs}
        if frozen and "pixel_values" in mine:
            with torch.no_grad(), evaluating(captioner.vision_tower):
                mine["image_features"] = captioner.image_features(**mine)
            del mine["pixel_values"], inputs["pixel_values"]
            inputs["image_features"] = mine["image_features"]
        images.append(mine)
    return images


def reference_ids(captioner: Captioner, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions of the data as if the policy had written them.

    Returns:
        Ids and their mask, both `(N, T)`, as in [`Completions`].
    """
    spoken = [i for i, caption in enumerate(captions) if caption.strip()]
    ids = torch.full((len(captions), 1), captioner.eos_token_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if spoken:
        batch = captioner.encode_captions([captions[i] for i in spoken], max_length=10**6)
        labels = batch["labels"][:, len(captioner.prompt_ids()) :]
        ids = ids.expand(-1, labels.size(1)).clone()
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, 0] = True
        ids[spoken], mask[spoken] = labels.clamp(min=0), labels != IGNORE_INDEX
    return ids, mask


def write_completions(
    captioner: Captioner,
    images: Sequence[dict[str, Tensor]],
    *,
    batch_size: int | None = None,
    **generate_kwargs: Any,
) -> Completions:
    """Write captions for the images of several micro-batches."""
    if batch_size is not None:
        whole = {name: torch.cat([batch[name] for batch in images]) for name in images[0]}
        number = len(next(iter(whole.values())))
        starts = range(0, number, batch_size)
        images = [{name: value[s : s + batch_size] for name, value in whole.items()} for s in starts]
    with drawing_from_the_policy(captioner):
        outputs = [captioner.generate(**batch, **generate_kwargs) for batch in images]
    longest = max(output.ids.size(1) for output in outputs)
    ids = [_widen(output.ids, longest, captioner.pad_token_id) for output in outputs]
    mask = [_widen(output.mask, longest, False) for output in outputs]
    return Completions(
        captions=[caption for output in outputs for caption in output.captions],
        ids=torch.cat(ids),
        mask=torch.cat(mask),
        ended=torch.cat([output.ended for output in outputs]),
    )


def _widen(rows: Tensor, width: int, value: Any) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.size(1)), value=value)
