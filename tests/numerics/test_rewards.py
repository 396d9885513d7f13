"""Every reward and baseline on edge cases: one token, no word, equal captions, equal images, extreme features."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_captionrl.rewards import (
    BASELINES,
    make_baseline,
    retrieval_rewards,
)
from tests.numerics.drawn import dtypes, few, kinds, seeds
from tests.numerics.drawn import extreme as extreme_logits
from tests.tolerances import assert_close, resolution


@few
@given(seeds, kinds, dtypes, st.integers(1, 4), st.integers(1, 6), st.sampled_from([1.0, 100.0]))
def test_retrieval_rewards_of_any_similarities(seed, kind, dtype, N, K, scale):
    scores = extreme_logits((N, K), kind, dtype, seed).float()  # the reward converts features to fp32
    own = torch.randint(K, (N,), generator=torch.Generator().manual_seed(seed))
    log_prob = retrieval_rewards(scores, own, "log_prob", scale)
    found = retrieval_rewards(scores, own, "accuracy", scale)
    assert log_prob.isfinite().all()
    assert (log_prob <= 0).all()
    assert set(found.tolist()) <= {0.0, 1.0}
    expected = (scale * scores.double()).log_softmax(1).gather(1, own[:, None])[:, 0]
    size = max(1.0, scale * float(scores.abs().max()))
    assert_close(log_prob.double(), expected, dtype="float32", magnitude=size)
    torch.testing.assert_close(retrieval_rewards(scores, own, "cosine"), scores[torch.arange(N), own])
    # Other distractors first, and the target in another position: the same reward.
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed + 1))
    moved = torch.argsort(order)[own]
    assert_close(retrieval_rewards(scores[:, order], moved, "log_prob", scale), log_prob, magnitude=size)
    assert torch.equal(retrieval_rewards(scores[:, order], moved, "accuracy", scale), found)
    # One more distractor never helps.
    more = torch.cat([scores, scores[:, :1]], dim=1)
    assert (retrieval_rewards(more, own, "log_prob", scale) <= log_prob + resolution(size)).all()
    assert (retrieval_rewards(more, own, "accuracy", scale) <= found).all()
    if kind == "equal":
        assert_close(log_prob, torch.full((N,), -math.log(K)), magnitude=size)
        assert (found == (1.0 if K == 1 else 0.0)).all()


@few
@given(st.sampled_from(sorted(BASELINES)), st.integers(0, 3), st.integers(2, 5), seeds, kinds)
def test_advantages_of_any_rewards(name, B, G, seed, kind):
    rewards = extreme_logits((B, G), kind, torch.float32, seed) if B else torch.zeros(0, G, dtype=torch.float64)
    greedy = rewards[:, 0].clone()
    found = make_baseline(name, G)(rewards, greedy)
    assert found.shape == (B, G)
    assert found.isfinite().all()
    size = float(rewards.abs().max()) if B else 0.0
    if name in ("group_mean", "leave_one_out"):
        # In fp64 a mean has a relative error of 2^-52; the mean of equal rewards must be exact.
        assert_close(found.sum(1), torch.zeros(B, dtype=torch.float64), magnitude=max(1.0, size), summands=G)
        if kind in ("normal", "wide"):
            assert_close(make_baseline(name, G)(rewards + 7.0), found, ulps=1024, magnitude=size + 7)
            order = torch.randperm(G, generator=torch.Generator().manual_seed(seed))
            assert_close(make_baseline(name, G)(rewards[:, order]), found[:, order], magnitude=max(1.0, size))
    if kind == "equal" and name in ("group_mean", "leave_one_out", "greedy"):
        assert found.abs().max() <= resolution(size, dtype="float64") if B else True


def test_reward_in_half_precision_is_detected():
    """Negative control: the same softmax in bf16 exceeds the tolerances above."""
    scores = torch.tensor([[0.31, 0.30, 0.12]])
    own = torch.tensor([0])
    exact = (100 * scores.double()).log_softmax(1)[0, 0]
    half = retrieval_rewards(scores.bfloat16(), own, "log_prob", 100.0)
    full = retrieval_rewards(scores, own, "log_prob", 100.0)
    assert abs(float(full) - float(exact)) < resolution(100) < 1e-2 < abs(float(half) - float(exact))
