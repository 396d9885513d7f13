"""The vocabulary subsets of SMILE as columns of scores.

Legend: B captions, T tokens, V vocabulary, R random ids, K columns.

A subset needs neither `unique` nor dynamic shapes: its columns are the labels of the caption in order, so that the
target of position t is column t. `-log(multiplicity)` is added to each column, so that duplicates count once in the
normaliser.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from hf_captionrl.losses.linear_log_probs import check_label_range

FirstToken = Literal["mle", "smile"]
Subset = Literal["caption", "random", "reverse"]
RandomDraw = Literal["sequence", "position"]
Reduction = Literal["mean", "sum", "none"]

# Finite, because a row of -inf gives NaN gradients even behind `where`. For fp32 and fp64 only: the largest fp16 is
# 65504.
FILL = -1e30


# The subset of every position: token ids `(B, K)`, of which the first T are the labels in order, 0 where ignored; and what is
# added to their scores before the normaliser, `(B, T, K)` or `(B, 1, K)`: minus the log of the multiplicity, `FILL` outside.
SubsetColumns = tuple[Tensor, Tensor]


def check_options(
    first_token: str | None,
    subset: str,
    mle_weight: float,
    mle_label_smoothing: float,
    num_random: int,
    random_draw: str,
    reduction: str,
) -> None:
    """Raises if an option is outside its range."""
    for name, value, allowed in (
        ("first_token", first_token, (*get_args(FirstToken), None)),
        ("subset", subset, get_args(Subset)),
        ("random_draw", random_draw, get_args(RandomDraw)),
        ("reduction", reduction, get_args(Reduction)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}. Use one of {', '.join(map(repr, allowed))}.")
    for name, number, fits, rule in (
        ("mle_weight", mle_weight, 0.0 <= mle_weight <= 1.0, "in [0, 1]. Use 0 for SMILE and 1 for MLE"),
        (
            "mle_label_smoothing",
            mle_label_smoothing,
            0.0 <= mle_label_smoothing < 1.0,
            "in [0, 1). The authors use 0.1",
        ),
        ("num_random", num_random, num_random >= 1, "at least 1. The paper uses 10"),
    ):
        if not fits:
            raise ValueError(f"{name} ({number}) must be {rule}.")


def resolve_first_token(first_token: FirstToken | None, subset: Subset) -> FirstToken:
    """The paper's default if None: first-token MLE, except with a random subset."""
    if first_token is not None:
        return first_token
    return "smile" if subset == "random" else "mle"


def first_supervised(supervised: Tensor) -> Tensor:
    """`(B,)` index of the first supervised position of each caption; 0 if it has none."""
    return supervised.int().argmax(dim=1)


def first_positions(supervised: Tensor) -> Tensor:
    """`(B, T)` mask that is True at the first supervised position of each caption."""
    positions = torch.arange(supervised.size(1), device=supervised.device)
    return (positions == first_supervised(supervised).unsqueeze(1)) & supervised


def chosen_random_ids(
    random_ids: Tensor | None,
    labels: Tensor,
    vocab_size: int,
    num_random: int,
    random_draw: RandomDraw,
    generator: Generator | None,
) -> Tensor:
    """`(B, R)` or `(B, T, R)` ids on the labels' device: those given, or drawn uniformly from the vocabulary, with replacement."""
    if random_ids is None:
        shape = (*labels.shape, num_random) if random_draw == "position" else (labels.size(0), num_random)
        return torch.randint(vocab_size, shape, generator=generator, device=labels.device)
    if random_ids.shape[:-1] not in (labels.shape[:1], labels.shape):
        raise ValueError(
            f"random_ids {tuple(random_ids.shape)} must be (B, R) or (B, T, R) for labels {tuple(labels.shape)}. "
            "Omit them to draw them."
        )
    check_label_range(random_ids, vocab_size, name="random_ids", ignore_index=None)
    return random_ids.to(labels.device)


def caption_columns(targets: Tensor, supervised: Tensor, dtype: torch.dtype) -> SubsetColumns:
    """The words of the caption: T columns that all positions share."""
    same = (targets.unsqueeze(2) == targets.unsqueeze(1)) & supervised.unsqueeze(1)  # (B, T, T)
    multiplicity = same.sum(2).clamp(min=1).to(dtype)  # (B, T)
    bias = (-multiplicity.log()).masked_fill(~supervised, FILL)  # (B, T)
    return targets, bias.unsqueeze(1)


def random_columns(targets: Tensor, random_ids: Tensor, pad_token_id: int | None, dtype: torch.dtype) -> SubsetColumns:
    """T columns of labels, of which position t sees only column t, followed by the columns of the random ids."""
    B, T = targets.shape
    per_position = random_ids.dim() == 3
    ids = random_ids if per_position else random_ids.unsqueeze(1)  # (B, T or 1, R)
    multiplicity = (ids.unsqueeze(3) == ids.unsqueeze(2)).sum(3).to(dtype)  # (B, T or 1, R)
    closed = ids == targets.unsqueeze(2)  # (B, T, R): the label already has its column
    if pad_token_id is not None:
        closed = closed | (ids == pad_token_id)
    drawn = (-multiplicity.log()).masked_fill(closed, FILL)  # (B, T, R)
    diagonal = torch.eye(T, dtype=torch.bool, device=targets.device)
    own = torch.zeros(T, T, dtype=dtype, device=targets.device).masked_fill(~diagonal, FILL)  # (T, T)
    if per_position:
        # Each position sees only its block of R columns.
        blocks = drawn.new_full((B, T, T, random_ids.size(2)), FILL)  # (B, T, T, R)
        drawn = torch.where(diagonal.view(1, T, T, 1), drawn.unsqueeze(2), blocks).flatten(2)  # (B, T, T * R)
    return torch.cat([targets, random_ids.flatten(1)], dim=1), torch.cat([own.expand(B, T, T), drawn], dim=2)


def excluded_columns(
    targets: Tensor, supervised: Tensor, pad_token_id: int | None, dtype: torch.dtype
) -> SubsetColumns:
    """The words of the caption, which the reverse subset excludes; the bias is 0 in used columns, else `FILL`."""
    bias = torch.zeros(targets.shape, dtype=dtype, device=targets.device).masked_fill(~supervised, FILL)  # (B, T)
    ids = targets
    if pad_token_id is not None:
        ids = torch.cat([ids, ids.new_full((ids.size(0), 1), pad_token_id)], dim=1)  # (B, T + 1)
        unused = supervised[:, -1:].to(dtype) * FILL  # (B, 1): captions that do not end in padding
        bias = torch.cat([bias, unused], dim=1)
    return ids, bias.unsqueeze(1)


def dense_subset(
    targets: Tensor,
    supervised: Tensor,
    vocab_size: int,
    subset: Subset,
    random_ids: Tensor | None,
    pad_token_id: int | None,
) -> Tensor:
    """The subset as a `(B, T, V)` mask, used by the readable reference only."""
    B, T = targets.shape
    captions, _ = supervised.nonzero(as_tuple=True)
    words = torch.zeros(B, vocab_size, dtype=torch.bool, device=targets.device)  # (B, V)
    words[captions, targets[supervised]] = True
    labels = torch.zeros(B, T, vocab_size, dtype=torch.bool, device=targets.device)  # (B, T, V)
    labels.scatter_(2, targets.unsqueeze(2), True)
    if subset == "caption":
        return words.unsqueeze(1).expand(B, T, vocab_size)
    if subset == "reverse":
        if pad_token_id is not None:
            words[:, pad_token_id] |= ~supervised[:, -1]
        return ~words.unsqueeze(1) | labels
    assert random_ids is not None
    per_position = random_ids if random_ids.dim() == 3 else random_ids.unsqueeze(1).expand(B, T, -1)
    drawn = torch.zeros_like(labels).scatter_(2, per_position, True)
    if pad_token_id is not None:
        drawn[..., pad_token_id] = False
    return drawn | labels
