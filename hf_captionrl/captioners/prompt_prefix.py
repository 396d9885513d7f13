r"""The prefix of the text: image tokens and the words around them, for models that read image and text as one sequence.

Legend: B images, G captions per image, N = B * G rows, P tokens of the prefix, T tokens of the text, M image tokens.

In every family, the text of a batch is `(N, T)`, without the prefix. The prefix has one row per image: `prefix_ids` and
`prefix_mask` `(B, P)`, padded on the left because images may differ in their number of tokens, and other inputs per
image. The model's forward joins prefix and text, so that labels and supervised tokens are the same for all families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "captions_per_image",
    "decoder_text",
    "join_prefix",
    "left_padded",
    "repeat_rows",
    "split_prefix",
    "stack_rows",
]

PREFIX_INPUTS = ("prefix_ids", "prefix_mask")


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """`prefix_ids` and `prefix_mask` `(B, P)`, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        if len(row):
            ids[index, -len(row) :] = torch.as_tensor(row)
            mask[index, -len(row) :] = 1
    return {"prefix_ids": ids, "prefix_mask": mask}


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of different sizes to `(B, ...)`, padded with zeros at the end of each dimension."""
    sizes = [max(part.size(d) for part in parts) for d in range(parts[0].dim())]
    padded = []
    for part in parts:
        missing = [sizes[d] - part.size(d) for d in range(part.dim())]
        # F.pad counts dimensions from the last.
        padded.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]))
    return torch.stack(padded)


def captions_per_image(rows: int, images: int) -> int:
    """G; raises if it is not an integer."""
    if rows % images:
        raise ValueError(
            f"{rows} captions cannot be divided evenly among {images} images. Pass one image per caption, or the same "
            "number of consecutive captions for each image."
        )
    return rows // images


def repeat_rows(value: Tensor, rows: int) -> Tensor:
    """One row per image `(B, ...)` -> one row per caption `(N, ...)`; captions of one image are consecutive."""
    times = captions_per_image(rows, value.size(0))
    return value if times == 1 else value.repeat_interleave(times, dim=0)


def join_prefix(inputs: dict[str, Any]) -> dict[str, Any]:
    """Put the prefix before the text: `input_ids` and `attention_mask` become `(N, P + T)`, labels stay `(N, T)`."""
    inputs = dict(inputs)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    before, before_mask = (repeat_rows(inputs.pop(name), len(ids)) for name in PREFIX_INPUTS)
    inputs["input_ids"] = torch.cat([before, ids], 1)
    inputs["attention_mask"] = torch.cat([before_mask, mask], 1)
    return inputs


def decoder_text(inputs: dict[str, Any]) -> dict[str, Any]:
    """Make the text the input of a decoder: `decoder_input_ids`, `decoder_attention_mask` and `labels` `(N, T - 1)`.

    The decoder reads the text without the last token, and predicts it without the first.
    """
    inputs = dict(inputs)
    if (ids := inputs.pop("input_ids", None)) is not None:
        inputs["decoder_input_ids"] = ids[:, :-1]
        if (mask := inputs.pop("attention_mask", None)) is not None:
            inputs["decoder_attention_mask"] = mask[:, :-1]
        if inputs.get("labels") is not None:
            inputs["labels"] = inputs["labels"][:, 1:].contiguous()  # the losses of T5 and BART need it
    return inputs


def split_prefix(inputs: dict[str, Any]) -> dict[str, Any]:
    """`decoder_text`, with the prefix as `input_ids` and `attention_mask` `(N, P)` of the encoder."""
    rows = len(inputs["input_ids"])
    inputs = decoder_text(inputs)
    inputs["input_ids"], inputs["attention_mask"] = (repeat_rows(inputs.pop(name), rows) for name in PREFIX_INPUTS)
    return inputs
