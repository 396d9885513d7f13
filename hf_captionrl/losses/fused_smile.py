r"""The autograd functions behind `fused_smile_loss`.

Legend: B captions, T tokens, V vocabulary, D features, K columns of a subset, R rows of one chunk.

`SubsetLoss` computes SMILE alone: the scores of the subset, and one row over the whole vocabulary per caption (its
first token). The forward pass stores the gradient of these few logits, and the backward pass multiplies it with the
weight, so that any upstream gradient works and no tensor of the weight's size is kept in between.
`FullVocabularyLoss` computes everything that needs whole rows (a mixture with MLE, the reverse subset) in chunks; its
forward pass computes the gradients too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_captionrl.losses.linear_log_probs import (
    HeadGradients,
    accumulation_dtype,
    head_logits,
    uncap,
    without_autocast,
)
from hf_captionrl.losses.vocabulary_subset import FILL, first_positions, first_supervised

__all__ = ["FullVocabularyLoss", "SubsetLoss"]

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


class FirstRows(NamedTuple):
    """Cross-entropy of the first tokens over the whole vocabulary, with the gradients that are needed."""

    losses: Tensor  # (B, 1)
    d_hidden: Tensor | None  # (B, D)
    d_logits: Tensor | None  # (V, B), from which the gradients of weight and bias follow


def _rows_per_pass(weight: Tensor, num_captions: int) -> int:
    """Rows of the weight that fit into a CPU's cache; all rows on other devices."""
    if weight.device.type != "cpu" or torch.compiler.is_compiling():
        return weight.size(0)
    return max(_CACHE_BYTES // (weight.size(1) * weight.element_size()), 8 * num_captions)


def _first_rows(
    rows: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> FirstRows:
    """Cross-entropy over the vocabulary for `(B, D)` rows, and its gradients, reading the weight only once.

    With few rows, reading the weight from memory dominates the cost. While a piece of the weight is in the cache, it
    is used twice: for its logits and for its mean under their softmax. The means are merged by log-sum-exp.
    """
    needs_hidden, needs_logits = needs
    columns = rows.t().contiguous()  # (D, B)
    size = _rows_per_pass(weight, rows.size(0))
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
    return FirstRows((log_sum - target).t(), d_hidden, d_logits)


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
                needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
                needs = (keep and needs_hidden, keep and (needs_weight or needs_bias))
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
        reverse: bool,
        first_mle: bool,
        mle_weight: float,
        mle_label_smoothing: float,
        softcap: float | None,
        chunk_size: int,
        dtype: torch.dtype,
        scalar: bool,
        keep: bool,
    ) -> Tensor:
        settings = (reverse, first_mle, mle_weight, mle_label_smoothing, softcap, chunk_size, dtype)
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
        return (*gradients, *(None,) * 14)


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
