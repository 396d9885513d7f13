"""`fused_smile_loss` and `linear_log_probs` equal references in values and gradients, in any precision and compiled."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, linear_log_probs, smile_loss
from hf_captionrl.losses import smile as fused_smile
from tests.losses.conftest import Head, loop_smile, make_head
from tests.losses.test_smile import OPTIONS
from tests.tolerances import assert_close

IDS = [str(i) for i in range(len(OPTIONS))]


def reference_logits(hidden: Tensor, weight: Tensor, bias: Tensor, softcap: float | None = None) -> Tensor:
    logits = hidden @ weight.T + bias
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def gradients(loss: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    loss.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_equals_a_plain_loop_under_any_upstream_gradient(head: Head, options):
    softcap = 1.5
    upstream = torch.linspace(-1, 2, head.labels.numel()).view_as(head.labels)
    ours, theirs = head.leaves(), head.leaves()
    losses = fused_smile_loss(
        ours[0], ours[1], head.labels, bias=ours[2], softcap=softcap, reduction="none", chunk_size=4, **options
    )
    expected = loop_smile(reference_logits(*theirs, softcap), head.labels, **options)
    assert_close(losses, expected)
    found = gradients((losses * upstream).sum(), ours)
    assert_close(found, gradients((expected * upstream).sum(), theirs), ulps=32)


MIXED = {"mle_weight": 0.3, "mle_label_smoothing": 0.1}


@pytest.mark.parametrize(("reduction", "weighted"), [("mean", True), ("sum", False)])
@pytest.mark.parametrize("options", [{}, MIXED, {"subset": "reverse"}])
def test_scalar_reductions_and_token_weights(head: Head, options, reduction, weighted):
    weights = torch.linspace(-1, 2, 28, dtype=torch.float64).view(4, 7) if weighted else None
    ours, theirs = head.leaves(), head.leaves()
    how: dict[str, Any] = {"token_weights": weights, "reduction": reduction, "chunk_size": 4}
    loss = fused_smile_loss(ours[0], ours[1], head.labels, bias=ours[2], **how, **options)
    losses = smile_loss(reference_logits(*theirs), head.labels, reduction="none", **options)
    expected = (losses if weights is None else losses * weights).sum()
    if reduction == "mean":
        expected = expected / (head.labels != IGNORE_INDEX).sum()
    assert_close(loss, expected, ulps=32)
    # Not 1: the factor of a gradient scaler must reach every gradient.
    assert_close(gradients(3 * loss, ours), gradients(3 * expected, theirs), ulps=64)


@pytest.mark.parametrize("options", [{}, {**MIXED, "subset": "reverse"}])
def test_token_weights_pass_gradcheck(options):
    head = make_head()
    weights = torch.linspace(-1, 2, 28, dtype=torch.float64).view(4, 7)

    def loss(hidden, weight, bias, weights):
        return fused_smile_loss(
            hidden, weight, head.labels, bias=bias, token_weights=weights, softcap=2.0, chunk_size=5, **options
        )

    # The first backward pass returns the sums of the forward pass, the second sums again: the last bit differs.
    for inputs in (weights, weights.clone().requires_grad_()):
        assert torch.autograd.gradcheck(loss, (*head.leaves(), inputs), nondet_tol=1e-12, fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"mle_weight": 0.3}])
def test_a_second_backward_gives_the_same_gradient(head: Head, options):
    hidden, weight, bias = head.leaves()
    loss = fused_smile_loss(hidden, weight, head.labels, bias=bias, **options)
    leaves, scale = (hidden, weight, bias), torch.tensor(2.0, dtype=torch.float64)
    first = torch.autograd.grad(loss, leaves, scale, retain_graph=True)
    assert_close(first, [2 * again for again in torch.autograd.grad(loss, leaves)])


@pytest.mark.parametrize(
    ("dtype", "scale", "softcap"),
    [(torch.float64, 1.0, 2.0), (torch.float64, 300.0, None), (torch.bfloat16, 1.0, None)],
)
def test_first_tokens_merge_pieces_of_the_vocabulary(monkeypatch, dtype, scale, softcap):
    """The pieces have 32 of 150 rows here."""
    monkeypatch.setattr(fused_smile, "_CACHE_BYTES", 1)
    generator = torch.Generator().manual_seed(0)
    head = make_head(dtype)
    head.weight = torch.randn(150, 5, generator=generator, dtype=torch.float64).to(dtype)
    head.bias = torch.randn(150, generator=generator, dtype=torch.float64).to(dtype)
    # At scale 300 the weights of two pieces differ by more than the range of exp.
    head.hidden = head.hidden * scale
    ours, theirs = head.leaves(), [leaf.detach().double().requires_grad_() for leaf in head.leaves()]
    loss = fused_smile_loss(ours[0], ours[1], head.labels, bias=ours[2], softcap=softcap)
    expected = smile_loss(reference_logits(*theirs, softcap), head.labels)
    tolerance = {"dtype": dtype, "ulps": 32 if dtype == torch.float64 else 4, "check_dtype": False}
    assert_close(loss, expected, **tolerance)
    # Magnitude of p - 1 times a hidden state.
    assert_close(gradients(loss, ours), gradients(expected, theirs), **tolerance, magnitude=1)


def allocations(run, size: int) -> int:
    """Number of allocated buffers of `size` bytes or more."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    kineto: Any = record.profiler.kineto_results
    return sum(event.nbytes() >= size for event in kineto.events() if event.name() == "[memory]")


@pytest.mark.parametrize("options", [{}, {"mle_weight": 0.1}, "log-probabilities"])
def test_logits_are_never_built_and_a_frozen_head_costs_nothing(options):
    B, T, V, D = 16, 24, 1000, 64
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(V, (B, T), generator=generator)
    hidden = torch.randn(B, T, D, generator=generator)

    def run(function, trainable: bool):
        weight = torch.zeros(V, D, requires_grad=trainable)

        def step():
            function(hidden.clone().requires_grad_(), weight).backward()

        step()
        return step

    def fused(hidden, weight):
        if options == "log-probabilities":
            return linear_log_probs(hidden, weight, labels, chunk_size=32, return_entropy=True)[0].sum()
        return fused_smile_loss(hidden, weight, labels, chunk_size=32, **options)

    def reference(hidden, weight):
        return smile_loss(hidden @ weight.T, labels)

    logits_bytes, weight_bytes = 4 * B * T * V, 4 * V * D
    assert allocations(run(fused, True), logits_bytes) == 0
    assert allocations(run(reference, True), logits_bytes) > 0  # the measurement detects built logits
    assert allocations(run(fused, True), weight_bytes) == 1
    assert allocations(run(fused, False), weight_bytes) == 0


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float16, {}), (torch.bfloat16, {"mle_weight": 0.3}), (torch.bfloat16, {"subset": "reverse"})],
)
def test_half_precision(dtype, options):
    head = make_head(dtype)
    ours, theirs = head.leaves(), make_head(torch.float32).leaves()
    loss = fused_smile_loss(ours[0], ours[1], head.labels, bias=ours[2], **options)
    expected = smile_loss(reference_logits(*theirs), head.labels, **options)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, dtype=dtype, ulps=1)
    mine = gradients(loss, ours)
    assert {gradient.dtype for gradient in mine} == {dtype}
    assert_close(mine, gradients(expected, theirs), dtype=dtype, ulps=4, check_dtype=False)


def test_repeated_words_are_summed_in_full_precision():
    """A sum of 1024 equal gradients stops growing after 256 terms if it is accumulated in bf16."""
    hidden = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(3, 1, dtype=torch.bfloat16).requires_grad_()
    labels = torch.ones(1, 1024, dtype=torch.long)
    labels[0, -1] = 2
    fused_smile_loss(hidden, weight, labels, first_token="smile", reduction="sum").backward()
    # Both words have probability 1/2: the gradient is 1023 times p - 1 = -1/2 for the label, and once +1/2.
    assert weight.grad[1].item() == pytest.approx(-1023 / 2 + 1 / 2, rel=0.01)


@pytest.mark.parametrize("options", [{}, {"mle_weight": 0.3}])
def test_autocast_gives_fp32_loss_and_gradients(options):
    head = make_head(torch.float32)
    ours, theirs = head.leaves(), head.leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_smile_loss(ours[0].bfloat16(), ours[1], head.labels, bias=ours[2], **options)
        mine = gradients(loss, ours)
    assert loss.dtype == torch.float32
    other = gradients(smile_loss(reference_logits(*theirs), head.labels, **options), theirs)
    assert_close(mine, other, dtype="bfloat16", ulps=4)  # both are of fp32


@pytest.mark.parametrize("options", [{}, {"mle_weight": 0.3}])
def test_without_gradients_the_loss_is_equal_and_without_supervised_tokens_a_connected_zero(head: Head, options):
    hidden, weight, bias = head.leaves()
    with torch.no_grad():
        loss = fused_smile_loss(hidden, weight, head.labels, bias=bias, **options)
    assert not loss.requires_grad
    assert loss == pytest.approx(smile_loss(reference_logits(*head.leaves()), head.labels, **options).item())
    ignored = torch.full_like(head.labels, IGNORE_INDEX)
    loss = fused_smile_loss(hidden, weight, ignored, bias=bias, **options).sum()
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss, (hidden, weight, bias)))


RANDOM = torch.tensor([[1, 3], [0, 5], [1, 2], [6, 6]])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="smile"),
        pytest.param({"mle_weight": 0.3, "reduction": "none"}, id="per-token", marks=pytest.mark.slow),
        pytest.param({"mle_weight": 0.3, "mle_label_smoothing": 0.1}, id="mixture", marks=pytest.mark.slow),
        pytest.param({"subset": "reverse"}, id="reverse", marks=pytest.mark.slow),
        pytest.param({"subset": "random", "random_ids": RANDOM}, id="random", marks=pytest.mark.slow),
    ],
)
def test_compiles_without_graph_breaks(options):
    compare_compiled(smile_step(options), backend="aot_eager")


@pytest.mark.parametrize("with_entropy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_log_probs_compile_without_graph_breaks(with_entropy):
    def step(hidden, weight, bias, labels):
        result = linear_log_probs(hidden, weight, labels, bias=bias, chunk_size=8, return_entropy=with_entropy)
        return result[0].sum() + result[1].sum() if with_entropy else result.sum()

    compare_compiled(step, backend="aot_eager")


def smile_step(options):
    def step(hidden, weight, bias, labels):
        return fused_smile_loss(hidden, weight, labels, bias=bias, softcap=3.0, chunk_size=8, **options).sum()

    return step


def compare_compiled(step, backend: str) -> None:
    head = make_head(torch.float32)
    torch._dynamo.reset()
    compiled, eager = head.leaves(), head.leaves()
    loss = torch.compile(step, fullgraph=True, backend=backend)(*compiled, head.labels)
    expected = step(*eager, head.labels)
    assert_close(loss, expected)
    assert_close(gradients(loss, compiled), gradients(expected, eager))


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch's inductor then writes C++ with at::vec, which it does not declare",
)
@pytest.mark.parametrize("options", [{}, {"mle_weight": 0.3, "mle_label_smoothing": 0.1}], ids=["smile", "mixture"])
def test_compiles_with_the_default_backend(options):
    compare_compiled(smile_step(options), backend="inductor")


# Log-probabilities of tokens


def loop_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    log_probs, entropies = [], []
    for row, label in zip(hidden.flatten(0, 1), labels.flatten(), strict=True):
        logits = weight @ row + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        probs = torch.exp(logits / temperature) / torch.exp(logits / temperature).sum()
        supervised = label != IGNORE_INDEX
        log_probs.append(probs[label].log() if supervised else 0 * row.sum())
        entropies.append(-(probs * probs.log()).sum() if supervised else 0 * row.sum())
    return torch.stack(log_probs).view(labels.shape), torch.stack(entropies).view(labels.shape)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("case", [{}, {"temperature": 1.7, "softcap": 2.0}])
def test_log_probs_equal_a_plain_loop_under_any_upstream_gradient(head: Head, case, with_entropy):
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
        loss = loss + (entropies * upstream.flip(0)).sum()
        other = other + (expected_entropies * upstream.flip(0)).sum()
    assert_close(gradients(loss, ours), gradients(other, theirs), ulps=128)


@pytest.mark.parametrize(
    ("function", "change", "name"),
    [
        (fused_smile_loss, {"hidden": torch.zeros(4, 7, 6)}, "hidden"),
        (fused_smile_loss, {"chunk_size": 0}, "chunk_size"),
        (fused_smile_loss, {"token_weights": torch.ones(4)}, "token_weights"),
        (fused_smile_loss, {"mle_weight": -0.1}, "mle_weight"),
        (linear_log_probs, {"temperature": 0.0}, "temperature"),
        (linear_log_probs, {"bias": torch.zeros(22)}, "bias"),
        (linear_log_probs, {"softcap": -1.0}, "softcap"),
        (linear_log_probs, {"labels": torch.full((4, 7), 23)}, "labels contain 23"),
        (linear_log_probs, {"weight": torch.zeros(23, 4)}, "weight"),
    ],
)
def test_invalid_arguments_raise(head: Head, function, change, name):
    with pytest.raises(ValueError, match=name):
        function(**{"hidden": head.hidden, "weight": head.weight, "labels": head.labels} | change)
