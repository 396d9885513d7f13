r"""Each token of a caption: its loss under maximum likelihood and SMILE, and its gradient under a reward.

Legend: T tokens of the caption with its end, V vocabulary, K tokens of V_D (those of the caption, each once).

Losses and log-probabilities come from the functions of training, through the head tap. The full distribution, which
training never builds, is computed for this one caption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.head_tap import HeadInputs, LogProbsObjective
from hf_captionrl.losses.linear_log_probs import head_logits
from hf_captionrl.losses.policy_gradient import LossType, policy_gradient_loss
from hf_captionrl.losses.smile import IGNORE_INDEX, fused_smile_loss, smile_loss
from hf_captionrl.losses.vocabulary_subset import FirstToken

__all__ = ["Alternative", "CaptionView", "DistributionObjective", "TokenView", "explain_caption", "token_pushes"]


@dataclass(frozen=True)
class Alternative:
    """A token that could stand at a position."""

    token_id: int
    text: str
    probability: float  # in [0, 1], under the distribution that lists it
    in_subset: bool  # whether it is one of the caption's tokens, V_D


@dataclass(frozen=True)
class TokenView:
    """One token of the caption."""

    token_id: int
    text: str
    is_end: bool  # whether it ends the caption
    mle_probability: float  # in [0, 1], among the whole vocabulary
    mle_loss: float  # `-log` of it, in nats: the loss of maximum likelihood
    smile_probability: float  # in [0, 1], among V_D; at the first token among the vocabulary if `first_token` is "mle"
    smile_loss: float  # loss of SMILE in nats, never more than `mle_loss`
    outside: float  # in [0, 1], probability of all tokens outside V_D under the whole vocabulary's distribution
    entropy: float  # of the whole vocabulary's distribution, in nats
    whole_vocabulary: bool  # whether SMILE also uses the whole vocabulary here
    mle_top: tuple[Alternative, ...]  # the most likely tokens of the vocabulary, in descending order
    smile_top: tuple[Alternative, ...]  # the same for SMILE's distribution


@dataclass(frozen=True)
class CaptionView:
    """A caption, token by token."""

    caption: str  # the caption as given
    first_token: str  # `"mle"` or `"smile"`, SMILE's distribution at the first token
    vocab_size: int
    subset: tuple[str, ...]  # texts of the tokens of V_D, in the order of the caption
    complete: bool  # False if the caption was truncated, so that its end token is not scored
    tokens: tuple[TokenView, ...]  # T tokens

    @property
    def mle_loss(self) -> float:
        """Mean nats per token: the model's loss on this caption."""
        return math.fsum(token.mle_loss for token in self.tokens) / len(self.tokens)

    @property
    def smile_loss(self) -> float:
        """Mean nats per token: `smile_loss` of this caption."""
        return math.fsum(token.smile_loss for token in self.tokens) / len(self.tokens)

    @property
    def log_prob(self) -> float:
        """Log-probability of the caption in nats, the sum over its tokens."""
        return -math.fsum(token.mle_loss for token in self.tokens)


class DistributionObjective:
    """Log-probabilities, SMILE's losses and the whole distribution, as an objective of the captioner's head."""

    def __init__(self, first_token: FirstToken = "mle") -> None:
        self.first_token = first_token

    def __call__(self, head: HeadInputs) -> dict[str, Tensor]:
        """Compute them.

        Returns `log_probs`, `entropy` and `smile`, each `(1, T)`, and `distribution` `(1, T, V)`, all in nats.
        """
        named = LogProbsObjective(return_entropy=True)(head)
        settings: dict[str, Any] = {"first_token": self.first_token, "reduction": "none"}
        if head.hidden is None or head.weight is None:
            assert head.logits is not None
            named["smile"] = smile_loss(head.logits, head.labels, **settings)
            logits = head.logits.float()  # (1, T, V)
        else:
            named["smile"] = fused_smile_loss(
                head.hidden, head.weight, head.labels, bias=head.bias, softcap=head.softcap, **settings
            )
            # The function that training calls for each chunk.
            logits = head_logits(
                head.hidden.to(head.weight.dtype), head.weight, head.bias, head.softcap, named["log_probs"].dtype
            )
        named["distribution"] = logits.log_softmax(-1)
        return named


def token_text(tokenizer: Any, token_id: int) -> str:
    """Text of a token, or its name in the vocabulary if it is not a whole character."""
    text = tokenizer.decode([token_id]) if token_id < len(tokenizer) else ""
    if text.strip() and "\ufffd" not in text:
        return text
    name = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    return name or f"<{token_id}>"


def _top(tokenizer: Any, log_probs: Tensor, ids: Tensor, subset: set[int], k: int) -> tuple[Alternative, ...]:
    """The `k` most likely of `ids` with log-probabilities `log_probs`, both `(K,)`."""
    best = log_probs.topk(min(k, len(log_probs)))
    return tuple(
        Alternative(token, token_text(tokenizer, token), math.exp(value), token in subset)
        for value, token in zip(best.values.tolist(), ids[best.indices].tolist(), strict=True)
    )


def explain_caption(
    captioner: Captioner,
    image: Image.Image,
    caption: str,
    *,
    first_token: FirstToken = "mle",
    top_k: int = 5,
    max_length: int = 77,
) -> CaptionView:
    r"""Every token of a caption under maximum likelihood and under SMILE.

    Reference: Yue et al. 2023, Figure 5 and Eq. 2-3. `mle_loss = -log p(w)`; `smile_loss = -log [p(w) / sum_{v in V_D}
    p(v)]`, so they differ by the probability of words that the caption does not use.
    """
    if top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be at least 1. Use 1 or more alternatives per token.")
    batch = captioner.collate([image], [caption], max_length=max_length)
    batch = {name: value.to(captioner.device) for name, value in batch.items()}
    with evaluating(captioner.model), torch.no_grad():
        output = captioner.model(**batch, head_objective=DistributionObjective(first_token))
    labels = captioner.align_labels(batch["labels"])[0]  # (T of the row,)
    supervised = labels != IGNORE_INDEX
    ids = labels[supervised].cpu()  # (T,)
    subset = torch.tensor(list(dict.fromkeys(ids.tolist())))  # (K,)
    members = set(subset.tolist())
    # fp64: sums over the vocabulary must be 1 to four digits.
    distribution = output["distribution"][0, supervised].double().cpu()  # (T, V)
    mle, smile, entropy = (output[name][0, supervised].double().cpu() for name in ("log_probs", "smile", "entropy"))
    own = distribution[:, subset]  # (T, K)
    vocabulary = torch.arange(distribution.size(1))
    outside = torch.ones_like(vocabulary, dtype=torch.bool)
    outside[subset] = False
    tokens = []
    for position, token in enumerate(ids.tolist()):
        whole = position == 0 and first_token == "mle"
        tops = (
            _top(captioner.tokenizer, distribution[position], vocabulary, members, top_k),
            _top(captioner.tokenizer, own[position].log_softmax(0), subset, members, top_k),
        )
        tokens.append(
            TokenView(
                token_id=token,
                text=token_text(captioner.tokenizer, token),
                is_end=position == len(ids) - 1 and token == captioner.eos_token_id,
                mle_probability=math.exp(mle[position]),
                mle_loss=-float(mle[position]),
                smile_probability=math.exp(-smile[position]),
                smile_loss=float(smile[position]),
                outside=float(distribution[position, outside].exp().sum()),
                entropy=float(entropy[position]),
                whole_vocabulary=whole,
                mle_top=tops[0],
                smile_top=tops[0] if whole else tops[1],
            )
        )
    return CaptionView(
        caption=caption,
        first_token=first_token,
        vocab_size=distribution.size(1),
        subset=tuple(token_text(captioner.tokenizer, token) for token in subset.tolist()),
        complete=int(ids[-1]) == captioner.eos_token_id,
        tokens=tuple(tokens),
    )


def token_pushes(
    view: CaptionView, advantage: float, *, loss_type: LossType = "grpo"
) -> tuple[list[float], list[float]]:
    r"""Gradients of one step of the policy gradient at each token of the caption.

    With `L` the [`policy_gradient_loss`] of this one caption, the first list is `-dL / d log p_t = A w_t`, equal for all
    tokens: the advantage `A` is that of the caption, and `w_t` is 1/T (`"grpo"`, `"dapo"`) or 1 (`"sum"`). The second
    is `-dL / d z_t = A w_t (1 - p_t)`, where `z_t` is the logit of the token itself (after the softcap, if any): tokens
    with a probability near 1 hardly change.
    """
    log_probs = torch.tensor([[-token.mle_loss for token in view.tokens]], dtype=torch.float64, requires_grad=True)
    loss = policy_gradient_loss(
        log_probs,
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones_like(log_probs, dtype=torch.bool),
        loss_type=loss_type,
    )["loss"]
    (gradient,) = torch.autograd.grad(loss, log_probs)  # (1, T)
    weights = (-gradient[0]).tolist()
    # d log p_t / d z_t = 1 - p_t
    return weights, [weight * -math.expm1(-token.mle_loss) for weight, token in zip(weights, view.tokens, strict=True)]
