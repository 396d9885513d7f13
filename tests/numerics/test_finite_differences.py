"""The gradient of every loss against finite differences in fp64, one coordinate at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import caption_log_probs, fused_smile_loss, linear_log_probs, policy_gradient_loss, smile_loss
from hf_captionrl.trainers.trl_smile_sft import document_ids, segment_loss
from tests.numerics.test_policy_gradient import drawn
from tests.tolerances import assert_close

IGNORE, WORDS = -100, 10
LABELS = torch.tensor([[IGNORE, 3, 9, 3, 2], [0, 7, IGNORE, 2, IGNORE]])
"""A prompt, a word twice, a gap, padding."""
HIDDEN, WEIGHT, BIAS = (
    torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed, shape in enumerate([(2, 5, 3), (WORDS, 3), (WORDS,)])
)
UPSTREAM = torch.linspace(-1, 2, 10, dtype=torch.float64).view(2, 5)
RANDOM = torch.tensor([[1, 3, 3, 6], [0, 5, 6, 7]])
SMILE = {
    "smile": {},
    "smile at the first token too": {"first_token": "smile"},
    "mixture": {"mle_weight": 0.3, "mle_label_smoothing": 0.1},
    "maximum likelihood": {"mle_weight": 1.0},
    "reverse": {"subset": "reverse", "pad_token_id": 0},
    "random": {"subset": "random", "random_ids": RANDOM, "mle_weight": 0.2},
}
STEP = 1e-5
"""Of a central difference: its error falls with the square, that of rounding grows with one over it; both are 1e-10."""
OFF = 1e-8 / torch.finfo(torch.float64).eps
"""Units in the last place of a slope of 1 that this may be off, of which 1e-10 are expected."""


def differences(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Central differences of a scalar function, for every element of every input."""
    found = []
    for which, value in enumerate(inputs):
        slope = torch.zeros_like(value)
        for at in range(value.numel()):
            ends = []
            for sign in (1, -1):
                moved = [tensor.detach().clone() for tensor in inputs]
                moved[which].view(-1)[at] += sign * STEP
                with torch.no_grad():
                    ends.append(float(function(*moved)))
            slope.view(-1)[at] = (ends[0] - ends[1]) / (2 * STEP)
        found.append(slope)
    return found


def compare(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    ours = torch.autograd.grad(function(*leaves), leaves)
    assert max(float(gradient.abs().max()) for gradient in ours) > 1e-3
    for mine, slope in zip(ours, differences(function, leaves), strict=True):
        assert_close(mine, slope, ulps=OFF, magnitude=1)


@pytest.mark.parametrize("name", SMILE)
def test_smile_of_logits(name):
    compare(lambda z: smile_loss(z, LABELS, **SMILE[name]), HIDDEN @ WEIGHT.T + BIAS)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", SMILE)
def test_smile_of_hidden_states_and_head(name, softcap):
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        how = {"softcap": softcap, "token_weights": UPSTREAM, "chunk_size": 3, **SMILE[name]}
        return fused_smile_loss(hidden, weight, LABELS, bias=bias, **how)

    compare(loss, HIDDEN, WEIGHT, BIAS)


@pytest.mark.parametrize("scope", ["document", "sentence", "window"])
@pytest.mark.parametrize("mle_weight", [0.0, 0.3])
def test_smile_of_documents_sentences_and_windows(scope, mle_weight):
    documents, ends = document_ids(LABELS, None), torch.arange(WORDS) % 3 == 0

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        how = {"scope": scope, "window_tokens": 2, "ends": ends, "mle_weight": mle_weight}
        return segment_loss(hidden, weight, LABELS, documents, bias=bias, **how)

    compare(loss, HIDDEN, WEIGHT, BIAS)


def test_log_probs_and_entropies():
    def value(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        how = {"temperature": 0.7, "softcap": 3.0, "chunk_size": 3, "return_entropy": True}
        log_probs, entropy = linear_log_probs(hidden, weight, LABELS, bias=bias, **how)
        return (log_probs * UPSTREAM + entropy * UPSTREAM.flip(0)).sum()

    compare(value, HIDDEN, WEIGHT, BIAS)


@pytest.mark.parametrize("loss_type", ["grpo", "sum", "dapo"])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("ratio", [False, True])
def test_policy_gradient_with_clip_penalty_and_entropy(loss_type, clip, ratio):
    b = drawn(1, 1.0)

    def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return policy_gradient_loss(
            log_probs,
            b["advantages"],
            b["mask"],
            loss_type=loss_type,
            old_log_probs=b["old"] if ratio else None,
            epsilon=clip,
            ref_log_probs=b["ref"],
            beta=0.3,
            entropy=entropy,
            entropy_weight=0.2,
        )["loss"]

    compare(loss, b["log_probs"], b["entropy"])
    weights = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    compare(lambda x: (caption_log_probs(x, b["mask"], loss_type) * weights).sum(), b["log_probs"])


def test_distant_policy_keeps_its_gradient():
    """Beyond e^60 the penalty continues along its tangent, with a gradient in the right direction."""
    ref, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    log_probs = torch.tensor([[-200.0]], dtype=torch.float64, requires_grad=True)
    loss = policy_gradient_loss(log_probs, torch.zeros(1), mask, ref_log_probs=ref, beta=1.0)["loss"]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.item() == pytest.approx(-torch.tensor(60.0, dtype=torch.float64).exp().item())


class Careless(torch.autograd.Function):
    """A loss whose backward forgets a term."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.logsumexp(-1).sum() - logits[..., 0].sum()

    @staticmethod
    def backward(ctx, upstream):
        (logits,) = ctx.saved_tensors
        return upstream * logits.softmax(-1)  # the target's -1 is missing


def test_missing_term_is_detected():
    with pytest.raises(AssertionError, match="not close"):
        compare(Careless.apply, torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
