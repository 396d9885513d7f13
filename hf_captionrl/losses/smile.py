"""SMILE: maximum likelihood over the words of the caption instead of the whole vocabulary.

Legend: B captions, T tokens, V vocabulary, D features, R random ids.

`smile_loss` is the readable reference, computed from logits. `fused_smile_loss` returns the same values from hidden
states and the head's weight, and never builds `(B, T, V)`. Both expect aligned inputs: position t predicts
`labels[:, t]`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.autograd.function import once_differentiable

from hf_captionrl.losses.linear_log_probs import (
    IGNORE_INDEX,
    HeadGradients,
    accumulation_dtype,
    check_head_inputs,
    check_label_range,
    head_logits,
    product_dtype,
    resolve_chunk_size,
    supervised_rows,
    uncap,
    without_autocast,
)
from hf_captionrl.utils.versions import is_word_piece

# --- Vocabulary subsets as columns of scores, K columns --------------------------------------------------------------
# A subset needs neither `unique` nor dynamic shapes: its columns are the labels of the caption in order, so that the target
# of position t is column t. `-log(multiplicity)` is added to each column, so that duplicates count once in the normaliser.

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


# --- First-token shifting: the second of the two options in SMILE's section 3.3 for the first word of a caption ------


def shift_first_token(input_ids: Tensor | None, labels: Tensor, tokenizer: Any) -> tuple[Tensor | None, Tensor]:
    r"""Replaces the first word of each caption with its `##` sub-word form, in input and target.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", section 3.3,
    "First-token Shifting": "##a" rarely begins a caption, so the first position is hard even within the subset. Use it
    with `first_token="smile"`. The captioner then writes "##a", which [`Captioner.decode`] reads as "a". Captions whose first word has no `##` form in the vocabulary are not changed.

    Args:
        input_ids (`torch.Tensor` of shape `(B, T)`, *optional*): Decoder input, not shifted against `labels`; None
            if the model derives it from the labels (encoder-decoders).
        labels (`torch.Tensor` of shape `(B, T)`): Token ids from the collator: equal to `input_ids` at every position
            that is not `IGNORE_INDEX`.
        tokenizer: The captioner's WordPiece tokenizer.
    Returns:
        `tuple`: New `(input_ids, labels)`; the arguments are not modified.
    """
    if not is_word_piece(tokenizer):
        raise ValueError(
            f"First-token shifting needs a WordPiece tokenizer (BLIP, GIT, BERT). {type(tokenizer).__name__} is not "
            'one: its vocabulary has no "##" forms. Use first_token="mle" instead.'
        )
    supervised = labels != IGNORE_INDEX  # (B, T)
    if input_ids is not None and not (input_ids[supervised] == labels[supervised]).all():
        raise ValueError("labels must equal input_ids where supervised. Shift the first token before aligning them.")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    labels = labels.clone()
    input_ids = None if input_ids is None else input_ids.clone()
    for caption, position in first_positions(supervised).nonzero().tolist():
        word = tokenizer.convert_ids_to_tokens(int(labels[caption, position]))
        if (shifted := vocabulary.get(f"##{word}")) is not None:
            labels[caption, position] = shifted
            if input_ids is not None:
                input_ids[caption, position] = shifted
    return input_ids, labels


# --- The autograd functions behind `fused_smile_loss` ----------------------------------------------------------------
# Legend: B captions, T tokens, V vocabulary, D features, K columns of a subset, R rows of one chunk.
#
# `SubsetLoss` computes SMILE alone: the scores of the subset, and one row over the whole vocabulary per caption (its
# first token). The forward pass stores the gradient of these few logits, and the backward pass multiplies it with the
# weight, so that any upstream gradient works and no tensor of the weight's size is kept in between.
# `FullVocabularyLoss` computes everything that needs whole rows (a mixture with MLE, the reverse subset) in chunks; its
# forward pass computes the gradients too.

_CACHE_BYTES = 4 * 2**20  # of the weight per piece: 2 to 8 MiB were equally fast, smaller and larger pieces slower


def _add_rows(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """`table.index_add_` that first sums the rows of each index in the (higher) precision of `rows`."""
    if table.dtype == rows.dtype:
        return table.index_add_(0, index, rows)
    order = torch.arange(index.numel(), device=index.device)
    # One row of each index, no matter which, accumulates the others.
    representative = torch.zeros(table.size(0), dtype=torch.long, device=index.device)
    representative = representative.index_copy_(0, index, order)[index]
    summed = torch.zeros_like(rows).index_add_(0, representative, rows)
    return table.index_add_(0, index, summed.to(table.dtype))


def _first_index(supervised: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each caption's first supervised position, as a pair of `(B,)` tensors."""
    return torch.arange(supervised.size(0), device=supervised.device), first_supervised(supervised)


def _exponentials(logits: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`exp(logits - max)`, log-sum-exp and sum of each row; `in_place` overwrites the logits."""
    largest = logits.amax(-1, keepdim=True)  # (R, 1)
    powers = (logits.sub_(largest) if in_place else logits - largest).exp_()  # (R, V)
    total = powers.sum(-1, keepdim=True)  # (R, 1)
    return powers, largest + total.log(), total


def _first_rows(
    rows: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross-entropy over the vocabulary for `(B, D)` rows, `(B, 1)`, and its gradients, reading the weight only once.

    The gradients are those of the rows `(B, D)`, and of the logits `(V, B)`, from which those of weight and bias follow. With few rows, reading the weight from memory dominates the cost. While a piece of the weight is in the cache, it
    is used twice: for its logits and for its mean under their softmax. The means are merged by log-sum-exp.
    """
    needs_hidden, needs_logits = needs
    columns = rows.t().contiguous()  # (D, B)
    size = weight.size(0)
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():  # rows that fit into a CPU's cache
        size = max(_CACHE_BYTES // (weight.size(1) * weight.element_size()), 8 * rows.size(0))
    pieces: list[Tensor] = []
    log_sum = rows.new_full((1, rows.size(0)), FILL, dtype=dtype)
    mean = rows.new_zeros(rows.shape, dtype=dtype) if needs_hidden else None  # of the weight's rows, (B, D)
    for start in range(0, weight.size(0), size):
        piece = weight[start : start + size]  # (S, D)
        logits = (piece @ columns).to(dtype)  # (S, B)
        if bias is not None:
            logits = logits + bias[start : start + size].to(dtype).unsqueeze(1)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        largest = logits.amax(0, keepdim=True)  # (1, B)
        powers = (logits - largest).exp_()
        total = powers.sum(0, keepdim=True)
        piece_sum = largest + total.log()
        merged = torch.logaddexp(log_sum, piece_sum)
        if mean is not None:
            mean.mul_((log_sum - merged).exp_().t())
            probs = powers.mul_((piece_sum - merged).exp_().div_(total))  # normalised over all pieces so far; (S, B)
            slopes = uncap(probs, logits, softcap).to(weight.dtype).t()  # (B, S)
            if weight.dtype == dtype:
                mean.addmm_(slopes, piece)
            else:
                mean.add_(slopes @ piece)
        log_sum = merged
        pieces.append(logits)
    logits = torch.cat(pieces) if len(pieces) > 1 else pieces[0]  # (V, B)
    target = logits.gather(0, labels)  # (1, B)
    d_hidden = d_logits = None
    if mean is not None:
        d_hidden = mean - uncap(weight[labels[0]].to(dtype), target.t(), softcap)
    if needs_logits:
        d_logits = (logits - log_sum).exp_().scatter_add_(0, labels, -torch.ones_like(target))
        d_logits = uncap(d_logits, logits, softcap).to(weight.dtype)
    return (log_sum - target).t(), d_hidden, d_logits


class SubsetLoss(torch.autograd.Function):
    """Per-token loss `(B, T)` over the subset; with `first_mle`, first tokens are over the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Tensor,
        column_bias: Tensor,
        supervised: Tensor,
        first_mle: bool,
        softcap: float | None,
        keep: bool,
    ) -> Tensor:
        dtype = accumulation_dtype(hidden, weight)
        with without_autocast(hidden):
            scores = torch.bmm(hidden.to(dtype), weight[columns].to(dtype).transpose(1, 2))  # (B, T, K)
            if bias is not None:
                scores = scores + bias[columns].to(dtype).unsqueeze(1)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            biased = scores + column_bias
            log_sums = biased.logsumexp(-1, keepdim=True)  # (B, T, 1)
            targets = scores.diagonal(dim1=1, dim2=2)  # (B, T): the target of position t is column t
            losses = (log_sums.squeeze(-1) - targets).masked_fill(~supervised, 0.0)
            in_subset, first_hidden, first_logits = supervised, None, None
            if first_mle:
                captions, first = _first_index(supervised)
                is_first = first_positions(supervised)  # (B, T)
                in_subset = supervised & ~is_first
                # The product uses the weight's dtype, so that the weight is not copied.
                rows, labels = hidden[captions, first].to(weight.dtype), columns[captions, first].unsqueeze(0)
                needs_hidden, needs_weight, needs_bias = (keep and needs for needs in ctx.needs_input_grad[:3])
                needs = (needs_hidden, needs_weight or needs_bias)
                first_losses, first_hidden, first_logits = _first_rows(
                    rows, labels, weight, bias, softcap, dtype, needs
                )
                losses = torch.where(is_first, first_losses, losses)
            if keep:
                gradient = (biased - log_sums).exp_()  # (B, T, K)
                gradient.diagonal(dim1=1, dim2=2).sub_(1.0)
                gradient = uncap(gradient, scores, softcap) * in_subset.unsqueeze(-1)
                ctx.save_for_backward(hidden, weight, bias, columns, supervised, gradient, first_hidden, first_logits)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, columns, supervised, gradient, first_hidden, first_logits = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = gradient.dtype
        d_hidden = d_weight = d_bias = None
        with without_autocast(hidden):
            gradient = gradient * upstream.unsqueeze(-1)  # (B, T, K)
            captions, first = _first_index(supervised)
            # Scale (B, D) tensors, not the larger (V, B) one. The scale is 0 for captions without a label.
            scale = (upstream * supervised)[captions, first].unsqueeze(1).to(dtype)  # (B, 1)
            if needs_hidden:
                d_hidden = torch.bmm(gradient, weight[columns].to(dtype))  # (B, T, D)
                if first_hidden is not None:
                    d_hidden.index_put_((captions, first), first_hidden * scale, accumulate=True)
                d_hidden = d_hidden.to(hidden.dtype)
            if needs_weight:
                if first_logits is not None:
                    rows = (hidden[captions, first].to(dtype) * scale).to(weight.dtype)
                    d_weight = first_logits @ rows  # (V, D)
                else:
                    d_weight = torch.zeros_like(weight)
                d_columns = torch.bmm(gradient.transpose(1, 2), hidden.to(dtype))  # (B, K, D)
                d_weight = _add_rows(d_weight, columns.flatten(), d_columns.flatten(0, 1))
            if needs_bias:
                d_bias = torch.zeros_like(bias, dtype=dtype)
                if first_logits is not None:
                    d_bias = (first_logits.to(dtype) @ scale).squeeze(1)
                d_bias = d_bias.index_add_(0, columns.flatten(), gradient.sum(1).flatten()).to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


class FullVocabularyLoss(torch.autograd.Function):
    """`mle_weight * MLE + (1 - mle_weight) * SMILE`, as a weighted sum or per token, in one pass over chunks of rows.

    With `scalar`, returns `sum(token_weights * losses)`; the forward pass computes its gradient too. Otherwise returns
    `(B, T)` losses, and the backward pass computes the chunks again with the upstream gradient as weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_weights: Tensor,
        columns: Tensor,
        column_bias: Tensor,
        supervised: Tensor,
        rows: Tensor,
        settings: tuple[Any, ...],
        scalar: bool,
        keep: bool,
    ) -> Tensor:
        needs = tuple(ctx.needs_input_grad[:3]) if keep and scalar else (False, False, False)
        losses, d_hidden, d_weight, d_bias = _full_pass(
            hidden, weight, bias, token_weights, columns, column_bias, supervised, rows, needs, settings
        )
        ctx.scalar = scalar
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, token_weights, columns, column_bias, supervised, rows)
        ctx.gradients = (d_hidden, d_weight, d_bias) if any(needs) else None
        return (losses * token_weights).sum() if scalar else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_weights, columns, column_bias, supervised, rows = ctx.saved_tensors
        buffers = ctx.gradients
        if buffers is not None:
            # Scaled in place and returned only once: a copy would be a second buffer of the weight's size.
            ctx.gradients = None
            buffers = [None if gradient is None else gradient.mul_(upstream) for gradient in buffers]
        else:
            token_weights = upstream * token_weights if ctx.scalar else upstream
            needs = tuple(ctx.needs_input_grad[:3])
            _, *buffers = _full_pass(
                hidden, weight, bias, token_weights, columns, column_bias, supervised, rows, needs, ctx.settings
            )
        gradients = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(buffers, (hidden, weight, bias), strict=True)
        ]
        return (*gradients, *(None,) * 8)


def _full_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_weights: Tensor,
    columns: Tensor,
    column_bias: Tensor,
    supervised: Tensor,
    rows: Tensor,
    needs: tuple[bool, ...],
    settings: tuple,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Losses `(B, T)` and the needed gradients of `sum(token_weights * losses)`, in chunks."""
    reverse, first_mle, mle_weight, mle_label_smoothing, softcap, chunk_size, dtype = settings
    total = accumulation_dtype(hidden, weight)
    T = supervised.size(1)
    flat = hidden.flatten(0, 1)  # (B*T, D)
    losses = flat.new_zeros(flat.size(0), dtype=total)
    gradients = HeadGradients(flat.size(0), hidden, weight, (needs[0], needs[1], needs[2]))
    is_first = first_positions(supervised).flatten()
    token_weights = token_weights.to(total).masked_fill(~supervised, 0.0).flatten()
    with without_autocast(hidden):
        product_weight = weight.to(dtype)
        for index in rows.split(chunk_size):
            caption, position = index // T, index % T
            chunk = flat[index].to(dtype)  # (R, D)
            logits = head_logits(chunk, product_weight, bias, softcap, total)  # (R, V)
            labels = columns[caption, position].unsqueeze(1)  # (R, 1)
            scale = token_weights[index]  # (R,)
            target = logits.gather(1, labels).squeeze(1)
            # Weight of the cross-entropy over the vocabulary, and of that over the subset, per row.
            whole = torch.full_like(target, mle_weight)
            if first_mle:
                whole = whole.masked_fill(is_first[index], 1.0)
            part = 1.0 - whole  # (R,)

            loss = torch.zeros_like(target)
            if mle_label_smoothing and mle_weight:
                loss = mle_weight * mle_label_smoothing * (target - logits.mean(-1))
            probs, chosen, d_chosen = None, None, None
            if mle_weight < 1.0:
                chosen = columns[caption]  # (R, K)
                open_bias = column_bias[caption, position if column_bias.size(1) > 1 else 0]  # (R, K)
                if reverse:
                    # Mask the caption's words, then restore the label. Unused columns point at the label.
                    closed = torch.where(open_bias == 0, chosen, labels)
                    kept = logits.scatter(1, closed, FILL).scatter_(1, labels, target.unsqueeze(1))  # (R, V)
                    powers, log_sum, row_sum = _exponentials(kept, in_place=True)
                    subset_sum = log_sum.squeeze(1)
                    probs = powers.mul_((part * scale).unsqueeze(1) / row_sum)
                else:
                    scores = logits.gather(1, chosen) + open_bias  # (R, K)
                    subset_sum = scores.logsumexp(-1)
                    d_chosen = (scores - subset_sum.unsqueeze(1)).exp_() * (part * scale).unsqueeze(1)
                loss = loss + part * (subset_sum - target)
            powers, log_sum, row_sum = _exponentials(logits, in_place=softcap is None)
            losses = losses.index_copy(0, index, loss + whole * (log_sum.squeeze(1) - target))
            if not any(needs):
                continue

            d_logits = powers.mul_((whole * scale).unsqueeze(1) / row_sum)  # (R, V)
            if probs is not None:
                d_logits += probs
            if chosen is not None and d_chosen is not None:
                d_logits.scatter_add_(1, chosen, d_chosen)
            at_label = -scale
            if mle_label_smoothing and mle_weight:
                smoothing = mle_weight * mle_label_smoothing * scale
                d_logits.sub_((smoothing / d_logits.size(1)).unsqueeze(1))
                at_label = at_label + smoothing
            d_logits.scatter_add_(1, labels, at_label.unsqueeze(1))
            gradients.add(index, chunk, product_weight, uncap(d_logits, logits, softcap))
    d_hidden, d_weight, d_bias = gradients.finish(weight, bias)
    # Under torch.compile the ignored rows are computed too.
    losses = losses.view_as(supervised).masked_fill(~supervised, 0.0)
    return losses, None if d_hidden is None else d_hidden.view_as(hidden), d_weight, d_bias


# --- SMILE: maximum likelihood over the words of the caption instead of the whole vocabulary -------------------------


def _reduce(losses: Tensor, supervised: Tensor, reduction: Reduction) -> Tensor:
    """Mean over the supervised tokens, sum, or no reduction."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / supervised.sum().clamp(min=1) if reduction == "mean" else total


def smile_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    first_token: FirstToken | None = None,
    subset: Subset = "caption",
    mle_weight: float = 0.0,
    mle_label_smoothing: float = 0.0,
    num_random: int = 10,
    random_draw: RandomDraw = "sequence",
    random_ids: Tensor | None = None,
    pad_token_id: int | None = None,
    generator: Generator | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Cross-entropy restricted to the words of the reference caption.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-3, Algorithm 1.
    Differs from it by: reductions in fp32 with a finite fill value, so that fp16 and bf16 logits are safe.

    Computes `mle_weight * MLE + (1 - mle_weight) * SMILE`. The subset V_D contains the supervised labels of the
    caption. It includes the end token and excludes the prompt, the start token and padding.

    Args:
        logits (`torch.Tensor` of shape `(B, T, V)`): Unnormalised scores, aligned.
        labels (`torch.Tensor` of shape `(B, T)`): Token ids; `IGNORE_INDEX` is skipped at any position.
        first_token (`"mle"` or `"smile"`, *optional*): Distribution at the first supervised position: over the whole
            vocabulary, or over the subset. The default is `"mle"`, or `"smile"` with `subset="random"`, as in the
            paper.
        subset: Tokens that a position is normalised over: the words of the `"caption"`; `"random"` ids and the label;
            or `"reverse"`, the label and all tokens that are not in the caption.
        mle_weight (`float`): The paper's lambda, in [0, 1].
        mle_label_smoothing (`float`): Label smoothing of the MLE term only, in [0, 1) (paper 0.0, released code 0.1).
        num_random (`int`): Ids per draw of the random subset, with replacement.
        random_draw: One draw per `"sequence"` (paper) or per `"position"` (released code).
        random_ids (`torch.Tensor` of shape `(B, R)` or `(B, T, R)`, *optional*): Ids to use instead of drawing them.
        pad_token_id (`int`, *optional*): Excluded from a `"random"` subset, and from the `"reverse"` subset of
            captions that end in padding, as in the released code. None, as in the paper, excludes nothing.
        generator (`torch.Generator`, *optional*): Source of the random ids, on the labels' device.
        reduction: `"mean"` over the supervised tokens, `"sum"`, or `"none"`.
    Returns:
        `torch.Tensor`: Nats, >= 0: a scalar, or for `reduction="none"` a `(B, T)` tensor, 0 at ignored positions.
    Raises:
        ValueError: If shapes disagree, an option is out of range, or a mean has every label ignored.
    """
    check_options(first_token, subset, mle_weight, mle_label_smoothing, num_random, random_draw, reduction)
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be (B, T, V) with labels (B, T), not {tuple(labels.shape)}. "
            "Align them first: position t predicts labels[:, t]."
        )
    V = logits.size(-1)
    check_label_range(labels, V)
    supervised = labels != IGNORE_INDEX  # (B, T)
    if reduction == "mean" and not supervised.any():
        raise ValueError(
            f"All {labels.numel()} labels are ignored ({IGNORE_INDEX}), so the loss is undefined. "
            "Check that the captions are longer than the prompt and that max_length does not truncate them to it."
        )
    logits = logits.to(accumulation_dtype(logits))
    targets = labels.masked_fill(~supervised, 0)
    if subset == "random":
        random_ids = chosen_random_ids(random_ids, labels, V, num_random, random_draw, generator)
    in_subset = dense_subset(targets, supervised, V, subset, random_ids, pad_token_id)  # (B, T, V)
    if resolve_first_token(first_token, subset) == "mle":
        in_subset = in_subset | first_positions(supervised).unsqueeze(2)
    selected = logits.masked_fill(~in_subset, FILL).transpose(1, 2)  # (B, V, T)
    losses = F.cross_entropy(selected, labels, ignore_index=IGNORE_INDEX, reduction="none")  # (B, T)
    if mle_weight > 0:
        mle = F.cross_entropy(
            logits.transpose(1, 2),
            labels,
            ignore_index=IGNORE_INDEX,
            reduction="none",
            label_smoothing=mle_label_smoothing,
        )
        losses = mle_weight * mle + (1 - mle_weight) * losses
    return _reduce(losses, supervised, reduction)


def fused_smile_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    first_token: FirstToken | None = None,
    subset: Subset = "caption",
    mle_weight: float = 0.0,
    mle_label_smoothing: float = 0.0,
    softcap: float | None = None,
    num_random: int = 10,
    random_draw: RandomDraw = "sequence",
    random_ids: Tensor | None = None,
    pad_token_id: int | None = None,
    generator: Generator | None = None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    r"""`smile_loss` computed from hidden states and the head's weight, without building the logits of the batch.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-3, Algorithm 1.
    Differs from it by: cost only, the values are equal. It computes `hidden @ weight[labels].T` and one row of logits
    over the whole vocabulary per caption.

    For a weighted token mean over several batches (gradient accumulation, several processes), use `reduction="sum"`
    and divide by the number of tokens. If every label is ignored, the result is a 0 that is connected to the graph
    (zero gradients), and not an error as in `smile_loss`: the check would synchronise the GPU, and a process whose
    micro-batch is empty must still take part in the backward pass. The other arguments are those of `smile_loss`;
    `subset="reverse"` and `mle_weight > 0` need a pass over the whole vocabulary.

    Args:
        hidden (`torch.Tensor` of shape `(B, T, D)`): Input of the output projection, aligned: position t predicts
            `labels[:, t]`.
        weight (`torch.Tensor` of shape `(V, D)`): Weight of the output projection, tied to the embeddings or not. If
            it is frozen, its gradient is not computed.
        labels (`torch.Tensor` of shape `(B, T)`): Token ids; `IGNORE_INDEX` is skipped at any position.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): Bias of the output projection.
        token_weights (`torch.Tensor` of shape `(B, T)`, *optional*): Weight of the loss of each token; the mean still
            divides by the number of supervised tokens. May require a gradient.
        softcap (`float`, *optional*): Logits become `softcap * tanh(logits / softcap)`, as in Gemma.
        generator (`torch.Generator`, *optional*): Source of the random ids, on the labels' device. Not supported by
            `torch.compile`: pass `random_ids` instead.
        reduction: `"mean"` over the supervised tokens, `"sum"`, or `"none"`. With `mle_weight > 0` or
            `subset="reverse"`, `"none"` computes the logits a second time in the backward pass.
        chunk_size (`int`, *optional*): Rows per chunk of the pass over the vocabulary; by default 256 on a CPU and
            1024 on a GPU.
    Returns:
        `torch.Tensor`: Nats, >= 0: a scalar, or for `reduction="none"` a `(B, T)` tensor, 0 at ignored positions.
            fp64 if an input is fp64, else fp32.
    """
    check_options(first_token, subset, mle_weight, mle_label_smoothing, num_random, random_draw, reduction)
    check_head_inputs(hidden, weight, labels, bias, softcap)
    chunk_size = resolve_chunk_size(chunk_size, hidden)
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(f"token_weights {tuple(token_weights.shape)} must be {tuple(labels.shape)}, as labels.")
    dtype = accumulation_dtype(hidden, weight)
    supervised = labels != IGNORE_INDEX  # (B, T)
    targets = labels.masked_fill(~supervised, 0)
    first_mle = resolve_first_token(first_token, subset) == "mle"
    if subset == "random":
        random_ids = chosen_random_ids(random_ids, labels, weight.size(0), num_random, random_draw, generator)
        columns, column_bias = random_columns(targets, random_ids, pad_token_id, dtype)
    elif subset == "reverse":
        columns, column_bias = excluded_columns(targets, supervised, pad_token_id, dtype)
    else:
        columns, column_bias = caption_columns(targets, supervised, dtype)
    keep = torch.is_grad_enabled()

    if mle_weight == 0 and subset != "reverse":
        losses = SubsetLoss.apply(
            hidden, weight, bias, columns, column_bias, supervised, first_mle, softcap, keep
        )  # (B, T)
        return _reduce(losses if token_weights is None else losses * token_weights, supervised, reduction)

    # The forward pass can compute the gradients only if the token weights are constants. The divisor of the mean stays
    # outside: it arrives with the upstream gradient, which a gradient scaler has already scaled for fp16.
    scalar = reduction != "none" and not (token_weights is not None and token_weights.requires_grad)
    ones = torch.ones(labels.shape, dtype=dtype, device=labels.device)
    settings = (subset == "reverse", first_mle, mle_weight, mle_label_smoothing, softcap, chunk_size)
    tensors = (hidden, weight, bias, ones if token_weights is None else token_weights, columns, column_bias)
    result = FullVocabularyLoss.apply(
        *tensors, supervised, supervised_rows(supervised), (*settings, product_dtype(hidden, weight)), scalar, keep
    )
    if not scalar:
        return _reduce(result if token_weights is None else result * token_weights, supervised, reduction)
    return result / supervised.sum().clamp(min=1) if reduction == "mean" else result
