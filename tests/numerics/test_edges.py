"""Features of any magnitude and precision are ranked by their direction; rows without one are refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_captionrl.metrics import caption_perplexity, clip_score, emscore, ref_clip_score, self_retrieval
from hf_captionrl.retrieval.neighbours import normalised
from hf_captionrl.retrieval.ranking import bag_ranks, check_features, ranks, set_ranks, unit_rows
from hf_captionrl.retrieval.scorer import _unit
from hf_captionrl.rewards import BASELINES, make_baseline, retrieval_rewards
from tests.numerics.drawn import V, dtypes, extreme, few, fewer, kinds, seeds
from tests.tolerances import assert_close, close, resolution

# Powers of two that scale small integers exactly in each dtype.
POWERS = {
    torch.float16: st.integers(-20, 10),
    torch.bfloat16: st.integers(-120, 120),
    torch.float32: st.integers(-140, 120),
    torch.float64: st.integers(-1060, 1010),
}
scaled_dtypes = st.sampled_from(sorted(POWERS, key=str))


def whole(rows, seed, columns=6):
    """Rows of small integers, none of them zero, whose products are exact."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-8, 9, (rows, columns), generator=generator).double()
    drawn[:, 0] = torch.where(drawn[:, 0] == 0, 1.0, drawn[:, 0])
    return drawn


def times(rows, dtype, powers):
    return torch.from_numpy(np.ldexp(rows.numpy(), np.array(powers)[:, None])).to(dtype)


# Rows of any magnitude


@few
@given(scaled_dtypes, seeds, st.data())
def test_self_retrieval_depends_only_on_directions(dtype, seed, data):
    text, images = whole(5, seed), whole(5, seed + 1)
    small, large = (times(rows, dtype, [data.draw(POWERS[dtype]) for _ in rows]) for rows in (text, images))
    found = self_retrieval(small, large, num_bootstrap=0)["ranks"].tolist()
    scores = torch.nn.functional.normalize(text, dim=1) @ torch.nn.functional.normalize(images, dim=1).T
    own = scores.diagonal()[:, None]
    # A tie or a near tie may be ranked either way.
    most = (scores >= own - 1e-5).sum(1)
    least = (scores > own + 1e-5).sum(1) + 1
    assert all(low <= rank <= high for low, rank, high in zip(least.tolist(), found, most.tolist(), strict=True))


@few
@given(scaled_dtypes, seeds, st.data())
def test_every_use_of_features_depends_only_on_directions(dtype, seed, data):
    rows = whole(4, seed)
    small = times(rows, dtype, [data.draw(POWERS[dtype]) for _ in rows])
    unit = torch.nn.functional.normalize(rows, dim=1)
    for found in (
        unit_rows(small),
        normalised(small),
        *([_unit(small, "text", dtype)] if dtype != torch.float64 else []),
    ):
        assert_close(found.double(), unit, ulps=8, magnitude=1, dtype="float32")
    em, wanted = emscore([small], [small.flip(0)]), emscore([rows], [rows.flip(0)])
    for key in ("precision", "recall", "f", "coarse"):
        assert em[key] == close(wanted[key], ulps=4096, magnitude=1)


@fewer
@given(scaled_dtypes, seeds, st.data())
def test_ranks_of_raw_products_do_not_leave_the_range_of_floats(dtype, seed, data):
    text, images = whole(5, seed), whole(5, seed + 1)
    small = times(text, dtype, [data.draw(POWERS[dtype]) for _ in text])
    large = times(images, dtype, [data.draw(POWERS[dtype])] * 5)
    scores = text @ images.T  # integers, so ties are exact
    wanted = (scores >= scores.diagonal()[:, None]).sum(1).tolist()
    if data.draw(st.booleans()):
        small = small / 1  # a copy, because the caller's features must not change
    before = small.clone()
    assert ranks(small, large).tolist() == wanted
    assert bag_ranks(small, large, [list(range(5))])[0].tolist() == wanted
    assert set_ranks(small, large, [list(range(5))] * 5, list(range(5))).tolist() == wanted
    assert torch.equal(small, before)


@pytest.mark.parametrize("power", [-140, -33, 45, 110])
def test_exact_ties_stay_ties_at_extreme_magnitudes(power):
    text, images = whole(5, 1235), whole(5, 1236)
    scores = text @ images.T
    wanted = (scores >= scores.diagonal()[:, None]).sum(1).tolist()
    assert (scores == scores.diagonal()[:, None]).sum(1).tolist() != [1] * 5
    small, large = (times(rows, torch.float32, [power] * 5) for rows in (text, images))
    assert ranks(small, images.float()).tolist() == ranks(text.float(), large).tolist() == wanted


@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN or inf"), (math.inf, "NaN or inf"), (0.0, "zero")])
def test_rows_without_a_direction_are_named(value, said):
    rows, good = torch.ones(3, 4), torch.ones(3, 4)
    rows[1] = value
    for call in (
        lambda: check_features(rows),
        lambda: self_retrieval(rows, good),
        lambda: clip_score(good, rows),
        lambda: ref_clip_score(good, good, [rows] * 3),
        lambda: emscore([good], [rows]),
        lambda: ranks(good, rows),
        lambda: normalised(rows),
    ):
        with pytest.raises(ValueError, match=rf"\[1\] is {said}"):
            call()


# Other numbers


def test_scale_of_the_weights_does_not_matter():
    rows = whole(4, 0)
    wanted = emscore([rows], [rows.flip(0)], idf=[[1, 2, 3, 4]])["precision"]
    for size in (1e-300, 1e300):
        found = emscore([rows], [rows.flip(0)], idf=[[size, 2 * size, 3 * size, 4 * size]])["precision"]
        assert found == pytest.approx(wanted)


class Fixed(torch.nn.Module):
    """A language model with the same logits at every position."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(row)
        self.config = SimpleNamespace(model_type="fixed")

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.row.expand(*input_ids.shape, -1))


class Letters:
    """A tokenizer of single letters."""

    bos_token_id = 0

    def __call__(self, text, verbose=True):
        return {"input_ids": [1 + ord(letter) % (V - 1) for letter in text]}


@few
@given(st.lists(st.text("abcdef", min_size=1, max_size=5), min_size=1, max_size=4), seeds, st.sampled_from([1.0, 1e4]))
def test_perplexity_of_a_certain_and_wrong_model_is_infinite(captions, seed, scale):
    row = (scale * torch.randn(V, generator=torch.Generator().manual_seed(seed))).to(torch.bfloat16)
    found = caption_perplexity(captions, Fixed(row), Letters(), bos="prepend", batch_size=2)
    log_probs = row.float().double().log_softmax(0)
    nats = [-sum(float(log_probs[1 + ord(letter) % (V - 1)]) for letter in text) for text in captions]
    assert_close(found["nats"], nats, dtype="float32", magnitude=scale, summands=V)
    mean = sum(nats) / sum(map(len, captions))
    assert found["perplexity"] == (pytest.approx(math.exp(mean), rel=1e-3) if mean < 709 else math.inf)
    assert not math.isnan(found["mean_perplexity"])


@few
@given(seeds, kinds, dtypes, st.integers(1, 4), st.integers(1, 6), st.sampled_from([1.0, 100.0]))
def test_retrieval_rewards_of_any_similarities(seed, kind, dtype, N, K, scale):
    scores = extreme((N, K), kind, dtype, seed).float()  # the reward converts features to fp32
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
    rewards = extreme((B, G), kind, torch.float32, seed) if B else torch.zeros(0, G, dtype=torch.float64)
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
