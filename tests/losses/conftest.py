"""A tiny captioning head, its labels and the plain-loop oracle of SMILE."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import policy_gradient_loss

IGNORE = -100


@dataclass
class Head:
    """B=4, T=7, V=23, D=5: prompts, a gap in the middle, duplicates, and a caption with nothing supervised."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh leaves that want a gradient."""
        hidden, weight, bias = (x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias))
        return hidden, weight, bias


def make_head(dtype: torch.dtype = torch.float64, seed: int = 0) -> Head:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(
        [
            [IGNORE, IGNORE, 3, 9, 3, 4, 2],
            [5, 0, 0, 7, 2, IGNORE, IGNORE],
            [IGNORE] * 7,
            [6, IGNORE, 6, 22, 2, IGNORE, 11],
        ]
    )
    return Head(
        hidden=torch.randn(4, 7, 5, generator=generator, dtype=torch.float64).to(dtype),
        weight=torch.randn(23, 5, generator=generator, dtype=torch.float64).to(dtype),
        bias=torch.randn(23, generator=generator, dtype=torch.float64).to(dtype),
        labels=labels,
    )


@pytest.fixture
def head() -> Head:
    return make_head()


def log_sum_exp(values: list[Tensor]) -> Tensor:
    largest = max(value.detach() for value in values)
    return largest + (torch.stack(values) - largest).exp().sum().log()


def loop_smile(
    logits: Tensor,
    labels: Tensor,
    *,
    first_token: str = "mle",
    subset: str = "caption",
    mle_weight: float = 0.0,
    mle_label_smoothing: float = 0.0,
    random_ids: Tensor | None = None,
    pad_token_id: int | None = None,
) -> Tensor:
    """(B, T) losses, one word of one position of one caption at a time; autograd gives the gradients."""
    B, T, V = logits.shape
    losses = [[logits.new_zeros(()) for _ in range(T)] for _ in range(B)]
    for b in range(B):
        words = {int(label) for label in labels[b] if label != IGNORE}
        seen = False
        for t in range(T):
            label = int(labels[b, t])
            if label == IGNORE:
                continue
            if not seen and first_token == "mle":
                allowed = set(range(V))
            elif subset == "caption":
                allowed = words
            elif subset == "reverse":
                closed = set(words)
                if pad_token_id is not None and labels[b, -1] == IGNORE:
                    closed.add(pad_token_id)
                allowed = (set(range(V)) - closed) | {label}
            else:
                assert random_ids is not None
                drawn = random_ids[b, t] if random_ids.dim() == 3 else random_ids[b]
                allowed = ({int(i) for i in drawn} - {pad_token_id}) | {label}
            seen = True
            row = logits[b, t]
            loss = log_sum_exp([row[v] for v in sorted(allowed)]) - row[label]
            log_normaliser = log_sum_exp([row[v] for v in range(V)])
            mle = (1 - mle_label_smoothing) * (log_normaliser - row[label])
            if mle_label_smoothing:
                mle = mle + mle_label_smoothing / V * sum(log_normaliser - row[v] for v in range(V))
            losses[b][t] = mle_weight * mle + (1 - mle_weight) * loss
    return torch.stack([torch.stack(row) for row in losses])


def caption_log_probs(log_probs, mask, loss_type="grpo"):
    """Log-probability `(N,)` of each caption as the loss weights it: minus N times the loss with the advantage 1 for it alone."""
    losses = [policy_gradient_loss(log_probs, row, mask, loss_type=loss_type)["loss"] for row in torch.eye(len(mask))]
    return -len(mask) * torch.stack(losses)
