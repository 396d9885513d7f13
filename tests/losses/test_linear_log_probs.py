"""`linear_log_probs` equals log-softmax over materialised logits."""

import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX, linear_log_probs
from tests.losses.conftest import Head, make_head
from tests.losses.test_fused_smile import allocations
from tests.tolerances import assert_close


def loop_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    log_probs, entropies = [], []
    for row, label in zip(hidden.flatten(0, 1), labels.flatten(), strict=True):
        logits = weight @ row
        if bias is not None:
            logits = logits + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        probs = torch.exp(logits / temperature) / torch.exp(logits / temperature).sum()
        supervised = label != IGNORE_INDEX
        log_probs.append(probs[label].log() if supervised else 0 * row.sum())
        entropies.append(-(probs * probs.log()).sum() if supervised else 0 * row.sum())
    return torch.stack(log_probs).view(labels.shape), torch.stack(entropies).view(labels.shape)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("case", [{}, {"temperature": 1.7, "softcap": 2.0}])
def test_equals_a_plain_loop_under_any_upstream_gradient(head: Head, case, with_entropy):
    upstream = torch.linspace(-1, 2, head.labels.numel(), dtype=torch.float64).view_as(head.labels)
    ours, theirs = head.leaves(), head.leaves()
    result = linear_log_probs(
        ours[0], ours[1], head.labels, bias=ours[2], chunk_size=4, return_entropy=with_entropy, **case
    )
    log_probs, entropies = result if with_entropy else (result, None)
    expected, expected_entropies = loop_log_probs(*theirs, head.labels, **case)
    assert_close(log_probs, expected)
    loss, other = (log_probs * upstream).sum(), (expected * upstream).sum()
    if entropies is not None:
        assert_close(entropies, expected_entropies, ulps=32)
        loss, other = (
            loss + (entropies * upstream.flip(0)).sum(),
            other + (expected_entropies * upstream.flip(0)).sum(),
        )
    loss.backward()
    other.backward()
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine.grad, reference.grad, ulps=128)


def test_a_frozen_head_gets_no_gradient_and_the_logits_are_never_built(head: Head):
    B, T, V, D = 16, 24, 1000, 64
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(V, D)

    def step():
        hidden = torch.ones(B, T, D, requires_grad=True)
        linear_log_probs(hidden, weight, labels, chunk_size=32, return_entropy=True)[0].sum().backward()

    step()
    assert allocations(step, 4 * V * D) == 0

    def plain():
        hidden = torch.ones(B, T, D, requires_grad=True)
        (hidden @ weight.T).log_softmax(-1).sum().backward()

    assert allocations(plain, 4 * B * T * V) > 0


def test_half_precision_is_finite_and_close():
    dtype = torch.float16
    head, exact = make_head(dtype), make_head()
    leaves = head.leaves()
    log_probs, entropy = linear_log_probs(
        *leaves[:2], head.labels, bias=leaves[2], temperature=0.3, return_entropy=True
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.dtype == torch.float32
    expected = linear_log_probs(exact.hidden, exact.weight, exact.labels, bias=exact.bias, temperature=0.3)
    assert_close(log_probs.double(), expected, dtype=dtype, ulps=2)
    assert all(leaf.grad.dtype == dtype and leaf.grad.isfinite().all() for leaf in leaves)


def test_without_supervised_tokens_everything_is_zero(head: Head):
    hidden, weight, bias = head.leaves()
    log_probs = linear_log_probs(hidden, weight, torch.full_like(head.labels, IGNORE_INDEX), bias=bias)
    log_probs.sum().backward()
    assert not log_probs.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("with_entropy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_without_graph_breaks(with_entropy):
    head = make_head(torch.float32)

    def step(hidden, weight, bias):
        result = linear_log_probs(hidden, weight, head.labels, bias=bias, chunk_size=8, return_entropy=with_entropy)
        return result[0].sum() + result[1].sum() if with_entropy else result.sum()

    torch._dynamo.reset()
    compiled, eager = head.leaves(), head.leaves()
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    expected = step(*eager)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for mine, other in zip(compiled, eager, strict=True):
        assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"bias": torch.zeros(22)}, "bias"),
        ({"softcap": -1.0}, "softcap"),
        ({"labels": torch.full((4, 7), 23)}, "labels contain 23"),
        ({"weight": torch.zeros(23, 4)}, "weight"),
    ],
)
def test_invalid_arguments_raise(head: Head, change, name):
    arguments = {"hidden": head.hidden, "weight": head.weight, "labels": head.labels} | change
    with pytest.raises(ValueError, match=name):
        linear_log_probs(**arguments)
