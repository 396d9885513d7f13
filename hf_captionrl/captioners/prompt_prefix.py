r"""The prefix of the text: image tokens and the words around them, for models that read image and text as one row.

Legend: B images, G captions per image, N = B * G rows, P tokens of the prefix, T tokens of the text, M image tokens.

A batch contains only the text, `(N, T)`, for every family. The data of the images are beside it, one row per image:
`prefix_ids` and `prefix_mask` `(B, P)`, padded on the left because images may differ in their number of tokens, and other
inputs that the model needs per image. The model's forward joins prefix and text, so the labels, the number of supervised
tokens and everything else are the same for all families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "captions_an_image",
    "decoder_text",
    "join_prefix",
    "left_padded",
    "repeat_rows",
    "split_prefix",
    "stack_rows",
]

PREFIX_INPUTS = ("prefix_ids", "prefix_mask")


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """Prefixes as left-padded tensors.

    Returns:
        `dict`: `prefix_ids` and `prefix_mask`, each `(B, P)`.
    """
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        if len(row):
            ids[index, -len(row) :] = torch.as_tensor(row)
            mask[index, -len(row) :] = 1
    return {"prefix_ids": ids, "prefix_mask": mask}


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of different sizes, padded with zeros at the end of each dimension.

    Returns:
        `torch.Tensor` of shape `(B, ...)`.
    """
    sizes = [max(part.size(d) for part in parts) for d in range(parts[0].dim())]
    padded = []
    for part in parts:
        missing = [sizes[d] - part.size(d) for d in range(part.dim())]
        # F.pad counts dimensions from the last.
        padded.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]))
    return torch.stack(padded)


def captions_an_image(rows: int, images: int) -> int:
    """G."""
    if rows % images:
        raise ValueError(
            f"{rows} captions cannot be shared among {images} images. Pass one image per caption, or the same number of "
            "consecutive captions for each image."
        )
    return rows // images


def repeat_rows(value: Tensor, rows: int) -> Tensor:
    """One row per image -> one row per caption.

    Args:
        value (`torch.Tensor` of shape `(B, ...)`): One row per image.

    Returns:
        `torch.Tensor` of shape `(N, ...)`: Captions of one image are consecutive.
    """
    times = captions_an_image(rows, value.size(0))
    return value if times == 1 else value.repeat_interleave(times, dim=0)


def join_prefix(inputs: dict[str, Any]) -> dict[str, Any]:
    """Put the prefix before the text.

    Args:
        inputs (`dict`): With `input_ids` and `attention_mask` `(N, T)`, `prefix_ids` and `prefix_mask` `(B, P)`.

    Returns:
        `dict`: A new one with `input_ids` and `attention_mask` `(N, P + T)`, and all else as it was. Labels stay
        `(N, T)`.
    """
    inputs = dict(inputs)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    before, before_mask = (repeat_rows(inputs.pop(name), len(ids)) for name in PREFIX_INPUTS)
    inputs["input_ids"] = torch.cat([before, ids], 1)
    inputs["attention_mask"] = torch.cat([before_mask, mask], 1)
    return inputs


def decoder_text(inputs: dict[str, Any]) -> dict[str, Any]:
    """Give the text to a decoder, which reads it without the last token and predicts it without the first.

    Args:
        inputs (`dict`): With `input_ids` `(N, T)`, and `attention_mask` and `labels` where there are any.

    Returns:
        `dict`: A new one with `decoder_input_ids`, `decoder_attention_mask` and `labels` `(N, T - 1)` in their place; the
    """
    inputs = dict(inputs)
    if (ids := inputs.pop("input_ids", None)) is not None:
        inputs["decoder_input_ids"] = ids[:, :-1]
        if (mask := inputs.pop("attention_mask", None)) is not None:
            inputs["decoder_attention_mask"] = mask[:, :-1]
        if inputs.get("labels") is not None:
            inputs["labels"] = inputs["labels"][:, 1:].contiguous()  # T5's and BART's own loss wants it so
    return inputs


def split_prefix(inputs: dict[str, Any]) -> dict[str, Any]:
    """Give the prefix to an encoder, and the text to a decoder.

    Returns:
        `dict`: That of `decoder_text`, with `input_ids` and `attention_mask` `(N, P)`, the prefix.
    """
    rows = len(inputs["input_ids"])
    inputs = decoder_text(inputs)
    inputs["input_ids"], inputs["attention_mask"] = (repeat_rows(inputs.pop(name), rows) for name in PREFIX_INPUTS)
    return inputs
