r"""Completions: the captions that the policy generates for a batch of images.

Legend: B images of this process, G captions per image, N = B * G captions, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.generation import Completions
from hf_captionrl.losses import IGNORE_INDEX

__all__ = ["image_inputs", "reference_ids", "token_log_probs", "write_completions"]


@contextmanager
def drawing_from_the_policy(captioner: Captioner) -> Iterator[None]:
    """Generate from the policy's own distribution, without the checkpoint's generation settings.

    Published settings penalise repetition, forbid n-grams or force an end token. Such captions are not samples of the
    distribution whose log-probabilities the gradient uses.
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
    """Images of the micro-batches for generation; a frozen vision tower encodes them once for generation and update.

    With a frozen tower, features replace the pixels of the micro-batches.
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
    """Captions of the data, encoded like completions.

    Ids and mask are `(N, T)`.
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
    """Completions for the images of several micro-batches, generated `batch_size` images at a time."""
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


def token_log_probs(
    captioner: Captioner, inputs: dict[str, Any], args: Any, model: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and, if the loss uses them, entropies of the tokens, `(N, T - 1)`."""
    names = ("input_ids", "attention_mask", "labels", *captioner.image_inputs)
    batch = {name: inputs[name] for name in names if name in inputs}
    temperature = args.temperature if args.do_sample else 1.0
    entropy = bool(args.entropy_weight)
    found = captioner.log_probs(batch, temperature=temperature, return_entropy=entropy, model=model)
    return found if isinstance(found, tuple) else (found, None)


def _widen(rows: Tensor, width: int, value: Any) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.size(1)), value=value)
