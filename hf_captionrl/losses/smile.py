r"""SMILE: maximum likelihood over the words of the caption instead of the vocabulary.

Legend: B captions, T tokens, V vocabulary, D features, R random ids.

`smile_loss` is the readable reference on logits. `fused_smile_loss` gives the same numbers from hidden states and the
head's weight and never builds `(B, T, V)`. In both, logits, hidden states and labels are aligned already: position t
predicts `labels[:, t]`.
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
    default_chunk_size,
    product_dtype,
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
    """Mean over the supervised tokens, sum, or the losses themselves."""
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
    Differs from it by: reductions in fp32 with a finite fill, so that fp16 and bf16 logits are safe.

    Computes `mle_weight * MLE + (1 - mle_weight) * SMILE`. V_D holds the supervised labels of the caption: the end
    token is in, the prompt, the start token and padding are out.

    Args:
        logits (`torch.Tensor` of shape `(B, T, V)`): Unnormalised scores, aligned.
        labels (`torch.Tensor` of shape `(B, T)`): Token ids; `IGNORE_INDEX` is skipped, anywhere.
        first_token (`"mle"` or `"smile"`, *optional*): Distribution at the first supervised position: the whole
            vocabulary, or the subset. By default `"mle"`, and `"smile"` with `subset="random"`, as in the paper.
        subset: The words a position chooses from: those of the `"caption"`; `"random"` ids and the label; or the
            `"reverse"`, all but the caption's words, and the label.
        mle_weight (`float`): The paper's lambda, in [0, 1].
        mle_label_smoothing (`float`): In [0, 1), of the MLE branch only (paper 0.0, released code 0.1).
        num_random (`int`): Ids per draw of the random subset, with replacement.
        random_draw: One draw a `"sequence"` (paper) or a `"position"` (released code).
        random_ids (`torch.Tensor` of shape `(B, R)` or `(B, T, R)`, *optional*): Given instead of drawn.
        pad_token_id (`int`, *optional*): Also leaves this id out of a `"random"` subset, and out of the `"reverse"`
            one of captions that end in padding, as the released code does. The paper does neither: None.
        generator (`torch.Generator`, *optional*): Source of the random ids, on the labels' device.
        reduction: `"mean"` over the supervised tokens, `"sum"`, or `"none"`.
    Returns:
        `torch.Tensor`: Nats, >= 0: a scalar, or `(B, T)` with 0 where ignored for `reduction="none"`.
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
            f"Every one of the {labels.numel()} labels is ignored ({IGNORE_INDEX}), so there is no loss. "
            "Check that the captions are longer than the prompt and that max_length leaves room for them."
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
    r"""`smile_loss` straight from hidden states and the head's weight, without the logits of the batch.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-3, Algorithm 1.
    Differs from it by: nothing in value; the work is `hidden @ weight[labels].T` and one full row per caption.

    A weighted token mean over many batches (gradient accumulation, several processes) is `reduction="sum"` divided by
    the number of tokens. With every label ignored the result is a 0 that is connected to the graph (zero gradients)
    rather than an error as in `smile_loss`: looking would stall a GPU, and a process whose micro-batch is empty must
    still take part in the backward pass of the others.

    Args:
        hidden (`torch.Tensor` of shape `(B, T, D)`): Input of the output projection, aligned: position t predicts
            `labels[:, t]`.
        weight (`torch.Tensor` of shape `(V, D)`): Weight of the output projection, tied to the embeddings or not; no
            gradient is computed where it is frozen.
        labels (`torch.Tensor` of shape `(B, T)`): Token ids; `IGNORE_INDEX` is skipped, anywhere.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): Bias of the output projection.
        token_weights (`torch.Tensor` of shape `(B, T)`, *optional*): Factor of each token's loss; the mean still
            divides by the number of supervised tokens. May carry a gradient.
        first_token (`"mle"` or `"smile"`, *optional*): Distribution at the first supervised position: the whole
            vocabulary, or the subset. By default `"mle"`, and `"smile"` with `subset="random"`, as in the paper.
        subset: `"caption"`, `"random"` or `"reverse"`, see `smile_loss`. `"reverse"` needs a pass over the whole
            vocabulary.
        mle_weight (`float`): The paper's lambda, in [0, 1]; above 0 it needs a pass over the whole vocabulary.
        mle_label_smoothing (`float`): In [0, 1), of the MLE branch only.
        softcap (`float`, *optional*): `softcap * tanh(logits / softcap)`, as Gemma's heads do.
        num_random (`int`): Ids per draw of the random subset, with replacement.
        random_draw: One draw a `"sequence"` (paper) or a `"position"` (released code).
        random_ids (`torch.Tensor` of shape `(B, R)` or `(B, T, R)`, *optional*): Given instead of drawn.
        pad_token_id (`int`, *optional*): See `smile_loss`.
        generator (`torch.Generator`, *optional*): Source of the random ids, on the labels' device. `torch.compile`
            takes none: give `random_ids` there.
        reduction: `"mean"` over the supervised tokens, `"sum"`, or `"none"`. With `mle_weight > 0` or
            `subset="reverse"`, `"none"` computes the logits a second time in the backward.
        chunk_size (`int`, *optional*): Rows of a chunk of the vocabulary pass; 256 on a CPU and 1024 on a GPU by
            default.
    Returns:
        `torch.Tensor`: Nats, >= 0: a scalar, or `(B, T)` with 0 where ignored for `reduction="none"`. fp32, or fp64 if
            an input is.
    Raises:
        ValueError: If shapes disagree, an id lies outside the vocabulary, or an option is out of range.
    """
    check_options(first_token, subset, mle_weight, mle_label_smoothing, num_random, random_draw, reduction)
    check_head_inputs(hidden, weight, labels, bias, softcap)
    chunk_size = default_chunk_size(hidden) if chunk_size is None else chunk_size
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be at least 1. Leave it out for the default.")
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(f"token_weights {tuple(token_weights.shape)} must be (B, T) = {tuple(labels.shape)}.")
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

    # Gradients on the way need weights that are known beforehand; the mean's divisor comes in as the upstream
    # gradient, where a gradient scaler has already seen to the small numbers of fp16.
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
