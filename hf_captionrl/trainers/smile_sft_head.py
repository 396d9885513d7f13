r"""The forward of a causal language model that returns SMILE's loss where TRL expects log-probabilities.

Legend: B rows of a batch, T tokens, V vocabulary, D features, K segments.

TRL's `SFTTrainer` calls `model(..., labels=labels, fused_lm_head=True)` and sums `-output.log_probs`. The forward made
here answers that call with the (negative) sum of SMILE's loss, so that averaging over tokens, gradient accumulation and
processes stay TRL's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_captionrl.captioners.head_tap import replaced_forward
from hf_captionrl.captioners.output_projection import head_projection, is_tappable
from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss
from hf_captionrl.losses.linear_log_probs import accumulation_dtype
from hf_captionrl.trainers.smile_sft_segments import document_ids, find_segments, similar_lengths

__all__ = ["add_smile_head", "logit_factors", "plain_head_for_checks", "segment_loss", "uses_trl_head"]


def uses_trl_head(head: Any, mle_weight: float) -> bool:
    """Whether the loss is plain maximum likelihood on a plain head, which TRL computes itself."""
    return mle_weight == 1.0 and isinstance(head, nn.Linear)


def logit_factors(config: Any) -> tuple[float, float | None]:
    """Factor and soft cap that a model applies to its logits after the output projection."""
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(text, name, None)) is not None:
            return float(factor), cap
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return 1.0, cap
    return float(divisor if text.model_type == "hyperclovax" else 1 / divisor), cap


def segment_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    documents: Tensor,
    *,
    bias: Tensor | None = None,
    scope: str = "document",
    window_tokens: int = 32,
    ends: Tensor | None = None,
    mle_weight: float = 0.0,
    first_token: str = "mle",
    softcap: float | None = None,
) -> Tensor:
    r"""SMILE with a separate subset for each document, sentence or window.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-4 and section 6.
    `scope="document"` is the paper's; the other scopes address the limitation that section 6 names. Everything is
    aligned: position t predicts `labels[:, t]`.

    Shapes: `hidden` `(B, T, D)`, `weight` `(V, D)`, `labels` `(B, T)`, `documents` `(B, T)`, `bias` `(V,)`, `ends`
    `(V,)`. Sum over the supervised tokens, in nats; a connected 0 if there are none.
    """
    found = find_segments(labels, documents, scope, window_tokens=window_tokens, ends=ends)
    settings: dict[str, Any] = {"mle_weight": mle_weight, "first_token": first_token, "softcap": softcap}
    tokens = labels.flatten()[found.index]  # (N,)
    states = hidden.flatten(0, 1)[found.index]  # (N, D)
    place = torch.full_like(found.lengths, -1)  # (K,)
    # A sum over no rows, not over all of them times 0: in fp16 that sum may be infinite, and the product NaN.
    total = states.to(accumulation_dtype(hidden, weight)).sum() if len(tokens) == 0 else None
    for group in similar_lengths(found.lengths):
        longest = int(found.lengths[group].max())
        place.fill_(-1)[group] = torch.arange(len(group), device=group.device)
        row = place[found.segment]  # (N,)
        mine = row >= 0
        at = (row[mine], found.slot[mine])
        padded = states.new_zeros(len(group), longest, states.size(-1)).index_put(at, states[mine])
        targets = tokens.new_full((len(group), longest), IGNORE_INDEX).index_put(at, tokens[mine])
        loss = fused_smile_loss(padded, weight, targets, bias=bias, reduction="sum", **settings)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def add_smile_head(
    model: Any, config: Any, make_output: Callable[..., Any], *, ends: Tensor | None, packed: bool
) -> None:
    """Let a model answer TRL's call with SMILE's loss, unless TRL's head computes it (`config.mle_weight` is 1)."""
    trl_forward = model.forward
    factor, softcap = logit_factors(model.config)
    if not is_tappable(model.get_output_embeddings()):
        raise ValueError(
            f"The output projection is a {type(model.get_output_embeddings()).__name__}, whose weight cannot be read as "
            "one matrix. Exclude it from quantisation and from DoRA."
        )

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()
        if not fused_lm_head:
            return trl_forward(*args, **kwargs)
        if uses_trl_head(head, config.mle_weight):
            return trl_forward(*args, fused_lm_head=True, **kwargs)
        labels, num_items = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        if labels is None or kwargs.pop("shift_labels", None) is not None:
            raise ValueError(
                "SMILE needs whole documents with their labels. Switch context and sequence parallelism off, or set "
                "mle_weight=1."
            )
        if kwargs.get("output_router_logits"):
            raise ValueError(
                "The router loss of a mixture of experts is computed only together with maximum likelihood. Set "
                "router_aux_loss_coef=0.0, or mle_weight=1."
            )
        position_ids = kwargs.get("position_ids")
        if packed and position_ids is None:
            raise ValueError(
                "A padding-free batch came without position_ids, so the ends of its documents are unknown. Prompt "
                "learning drops them: use LoRA, or switch packing and padding_free off."
            )
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state[:, :-1]
        documents = document_ids(labels, position_ids)[:, 1:]
        labels = labels[:, 1:]

        def compute(states: Tensor) -> Tensor:
            states, weight, bias = head_projection(head, states)
            if factor != 1.0:
                states, bias = states * factor, None if bias is None else bias * factor
            return segment_loss(
                states,
                weight,
                labels,
                documents,
                bias=bias,
                scope=config.subset_scope,
                window_tokens=config.window_tokens,
                ends=ends,
                mle_weight=config.mle_weight,
                first_token=config.first_token,
                softcap=softcap,
            )

        # As the head's forward: FSDP2 and ZeRO-3 gather its weight there.
        with replaced_forward(head, compute):
            total = head(hidden)
        mask = labels != IGNORE_INDEX
        nothing = total.detach().new_zeros(())
        number = mask.sum().clamp(min=1) if num_items is None else num_items
        return make_output(loss=total / number, log_probs=-total, entropy=nothing, is_top1=nothing, label_mask=mask)

    model.forward = types.MethodType(forward, model)


@contextmanager
def plain_head_for_checks(model: Any) -> Iterator[None]:
    """Hide a LoRA on the output projection from TRL, which refuses it because its fused head would not train it."""
    if isinstance(model, str):
        yield
        return
    from peft import PeftModel
    from peft.tuners.lora import Linear as LoraLinear

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    original = base.get_output_embeddings

    def below_adapter() -> Any:
        head = original()
        return head.base_layer if type(head) is LoraLinear else head

    base.get_output_embeddings = below_adapter
    try:
        yield
    finally:
        del base.get_output_embeddings
