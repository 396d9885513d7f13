"""Log-probabilities of tokens, computed from hidden states and the head's weight.

Legend: B captions, T tokens, V vocabulary, D features, R rows of one chunk.

All functions process the supervised rows in chunks, so that the logits of a whole batch, `(B, T, V)`, are never built.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if an operand is fp64, else fp32: reductions in half precision are off by tenths of a nat."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype that `F.linear` would multiply in: autocast's if enabled, else the weight's, which avoids a copy."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Disables autocast: the autograd functions choose their dtypes explicitly."""
    return torch.autocast(tensor.device.type, enabled=False)


def supervised_rows(supervised: Tensor) -> Tensor:
    """Flat indices of the supervised rows; of all rows under `torch.compile`, which needs static shapes."""
    flat = supervised.flatten()
    if torch.compiler.is_compiling():
        return torch.arange(flat.numel(), device=flat.device)
    return flat.nonzero().squeeze(1)


def resolve_chunk_size(chunk_size: int | None, tensor: Tensor) -> int:
    """Rows per chunk. The default is 256 on a CPU (64 was slower, larger chunks only need more memory)."""
    if chunk_size is None:
        return 1024 if tensor.is_cuda else 256
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be at least 1. Omit it to use the default.")
    return chunk_size


def head_logits(
    rows: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, dtype: torch.dtype
) -> Tensor:
    """`(R, D)` rows to `(R, V)` logits in `dtype`; rows and weight have the same dtype."""
    if bias is not None and bias.dtype == rows.dtype == dtype:
        logits = F.linear(rows, weight, bias)  # (R, V)
    else:
        logits = F.linear(rows, weight).to(dtype)  # (R, V)
        if bias is not None:
            logits = logits + bias.to(dtype)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def uncap(gradient: Tensor, capped: Tensor, softcap: float | None) -> Tensor:
    """Chain rule of `softcap * tanh(z / softcap)`, from its output `capped`."""
    return gradient if softcap is None else gradient * (1 - (capped / softcap) ** 2)


def centred(logits: Tensor) -> Tensor:
    """Logits minus the largest of their row: with logits near 1e4, an fp32 entropy would be rounding error."""
    return logits - logits.amax(-1, keepdim=True)


class HeadGradients:
    """Sums the needed gradients of hidden states, weight and bias over chunks, in fp32."""

    def __init__(self, num_rows: int, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> None:
        self.dtype = accumulation_dtype(hidden, weight)
        needs_hidden, self.needs_weight, self.needs_bias = needs
        self.hidden = hidden.new_zeros(num_rows, hidden.size(-1)) if needs_hidden else None  # (B*T, D)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, index: Tensor, rows: Tensor, weight: Tensor, d_logits: Tensor) -> None:
        """Adds the chunk with the rows `index` of the flat batch; rows and weight have the product's dtype."""
        if self.needs_bias:
            d_bias = d_logits.sum(0)  # (V,)
            self.bias = d_bias if self.bias is None else self.bias + d_bias
        d_logits = d_logits.to(rows.dtype)  # (R, V)
        if self.hidden is not None:
            self.hidden.index_copy_(0, index, (d_logits @ weight).to(self.hidden.dtype))
        if self.needs_weight:
            if self.weight is None:
                self.weight = (d_logits.t() @ rows).to(self.dtype)  # (V, D)
            elif rows.dtype == self.dtype:
                self.weight.addmm_(d_logits.t(), rows)
            else:
                self.weight += d_logits.t() @ rows

    def finish(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of (flat hidden, weight, bias): zeros if no chunk was added, None if not needed."""
        if self.needs_weight and self.weight is None:
            self.weight = torch.zeros_like(weight, dtype=self.dtype)
        if self.needs_bias and self.bias is None and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=self.dtype)
        return self.hidden, self.weight, self.bias


def check_head_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, softcap: float | None
) -> None:
    """Raises if shapes disagree, `softcap` is not positive, or a label is outside the vocabulary."""
    fits = hidden.dim() == 3 and weight.dim() == 2 and hidden.size(-1) == weight.size(-1) > 0
    if not fits or labels.shape != hidden.shape[:2] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)} must be (B, T, D), (V, D), (B, T) and (V,). Pass the input of the "
            "output projection and its weight, and labels that are aligned: position t predicts labels[:, t]."
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap ({softcap}) must be positive. Use None if the model does not cap its logits.")
    check_label_range(labels, weight.size(0))


def check_label_range(
    labels: Tensor, vocab_size: int, *, name: str = "labels", ignore_index: int | None = IGNORE_INDEX
) -> None:
    """Raises for an id outside the vocabulary. Skipped on a GPU: it would synchronise, and gather asserts it."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    wrong = (labels < 0) | (labels >= vocab_size)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        ignored = "" if ignore_index is None else f" or {ignore_index}"
        raise ValueError(
            f"{name} contain {int(labels[wrong][0])}, but must be token ids in [0, {vocab_size}){ignored}. "
            "Use the tokenizer that belongs to the head, or resize the token embeddings."
        )


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probability and entropy of every row; the backward pass computes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_size: int,
        with_entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        total = accumulation_dtype(hidden, weight)
        flat = hidden.flatten(0, 1)  # (B*T, D)
        log_probs = flat.new_zeros(flat.size(0), dtype=total)
        log_sums = flat.new_zeros(flat.size(0), dtype=total)
        entropies = flat.new_zeros(flat.size(0), dtype=total)
        with without_autocast(hidden):
            product_weight = weight.to(dtype)
            for index in rows.split(chunk_size):
                logits = head_logits(flat[index].to(dtype), product_weight, bias, softcap, total)  # (R, V)
                logits = logits / temperature if temperature != 1.0 else logits
                if with_entropy:
                    logits = centred(logits)
                log_sum = logits.logsumexp(-1)  # (R,)
                target = logits.gather(1, labels[index].unsqueeze(1)).squeeze(1)
                log_probs = log_probs.index_copy(0, index, target - log_sum)
                log_sums = log_sums.index_copy(0, index, log_sum)
                if with_entropy:
                    expected = ((logits - log_sum.unsqueeze(1)).exp_() * logits).sum(-1)
                    entropies = entropies.index_copy(0, index, log_sum - expected)
        ctx.save_for_backward(hidden, weight, bias, labels, rows, log_sums, entropies)
        ctx.settings = (temperature, softcap, chunk_size, with_entropy, dtype)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, rows, log_sums, entropies = ctx.saved_tensors
        temperature, softcap, chunk_size, with_entropy, dtype = ctx.settings
        flat = hidden.flatten(0, 1)
        total = log_sums.dtype
        gradients = HeadGradients(flat.size(0), hidden, weight, ctx.needs_input_grad[:3])
        with without_autocast(hidden):
            product_weight = weight.to(dtype)
            for index in rows.split(chunk_size):
                chunk = flat[index].to(dtype)
                capped = head_logits(chunk, product_weight, bias, softcap, total)  # (R, V)
                logits = capped / temperature if temperature != 1.0 else capped
                if with_entropy:
                    logits = centred(logits)
                log_sum, entropy = log_sums[index].unsqueeze(1), entropies[index].unsqueeze(1)
                d_log_prob = d_log_probs[index].unsqueeze(1)  # (R, 1)
                probs = (logits - log_sum).exp_()  # (R, V)
                # d log p_y / dz = [y] - p;  d entropy / dz = -p * (z - E[z]), and E[z] = log_sum - entropy.
                if with_entropy:
                    factor = (log_sum - entropy - logits) * d_entropies[index].unsqueeze(1) - d_log_prob
                    d_logits = probs * factor
                else:
                    d_logits = probs * -d_log_prob
                d_logits = d_logits.scatter_add_(1, labels[index].unsqueeze(1), d_log_prob)
                d_logits = uncap(d_logits / temperature if temperature != 1.0 else d_logits, capped, softcap)
                gradients.add(index, chunk, product_weight, d_logits)
        d_hidden, d_weight, d_bias = gradients.finish(weight, bias)
        return (
            None if d_hidden is None else d_hidden.view_as(hidden),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            *(None,) * 7,
        )


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Per-token log-probabilities of `labels` under `softmax(head(hidden) / temperature)`, in chunks of rows.

    Differentiable in `hidden`, `weight` and `bias` under any upstream gradient. The backward pass computes each chunk again, so
    that only one chunk of logits (and the weight's gradient) is in memory. Rows whose label is ignored are skipped.

    Args:
        hidden (`torch.Tensor` of shape `(B, T, D)`): Input of the output projection, aligned: position t predicts
            `labels[:, t]`.
        weight (`torch.Tensor` of shape `(V, D)`): Its weight; if it is frozen, its gradient is not computed.
        labels (`torch.Tensor` of shape `(B, T)`): Token ids; `IGNORE_INDEX` is skipped.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): Bias of the output projection.
        temperature (`float`): Divides the logits (after the cap), as in sampling.
        softcap (`float`, *optional*): Logits become `softcap * tanh(logits / softcap)`, as in Gemma.
        chunk_size (`int`, *optional*): Rows per chunk; by default 256 on a CPU and 1024 on a GPU.
        return_entropy (`bool`): Also return the entropy of each distribution, which is differentiable too.
    Returns:
        `torch.Tensor` of shape `(B, T)`: Nats, 0 where the label is ignored; with `return_entropy` a pair
            (log-probabilities, entropies). fp64 if an input is fp64, else fp32.
    """
    check_head_inputs(hidden, weight, labels, bias, softcap)
    if temperature <= 0:
        raise ValueError(f"temperature ({temperature}) must be positive. Use 1 to score greedily decoded captions.")
    supervised = labels != IGNORE_INDEX  # (B, T)
    log_probs, entropies = _ChunkedLogProbs.apply(
        hidden,
        weight,
        bias,
        labels.masked_fill(~supervised, 0).flatten(),
        supervised_rows(supervised),
        float(temperature),
        softcap,
        resolve_chunk_size(chunk_size, hidden),
        return_entropy,
        product_dtype(hidden, weight),
    )
    # Under torch.compile the ignored rows are computed too.
    log_probs = log_probs.view(labels.shape).masked_fill(~supervised, 0.0)
    if not return_entropy:
        return log_probs
    return log_probs, entropies.view(labels.shape).masked_fill(~supervised, 0.0)
