r"""SMILE: maximum likelihood over the words of the caption instead of the whole vocabulary.

Legend: B captions, T tokens, V vocabulary, D features, R random ids.

`smile_loss` is the readable reference, computed from logits. `fused_smile_loss` returns the same values from hidden
states and the head's weight, and never builds `(B, T, V)`. Both expect aligned inputs: position t predicts
`labels[:, t]`.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from hf_captionrl.losses.first_token_shifting import shift_first_token
from hf_captionrl.losses.fused_smile import FullVocabularyLoss, SubsetLoss
from hf_captionrl.losses.linear_log_probs import (
    IGNORE_INDEX,
    accumulation_dtype,
    check_head_inputs,
    check_label_range,
    product_dtype,
    resolve_chunk_size,
    supervised_rows,
)
from hf_captionrl.losses.vocabulary_subset import (
    FILL,
    FirstToken,
    RandomDraw,
    Reduction,
    Subset,
    caption_columns,
    check_options,
    check_random_ids,
    dense_subset,
    draw_random_ids,
    excluded_columns,
    first_positions,
    random_columns,
    resolve_first_token,
)

__all__ = [
    "IGNORE_INDEX",
    "FirstToken",
    "RandomDraw",
    "Reduction",
    "Subset",
    "fused_smile_loss",
    "shift_first_token",
    "smile_loss",
]


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
        ValueError: If shapes disagree, an option is out of range, or every label is ignored.
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
    if not supervised.any():
        raise ValueError(
            f"All {labels.numel()} labels are ignored ({IGNORE_INDEX}), so the loss is undefined. "
            "Check that the captions are longer than the prompt and that max_length does not truncate them to it."
        )
    logits = logits.to(accumulation_dtype(logits))
    targets = labels.masked_fill(~supervised, 0)
    if subset == "random":
        if random_ids is None:
            random_ids = draw_random_ids(labels, V, num_random, random_draw, generator)
        random_ids = check_random_ids(random_ids, labels, V)

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
    micro-batch is empty must still take part in the backward pass.

    Args:
        hidden (`torch.Tensor` of shape `(B, T, D)`): Input of the output projection, aligned: position t predicts
            `labels[:, t]`.
        weight (`torch.Tensor` of shape `(V, D)`): Weight of the output projection, tied to the embeddings or not. If
            it is frozen, its gradient is not computed.
        labels (`torch.Tensor` of shape `(B, T)`): Token ids; `IGNORE_INDEX` is skipped at any position.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): Bias of the output projection.
        token_weights (`torch.Tensor` of shape `(B, T)`, *optional*): Weight of the loss of each token; the mean still
            divides by the number of supervised tokens. May require a gradient.
        first_token (`"mle"` or `"smile"`, *optional*): See `smile_loss`.
        subset: `"caption"`, `"random"` or `"reverse"`, see `smile_loss`. `"reverse"` needs a pass over the whole
            vocabulary.
        mle_weight (`float`): The paper's lambda, in [0, 1]; above 0 it needs a pass over the whole vocabulary.
        mle_label_smoothing (`float`): Label smoothing of the MLE term only, in [0, 1).
        softcap (`float`, *optional*): Logits become `softcap * tanh(logits / softcap)`, as in Gemma.
        num_random (`int`): Ids per draw of the random subset, with replacement.
        random_draw: One draw per `"sequence"` (paper) or per `"position"` (released code).
        random_ids (`torch.Tensor` of shape `(B, R)` or `(B, T, R)`, *optional*): Ids to use instead of drawing them.
        pad_token_id (`int`, *optional*): See `smile_loss`.
        generator (`torch.Generator`, *optional*): Source of the random ids, on the labels' device. Not supported by
            `torch.compile`: pass `random_ids` instead.
        reduction: `"mean"` over the supervised tokens, `"sum"`, or `"none"`. With `mle_weight > 0` or
            `subset="reverse"`, `"none"` computes the logits a second time in the backward pass.
        chunk_size (`int`, *optional*): Rows per chunk of the pass over the vocabulary; by default 256 on a CPU and
            1024 on a GPU.
    Returns:
        `torch.Tensor`: Nats, >= 0: a scalar, or for `reduction="none"` a `(B, T)` tensor, 0 at ignored positions.
            fp64 if an input is fp64, else fp32.
    Raises:
        ValueError: If shapes disagree, an id is outside the vocabulary, or an option is out of range.
    """
    check_options(first_token, subset, mle_weight, mle_label_smoothing, num_random, random_draw, reduction)
    check_head_inputs(hidden, weight, labels, bias, softcap)
    chunk_size = resolve_chunk_size(chunk_size, hidden)
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights {tuple(token_weights.shape)} must be (B, T) = {tuple(labels.shape)}, as labels."
        )
    dtype = accumulation_dtype(hidden, weight)
    supervised = labels != IGNORE_INDEX  # (B, T)
    targets = labels.masked_fill(~supervised, 0)
    first_mle = resolve_first_token(first_token, subset) == "mle"
    if subset == "random":
        if random_ids is None:
            random_ids = draw_random_ids(labels, weight.size(0), num_random, random_draw, generator)
        columns = random_columns(targets, check_random_ids(random_ids, labels, weight.size(0)), pad_token_id, dtype)
    elif subset == "reverse":
        columns = excluded_columns(targets, supervised, pad_token_id, dtype)
    else:
        columns = caption_columns(targets, supervised, dtype)
    keep = torch.is_grad_enabled()

    if mle_weight == 0 and subset != "reverse":
        losses = SubsetLoss.apply(
            hidden, weight, bias, columns.ids, columns.bias, supervised, first_mle, softcap, keep
        )  # (B, T)
        return _reduce(losses if token_weights is None else losses * token_weights, supervised, reduction)

    # The forward pass can compute the gradients only if the token weights are constants. The divisor of the mean stays
    # outside: it arrives with the upstream gradient, which a gradient scaler has already scaled for fp16.
    scalar = reduction != "none" and not (token_weights is not None and token_weights.requires_grad)
    ones = torch.ones(labels.shape, dtype=dtype, device=labels.device)
    result = FullVocabularyLoss.apply(
        hidden,
        weight,
        bias,
        ones if token_weights is None else token_weights,
        columns.ids,
        columns.bias,
        supervised,
        supervised_rows(supervised),
        subset == "reverse",
        first_mle,
        mle_weight,
        mle_label_smoothing,
        softcap,
        chunk_size,
        product_dtype(hidden, weight),
        scalar,
        keep,
    )
    if not scalar:
        return _reduce(result if token_weights is None else result * token_weights, supervised, reduction)
    return result / supervised.sum().clamp(min=1) if reduction == "mean" else result
