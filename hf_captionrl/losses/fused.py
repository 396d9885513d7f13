r"""The autograd functions behind `fused_smile_loss`.

Legend: B captions, T tokens, V vocabulary, D features, K columns of a subset, R rows of one chunk.

`SubsetLoss` does what SMILE alone needs: scores of the subset's words, and one full row per caption (its first token).
It keeps the gradient of those few logits from the forward and multiplies it out in the backward, so that any upstream
gradient works and nothing of the weight's size exists in between. `FullVocabularyLoss` does what needs whole rows (a
mixture with MLE, the reverse subset), chunk by chunk, gradients included, in the forward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_captionrl.losses.linear import HeadGradients, accumulation_dtype, head_logits, uncap, without_autocast
from hf_captionrl.losses.subset import FILL, first_positions, first_supervised

__all__ = ["FullVocabularyLoss", "SubsetLoss"]


def _add_rows(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """`table.index_add_` that sums the rows of one index in the rows' (higher) precision first."""
    if table.dtype == rows.dtype:
        return table.index_add_(0, index, rows)
    order = torch.arange(index.numel(), device=index.device)
    # Some row of each index stands for all of them; which one does not matter.
    representative = torch.zeros(table.size(0), dtype=torch.long, device=index.device)
    representative = representative.index_copy_(0, index, order)[index]
    summed = torch.zeros_like(rows).index_add_(0, representative, rows)
    return table.index_add_(0, index, summed.to(table.dtype))


def _exponentials(logits: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`exp(logits - max)` (into the logits' own memory if allowed), log-sum-exp and sum of each row."""
    largest = logits.amax(-1, keepdim=True)  # (R, 1)
    powers = (logits.sub_(largest) if in_place else logits - largest).exp_()  # (R, V)
    total = powers.sum(-1, keepdim=True)  # (R, 1)
    return powers, largest + total.log(), total


class SubsetLoss(torch.autograd.Function):
    """Per-token loss `(B, T)` over the subset's columns; the first tokens over the whole vocabulary if `first_mle`."""

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
            in_subset = supervised
            first_gradient: Tensor | None = None
            if first_mle:
                captions = torch.arange(hidden.size(0), device=hidden.device)
                first = first_supervised(supervised)  # (B,)
                is_first = first_positions(supervised)  # (B, T)
                in_subset = supervised & ~is_first
                # Rows of the whole vocabulary are multiplied in the weight's own dtype, which is never copied.
                rows = hidden[captions, first].to(weight.dtype)  # (B, D)
                logits = head_logits(rows, weight, bias, softcap, dtype)  # (B, V)
                label = columns[captions, first].unsqueeze(1)  # (B, 1)
                target = logits.gather(1, label)  # (B, 1)
                probs, log_sum, total = _exponentials(logits, in_place=softcap is None)
                losses = torch.where(is_first, log_sum - target, losses)
                if keep:
                    probs = probs.div_(total).scatter_add_(1, label, -torch.ones_like(target))
                    first_gradient = uncap(probs, logits, softcap).to(weight.dtype)
            if keep:
                gradient = (biased - log_sums).exp_()  # (B, T, K)
                gradient.diagonal(dim1=1, dim2=2).sub_(1.0)
                gradient = uncap(gradient, scores, softcap) * in_subset.unsqueeze(-1)
                ctx.save_for_backward(hidden, weight, bias, columns, supervised, gradient, first_gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, columns, supervised, gradient, first_gradient = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = gradient.dtype
        d_hidden = d_weight = d_bias = None
        with without_autocast(hidden):
            gradient = gradient * upstream.unsqueeze(-1)  # (B, T, K)
            first_upstream = rows = captions = first = None
            if first_gradient is not None:
                captions = torch.arange(hidden.size(0), device=hidden.device)
                first = first_supervised(supervised)
                # The upstream gradient scales (B, D) tensors and never the (B, V) one; 0 for captions without a label.
                first_upstream = (upstream * supervised)[captions, first].unsqueeze(1).to(dtype)  # (B, 1)
                rows = (hidden[captions, first].to(dtype) * first_upstream).to(weight.dtype)
            if needs_hidden:
                d_hidden = torch.bmm(gradient, weight[columns].to(dtype))  # (B, T, D)
                if first_gradient is not None:
                    first_rows = (first_gradient @ weight).to(dtype) * first_upstream
                    d_hidden.index_put_((captions, first), first_rows, accumulate=True)
                d_hidden = d_hidden.to(hidden.dtype)
            if needs_weight:
                if first_gradient is not None:
                    d_weight = first_gradient.t() @ rows  # (V, D)
                else:
                    d_weight = torch.zeros_like(weight)
                d_columns = torch.bmm(gradient.transpose(1, 2), hidden.to(dtype))  # (B, K, D)
                d_weight = _add_rows(d_weight, columns.flatten(), d_columns.flatten(0, 1))
            if needs_bias:
                d_bias = torch.zeros_like(bias, dtype=dtype)
                if first_gradient is not None:
                    d_bias = (first_gradient.to(dtype) * first_upstream).sum(0)
                d_bias = d_bias.index_add_(0, columns.flatten(), gradient.sum(1).flatten()).to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


class FullVocabularyLoss(torch.autograd.Function):
    """`mle_weight * MLE + (1 - mle_weight) * SMILE`, weighted sum or per token, in one pass over chunks of rows.

    With `scalar`, returns the scalar `sum(token_weights * losses)` and computes its gradient on the way. Otherwise
    returns `(B, T)` losses, whose backward walks over the chunks a second time with the upstream gradient as weights.
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
        label_smoothing: float,
        softcap: float | None,
        chunk_size: int,
        dtype: torch.dtype,
        scalar: bool,
        keep: bool,
    ) -> Tensor:
        settings = (reverse, first_mle, mle_weight, label_smoothing, softcap, chunk_size, dtype)
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
            # Scaled in place and handed over once: a copy would be a second buffer of the weight's size.
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
    """Losses `(B, T)` and the gradients of `sum(token_weights * losses)` that are needed, chunk by chunk."""
    reverse, first_mle, mle_weight, label_smoothing, softcap, chunk_size, dtype = settings
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
            # Share of each row that is cross-entropy over the vocabulary, and the share that is over the subset.
            whole = torch.full_like(target, mle_weight)
            if first_mle:
                whole = whole.masked_fill(is_first[index], 1.0)
            part = 1.0 - whole  # (R,)

            loss = torch.zeros_like(target)
            if label_smoothing and mle_weight:
                loss = mle_weight * label_smoothing * (target - logits.mean(-1))
            probs, chosen, d_chosen = None, None, None
            if mle_weight < 1.0:
                chosen = columns[caption]  # (R, K)
                open_bias = column_bias[caption, position if column_bias.size(1) > 1 else 0]  # (R, K)
                if reverse:
                    # Close the caption's words, open the label again; columns not in use point at the label.
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
            if label_smoothing and mle_weight:
                smoothing = mle_weight * label_smoothing * scale
                d_logits.sub_((smoothing / d_logits.size(1)).unsqueeze(1))
                at_label = at_label + smoothing
            d_logits.scatter_add_(1, labels, at_label.unsqueeze(1))
            gradients.add(index, chunk, product_weight, uncap(d_logits, logits, softcap))
    d_hidden, d_weight, d_bias = gradients.finish(hidden, weight, bias)
    # Under torch.compile the ignored rows were computed too.
    losses = losses.view_as(supervised).masked_fill(~supervised, 0.0)
    return losses, None if d_hidden is None else d_hidden.view_as(hidden), d_weight, d_bias
