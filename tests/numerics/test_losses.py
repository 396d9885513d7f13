"""SMILE in every precision with extreme logits: against fp64, and by properties for any logits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_captionrl.losses import fused_smile_loss, linear_log_probs, policy_gradient_loss, smile_loss
from hf_captionrl.losses.policy_gradient import LOSS_TYPES
from hf_captionrl.trainers.trl_smile_sft import document_ids, segment_loss
from tests.numerics.drawn import IGNORE, Drawn, V, captions, dtypes, extreme, few, log_sum_exp, seeds
from tests.tolerances import assert_close, resolution

OPTIONS = [
    {},
    {"first_token": "smile"},
    {"subset": "reverse"},
    {"subset": "reverse", "first_token": "smile", "pad_token_id": 0},
    {"mle_weight": 0.3, "mle_label_smoothing": 0.1},
    {"mle_weight": 1.0},
    {"subset": "random", "first_token": "smile"},
]
options = st.sampled_from(OPTIONS)
LARGE = 65504.0
"""The largest fp16. Beyond, fp32 cannot tell a logit from one a few nats above it; gradients are then merely finite."""


def with_draw(how: dict, drawn: Drawn) -> dict:
    """Pass the words of a random subset, because two calls would draw different ones."""
    if how.get("subset") != "random":
        return how
    ids = torch.randint(V, (len(drawn.labels), 4), generator=torch.Generator().manual_seed(3))
    return {**how, "random_ids": ids}


def slowly(drawn: Drawn, how: dict) -> np.ndarray:
    """Losses `(B, T)` in fp64, position by position."""
    B, T = drawn.labels.shape
    found = np.zeros((B, T))
    smoothing, mle_weight = how.get("mle_label_smoothing", 0.0), how.get("mle_weight", 0.0)
    for b in range(B):
        words = {int(w) for w in drawn.labels[b] if w != IGNORE}
        first = how.get("first_token", "mle") == "mle"
        for t in range(T):
            word = int(drawn.labels[b, t])
            if word == IGNORE:
                continue
            row = drawn.logits[b, t].double().numpy()
            if how.get("subset") == "reverse":
                closed = words | ({0} if "pad_token_id" in how and drawn.labels[b, -1] == IGNORE else set())
                allowed = (set(range(V)) - closed) | {word}
            elif how.get("subset") == "random":
                allowed = {int(i) for i in how["random_ids"][b]} | {word}
            else:
                allowed = words
            smile = log_sum_exp(row[sorted(range(V) if first else allowed)]) - row[word]
            mle = log_sum_exp(row) - (1 - smoothing) * row[word] - smoothing * row.mean()
            found[b, t] = (1 - mle_weight) * smile + (mle_weight * mle if mle_weight else 0.0)
            first = False
    return found


def fused(logits: Tensor, labels: Tensor, **how) -> Tensor:
    """With the identity matrix as head, hidden states are logits."""
    return fused_smile_loss(logits, torch.eye(V, dtype=logits.dtype), labels, **how)


@few
@given(captions(least=1), options)
def test_loss_equals_fp64_for_any_logits(drawn, how):
    how = with_draw(how, drawn)
    expected = torch.from_numpy(slowly(drawn, how))
    # fp32 keeps 24 bits of the largest logit; fp16 and bf16 lose nothing beyond the rounding of the logits.
    size = max(1.0, drawn.size)
    for loss in (smile_loss, fused):
        logits = drawn.logits.clone().requires_grad_()
        found = loss(logits, drawn.labels, reduction="none", **how)
        assert found.dtype == torch.float32
        assert_close(found.detach().double(), expected, dtype="float32", magnitude=size)
        assert (found >= -resolution(size)).all()
        assert (found[~drawn.supervised] == 0).all()
        found.sum().backward()
        assert logits.grad.isfinite().all()
        assert (logits.grad[~drawn.supervised] == 0).all()
        if drawn.size <= LARGE:
            # The gradient of a cross-entropy: target and alternatives have opposite sums of at most 1.
            assert logits.grad.abs().max() <= 1 + 1e-2
            assert logits.grad.double().sum(-1).abs().max() < 0.02


@few
@given(captions(kinds=("normal", "equal"), dtypes=(torch.float32,), least=1), options, seeds)
def test_smile_ignores_shifts_and_names_of_words(drawn, how, seed):
    how = with_draw(how, drawn)
    logits, labels = drawn.logits.double(), drawn.labels
    generator = torch.Generator().manual_seed(seed)
    before = smile_loss(logits, labels, reduction="none", **how)
    # A constant added to all logits of a position.
    shifted = logits + torch.randn(*labels.shape, 1, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(smile_loss(shifted, labels, reduction="none", **how), before)
    # Other ids for the same words.
    order = torch.randperm(V, generator=generator)
    renamed = {k: order[v] if isinstance(v, Tensor) else v for k, v in how.items()}
    if "pad_token_id" in how:
        renamed["pad_token_id"] = int(order[how["pad_token_id"]])
    other = torch.empty_like(logits)
    other[..., order] = logits
    other_labels = torch.where(labels == IGNORE, labels, order[labels.clamp(min=0)])
    for loss in (smile_loss, fused):
        torch.testing.assert_close(loss(other, other_labels, reduction="none", **renamed), before)
    # Captions in another order.
    rows = torch.randperm(len(labels), generator=generator)
    moved = {k: v[rows] if isinstance(v, Tensor) else v for k, v in how.items()}
    torch.testing.assert_close(smile_loss(logits[rows], labels[rows], reduction="none", **moved), before[rows])


def test_a_suppressed_word_may_have_the_logit_minus_infinity():
    """Some families suppress their image token in this way; it has no effect, and the gradient is finite."""
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0))
    logits[..., 7] = -torch.inf
    labels = torch.tensor([[1, 2, 1]])
    finite = logits.clone()
    finite[..., 7] = -1e9
    for how in OPTIONS[:4]:
        leaf = logits.clone().requires_grad_()
        loss = smile_loss(leaf, labels, **how)
        loss.backward()
        torch.testing.assert_close(loss.detach(), smile_loss(finite, labels, **how))
        assert leaf.grad.isfinite().all()


@few
@given(captions(), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([None, 30.0]))
def test_log_probs_and_entropies_of_any_logits(drawn, temperature, softcap):
    logits = drawn.logits.clone().requires_grad_()
    how = {"temperature": temperature, "softcap": softcap, "return_entropy": True}
    log_probs, entropy = linear_log_probs(logits, torch.eye(V, dtype=logits.dtype), drawn.labels, **how)
    assert log_probs.dtype == torch.float32
    capped = drawn.logits.double()
    capped = (capped if softcap is None else softcap * torch.tanh(capped / softcap)) / temperature
    every = capped.log_softmax(-1)
    expected = every.gather(-1, drawn.labels.clamp(min=0).unsqueeze(-1))[..., 0] * drawn.supervised
    size = max(1.0, float(capped.abs().max()))
    assert_close(log_probs.detach().double(), expected, dtype="float32", magnitude=size)
    assert (log_probs <= resolution(size)).all()
    # For logits of any size: 11 words have an entropy of at most 2.4 nats.
    surprise = -(every.exp() * every).sum(-1) * drawn.supervised
    assert_close(entropy.detach().double(), surprise, dtype="float32", ulps=256, magnitude=math.log(V))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


@few
@given(captions(), st.integers(2, 6), st.sampled_from([0.0, 0.3]), st.sampled_from(["mle", "smile"]))
def test_segments_equal_separate_captions(drawn, window, mle_weight, first_token):
    """The sum over segments is the sum of the losses of the separate segments."""
    how = {"mle_weight": mle_weight, "first_token": first_token}
    eye = torch.eye(V, dtype=drawn.logits.dtype)
    ends = torch.arange(V) % 3 == 0
    documents = document_ids(drawn.labels, None)
    size = max(1.0, drawn.size)
    for scope in ("document", "window", "sentence"):
        logits = drawn.logits.clone().requires_grad_()
        found = segment_loss(logits, eye, drawn.labels, documents, scope=scope, window_tokens=window, ends=ends, **how)
        expected = torch.zeros(())
        for row, label in zip(drawn.logits, drawn.labels, strict=True):
            where = [t for t in range(len(label)) if label[t] != IGNORE]
            for piece in pieces([int(label[t]) for t in where], scope, window, ends):
                at = [where[i] for i in piece]
                expected = expected + smile_loss(row[None, at], label[None, at], reduction="sum", **how)
        assert_close(found.detach(), expected, magnitude=size, summands=drawn.labels.numel())
        found.backward()
        assert logits.grad.isfinite().all()
        assert (logits.grad[~drawn.supervised] == 0).all()


def pieces(tokens: list[int], scope: str, window: int, ends: Tensor) -> list[list[int]]:
    """Segment of each token of a caption."""
    found: list[list[int]] = []
    for i, token in enumerate(tokens):
        new = not found
        if scope == "window" and i:
            new = i % window == 0 and i != len(tokens) - 1
        if scope == "sentence" and i:
            new = bool(ends[tokens[i - 1]]) and not bool(ends[token])
        if new:
            found.append([])
        found[-1].append(i)
    return found


def test_loss_without_supervised_tokens_is_0_for_large_states():
    """The sum of these states is infinite in fp16, and infinity times 0 is NaN, but the loss must be 0."""
    hidden = torch.full((1, 8, V), 3e4, dtype=torch.float16, requires_grad=True)
    labels = torch.full((1, 8), IGNORE)
    loss = segment_loss(hidden, torch.eye(V, dtype=torch.float16), labels, document_ids(labels, None))
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == 0
    assert not hidden.grad.any()


def test_sum_in_half_precision_is_detected():
    """Negative control: the same loss in the logits' dtype exceeds the tolerance above."""
    logits = 10 * extreme((1, 1, V), "normal", torch.bfloat16, 0)
    drawn = Drawn(logits.to(torch.bfloat16), torch.tensor([[3]]))
    careless = F.cross_entropy(drawn.logits[0], torch.tensor([3])).double()
    exact = float(slowly(drawn, {"mle_weight": 1.0})[0, 0])
    off = resolution(max(1.0, drawn.size))
    assert abs(float(careless) - exact) > 10 * off
    assert abs(float(smile_loss(drawn.logits, drawn.labels, mle_weight=1.0)) - exact) < off


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


@pytest.mark.parametrize(("scope", "mle_weight"), [("document", 0.0), ("sentence", 0.3), ("window", 0.3)])
def test_smile_of_documents_sentences_and_windows_passes_gradcheck(scope, mle_weight):
    """The other losses have theirs in tests/losses."""
    labels = torch.tensor([[IGNORE, 3, 9, 3, 2], [0, 7, IGNORE, 2, IGNORE]])
    how = {"scope": scope, "window_tokens": 2, "ends": torch.arange(V) % 3 == 0, "mle_weight": mle_weight}
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((2, 5, 3), (V, 3), (V,))
    ]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return segment_loss(hidden, weight, labels, document_ids(labels, None), bias=bias, **how)

    assert torch.autograd.gradcheck(loss, leaves, nondet_tol=1e-12)


def test_distant_policy_keeps_its_gradient():
    """Beyond e^60 the penalty continues along its tangent, with a gradient in the right direction."""
    ref, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    log_probs = torch.tensor([[-200.0]], dtype=torch.float64, requires_grad=True)
    loss = policy_gradient_loss(log_probs, torch.zeros(1), mask, ref_log_probs=ref, beta=1.0)["loss"]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.item() == pytest.approx(-math.exp(60))
