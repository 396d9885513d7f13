"""The policy gradient on edge cases: improbable tokens, distant policies, huge advantages, empty captions, fp16."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_captionrl.losses import caption_log_probs, policy_gradient_loss
from hf_captionrl.losses.policy_gradient import LOSS_TYPES
from tests.numerics.drawn import dtypes, few, fewer, seeds
from tests.tolerances import assert_close, resolution

loss_types = st.sampled_from(LOSS_TYPES)
scales = st.sampled_from([1.0, 100.0, 1e4])
"""Nats of a token at most: a good policy, a bad one, and one that logits of 1e4 made."""


def drawn(seed: int, scale: float, dtype: torch.dtype = torch.float64, lengths=(4, 1, 0)) -> dict[str, Tensor]:
    """Log-probabilities of captions of these lengths, under three policies."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(*lengths, 1))
    found = {
        name: -scale * torch.rand(shape, generator=generator, dtype=torch.float64)
        for name in ("log_probs", "old", "ref")
    }
    found["entropy"] = 5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    found["advantages"] = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    found = {name: value.to(dtype) for name, value in found.items()}
    found["mask"] = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return found


def loss_of(b: dict[str, Tensor], *, ratio: bool, penalty: bool, loss_type: str, clip: float | None = 0.2) -> dict:
    return policy_gradient_loss(
        b["log_probs"],
        b["advantages"],
        b["mask"],
        loss_type=loss_type,  # type: ignore[arg-type]
        old_log_probs=b["old"] if ratio else None,
        epsilon=clip,
        ref_log_probs=b["ref"] if penalty else None,
        beta=0.1 if penalty else 0.0,
        entropy=b["entropy"],
        entropy_weight=0.01,
        max_completion_length=6,
    )


@few
@given(seeds, scales, dtypes, st.booleans(), st.booleans(), loss_types, st.sampled_from([1.0, 0.0, 1e4]))
def test_everything_is_finite(seed, scale, dtype, ratio, penalty, loss_type, factor):
    """A probability ratio of e^1000 must not give NaN weights."""
    b = drawn(seed, scale, dtype)
    b["advantages"] = b["advantages"] * factor
    leaves = [b["log_probs"].requires_grad_(), b["entropy"].requires_grad_()]
    found = loss_of(b, ratio=ratio, penalty=penalty, loss_type=loss_type)
    assert found["loss"].dtype == torch.float32
    assert all(value.isfinite() for value in found.values()), found
    for gradient in torch.autograd.grad(found["loss"], leaves):
        if dtype != torch.float16 or scale == 1.0:  # a gradient above 65504 is correctly infinite in fp16
            assert gradient.isfinite().all()
        assert (gradient[~b["mask"]] == 0).all()
    if penalty:
        assert found["kl"] >= -resolution(1)
    if "clipped_share" in found:
        assert 0 <= found["clipped_share"] <= 3


@few
@given(seeds, st.booleans(), st.booleans(), loss_types)
def test_kl_of_a_distant_policy_equals_exp_while_exp_is_finite(seed, ratio, penalty, loss_type):
    """The bound of the property above does not change smaller ratios and their gradients."""
    b = drawn(seed, 60.0)
    found = loss_of(b, ratio=ratio, penalty=penalty, loss_type=loss_type)["loss"]
    ours, old, ref = (torch.where(b["mask"], b[name], 0.0) for name in ("log_probs", "old", "ref"))
    gain = b["advantages"].unsqueeze(1) * ours
    if ratio:
        r = (ours - old).exp()
        gain = torch.minimum(r * b["advantages"].unsqueeze(1), r.clamp(0.8, 1.2) * b["advantages"].unsqueeze(1))
    if penalty:
        gain = gain - 0.1 * ((ref - ours).exp() - (ref - ours) - 1)
    gain = (gain + 0.01 * b["entropy"]) * b["mask"]
    number = b["mask"].sum(1, keepdim=True).clamp(min=1) if loss_type == "grpo" else 1
    divisor = {"dapo": b["mask"].sum(), "dr_grpo": 6 * len(gain)}.get(loss_type, len(gain))
    assert_close(found, -(gain / number).sum() / divisor, magnitude=1)


@few
@given(seeds, loss_types, st.booleans())
def test_invariances_and_scaling(seed, loss_type, ratio):
    b = drawn(seed, 3.0)
    how = {"ratio": ratio, "penalty": True, "loss_type": loss_type}
    before = loss_of(b, **how)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    moved = loss_of({name: value[order] for name, value in b.items()}, **how)
    wider = {
        name: value if value.ndim == 1 else torch.nn.functional.pad(value, (0, 3), value=0)
        for name, value in b.items()
    }
    for other in (moved, loss_of(wider, **how)):
        assert {n: float(v) for n, v in other.items()} == pytest.approx({n: float(v) for n, v in before.items()})
    # Without penalty and bonus the loss is linear in the advantages.
    plain, doubled = (
        policy_gradient_loss(
            b["log_probs"],
            k * b["advantages"],
            b["mask"],
            loss_type=loss_type,  # type: ignore[arg-type]
            old_log_probs=b["old"] if ratio else None,
            epsilon=0.2,
            max_completion_length=6,
        )["loss"]
        for k in (1.0, 2.0)
    )
    torch.testing.assert_close(doubled, 2 * plain)


@fewer
@given(seeds, loss_types)
def test_captions_of_one_and_zero_tokens(seed, loss_type):
    b = drawn(seed, 1e4, lengths=(1, 1, 0))
    found = caption_log_probs(b["log_probs"], b["mask"], loss_type)
    torch.testing.assert_close(found, torch.where(b["mask"][:, 0], b["log_probs"][:, 0], 0.0))
    none = policy_gradient_loss(
        torch.zeros(0, 4),
        torch.zeros(0),
        torch.zeros(0, 4, dtype=torch.bool),
        loss_type=loss_type,
        max_completion_length=6,
    )
    assert none["loss"] == 0


def test_half_precision_does_not_round_the_advantages():
    """An advantage of 1 + 2^-9 is 1 in bf16: the gradient is computed in fp32 for log-probabilities of any dtype."""
    advantage = torch.tensor([1 + 2**-9])
    log_probs = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    loss = policy_gradient_loss(log_probs, advantage, torch.ones(1, 1))["loss"]
    assert loss.item() == 1 + 2**-9


def test_unbounded_exp_is_detected():
    """Negative control: without the bound, the gradient of a token that is e^200 times as probable is lost."""
    log_probs = torch.zeros(1, requires_grad=True)
    ratio = (log_probs - torch.tensor([-200.0])).exp()
    torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum().backward()
    assert log_probs.grad.isnan().all()
