"""Converts captions to token ids with prompt and labels.

Legend: B captions, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX

__all__ = ["completion_mask", "encode", "pad_rows", "prompt_token_ids", "start_token_settings"]


def start_token_settings(processor: Any, chat: str) -> dict[str, Any]:
    """Settings that prevent a processor from writing the start token of a chat twice."""
    start = getattr(getattr(processor, "tokenizer", processor), "bos_token", None)
    templated = getattr(processor, "chat_template", None) is not None
    return {"add_special_tokens": False} if templated and start and chat.startswith(start) else {}


def _split_prompt(prompt: str) -> tuple[str, str]:
    """The prompt without trailing spaces, and the separator: byte-level tokens begin, not end, with the space."""
    prompt = prompt.rstrip(" ")
    return prompt, "" if not prompt or prompt[-1].isspace() else " "


def prompt_token_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, without special tokens."""
    text, _ = _split_prompt(prompt)
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


def _caption_token_ids(tokenizer: Any, prompt: str, captions: Sequence[str], lead: str) -> list[list[int]]:
    """Ids of each caption after the prompt."""
    text, joint = _split_prompt(prompt)
    joint = joint or lead
    before = prompt_token_ids(tokenizer, prompt)
    ids = tokenizer([text + joint + caption.strip() for caption in captions], add_special_tokens=False).input_ids
    rows = []
    for caption, row in zip(captions, ids, strict=True):
        if list(row[: len(before)]) == before:
            rows.append(list(row[len(before) :]))
        else:  # the tokenizer merged the last word of the prompt with the first word of the caption
            rows.append(list(tokenizer(caption.strip(), add_special_tokens=False).input_ids))
    return rows


def encode(
    tokenizer: Any,
    captions: Sequence[str],
    *,
    prompt: str,
    lead: str = "",
    start_id: int,
    forced_ids: Sequence[int] = (),
    end_id: int,
    pad_id: int,
    max_length: int,
) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels` `(B, T)` of `[start] prompt caption [end]`, padded on the right.

    Supervised are the caption and its end token.
    """
    if not captions:
        raise ValueError("There are no captions to encode. Pass at least one caption per image.")
    for row, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise TypeError(f"Caption {row} is {caption!r}, not a string. Check the data with check_captions.")
        if not caption.strip():
            raise ValueError(f"Caption {row} ({caption!r}) is empty. Remove it; check_captions finds such rows.")
    before = [start_id, *forced_ids, *prompt_token_ids(tokenizer, prompt)]
    if len(before) >= max_length:
        raise ValueError(
            f"The prompt {prompt!r} takes {len(before)} tokens with the start token, which leaves no tokens for the "
            f"caption within max_length ({max_length}). Raise max_length or shorten the prompt."
        )
    rows = [(before + ids + [end_id])[:max_length] for ids in _caption_token_ids(tokenizer, prompt, captions, lead)]
    return pad_rows(rows, ignored=len(before), pad_id=pad_id)


def pad_rows(rows: Sequence[Sequence[int]], *, ignored: int, pad_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `labels` `(B, T)`, padded on the right; `ignored` leading ids are not supervised."""
    shape = (len(rows), max(len(row) for row in rows))
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE_INDEX)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
        attention_mask[index, : len(row)] = 1
        labels[index, ignored : len(row)] = torch.tensor(row[ignored:])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def completion_mask(ids: Tensor, *, end_ids: Sequence[int], pad_id: int) -> tuple[Tensor, Tensor]:
    """Mask `(B, T)` of generated `ids` up to and including the first end token, and whether there is one `(B,)`."""
    is_end = torch.isin(ids, torch.tensor(list(end_ids), device=ids.device))  # (B, T)
    mask = is_end.cumsum(1) - is_end.long() == 0
    if pad_id not in end_ids:
        # Rows without an end token are padded too.
        mask &= ((ids != pad_id).flip(1).cumsum(1) > 0).flip(1)
    return mask, is_end.any(1)
