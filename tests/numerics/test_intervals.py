"""Intervals and tests for scores of any scale, and for proportions of 0 and 1."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from hf_captionrl.metrics import bootstrap_interval, exact_interval, paired_test, proportion_interval, self_retrieval
from hf_captionrl.metrics.suites import SuiteRow
from tests.numerics.drawn import few, seeds
from tests.tolerances import close, within


@few
@given(seeds, st.integers(-1000, 1000), st.integers(-900, 900), st.booleans())
def test_a_bootstrap_interval_scales_with_its_values(seed, power, weight_power, is_grouped):
    drawn = np.random.default_rng(seed)
    values, weights = drawn.integers(-9, 10, 40).astype(float), drawn.integers(1, 5, 40).astype(float)
    options = {"num_resamples": 50, "groups": (np.arange(40) // 3).tolist() if is_grouped else None}
    plain = bootstrap_interval(values, **options)
    assert bootstrap_interval(np.ldexp(values, power), **options) == tuple(np.ldexp(plain, power))
    ratio = bootstrap_interval(values, weights=weights, **options)
    scaled = bootstrap_interval(np.ldexp(values, weight_power), weights=np.ldexp(weights, weight_power), **options)
    assert scaled == ratio


def test_sums_do_not_overflow_and_half_precision_is_accepted():
    half = torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=torch.bfloat16, requires_grad=True)
    assert bootstrap_interval(half) == bootstrap_interval([0.0, 1.0, 1.0, 0.5])
    low, high = bootstrap_interval([1.7e308] * 50)
    assert (low, high) == (1.7e308, 1.7e308)
    low, high = bootstrap_interval([1.7e308, -1.7e308] * 50)
    assert -1.7e308 < low < 0 < high < 1.7e308
    found = paired_test([1.5e308] * 20, [-1e307] * 20)
    assert found["difference"] == pytest.approx(1.6e308)
    assert found["p_value"] < 0.001
    with pytest.raises(ValueError, match="too large for a float"):
        paired_test([1.7e308] * 5, [-1.7e308] * 5)
    with pytest.raises(ValueError, match="too large for a float"):
        bootstrap_interval([1.0, 1.0], weights=[5e-324, 5e-324])


def enumerated(differences):
    """The exact p-value over all signs, in fractions."""
    exact = [Fraction(d) for d in differences]
    observed = abs(sum(exact))
    sums = [
        abs(sum(s * d for s, d in zip(signs, exact, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(exact))
    ]
    return sum(s >= observed for s in sums) / len(sums)


@few
@given(seeds, st.sampled_from([0, -100, -500, -1000, -1060, 500, 1000]))
def test_a_paired_test_scales_with_its_scores(seed, power):
    drawn = np.random.default_rng(seed)
    a, b = drawn.integers(0, 8, 10).astype(float), drawn.integers(0, 8, 10).astype(float)
    plain = paired_test(a, b, num_resamples=2000)
    found = paired_test(np.ldexp(a, power), np.ldexp(b, power), num_resamples=2000)
    assert found["p_value"] == plain["p_value"]
    assert found["difference"] == np.ldexp(plain["difference"], power)
    assert found["p_value"] == within(enumerated(a - b), 0.05)


def test_rounding_of_a_sum_does_not_count_as_a_difference():
    values = [0.1] * 10 + [0.3] * 10
    drawn = np.random.default_rng(0)
    found = [
        paired_test(drawn.permutation(values), np.zeros(20), num_resamples=500, seed=3)["p_value"] for _ in range(5)
    ]
    assert set(found) == {1 / 501}  # all signs equal: one flip in half a million
    equal = paired_test([0.1, 0.2, -0.3], [0.0] * 3, num_resamples=500)
    assert equal["p_value"] == 1.0  # the difference is 0 except for rounding, so no flip is smaller


@pytest.mark.parametrize("bad", [[math.nan], [], ["a"], [10**400], [[1.0]], 3.0, [1j]], ids=repr)
def test_values_that_are_not_numbers_are_refused(bad):
    for call in (bootstrap_interval, proportion_interval):
        with pytest.raises(ValueError, match="values"):
            call(bad)
    with pytest.raises(ValueError, match=r"^a"):
        paired_test(bad, bad)


@few
@given(st.integers(1, 400), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_exact_interval_is_clopper_and_pearsons(trials, data, confidence):
    successes = data.draw(st.integers(0, trials))
    wanted = binomtest(successes, trials).proportion_ci(confidence, method="exact")
    found = exact_interval(successes, trials, confidence=confidence)
    assert found == close((wanted.low, wanted.high), ulps=1 << 16, magnitude=1)
    values = [1.0] * successes + [0.0] * (trials - successes)
    assert proportion_interval(values, confidence=confidence) == found
    assert proportion_interval(values, groups=[f"image {i}" for i in range(trials)], confidence=confidence) == found


def test_proportions_of_groups_and_of_counts():
    drawn = np.random.default_rng(0)
    values = drawn.integers(0, 2, 60)
    groups = (np.arange(60) // 3).tolist()
    # Captions of one image are not independent, so the bootstrap over images is used.
    assert proportion_interval(values, groups=groups) == bootstrap_interval(values, groups=groups)
    counts = drawn.integers(0, 4, 40)
    assert proportion_interval(counts, weights=counts + 2) == bootstrap_interval(counts, weights=counts + 2)
    # None or all of 20 images count as 20 trials; images without anything to count are excluded.
    assert proportion_interval([0] * 60, groups=groups) == exact_interval(0, 20)
    assert proportion_interval([1] * 60, groups=groups) == exact_interval(20, 20)
    assert proportion_interval([0] * 5, weights=[3, 0, 2, 4, 0]) == exact_interval(0, 3)
    assert proportion_interval([3, 0, 2], weights=[3, 0, 2]) == exact_interval(2, 2)
    for bad, weights in (([-1.0, 1.0], None), ([1.5, 0.0], None), ([2.0, 1.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match=r"Use bootstrap_interval"):
            proportion_interval(bad, weights=weights)


def test_recalls_and_shares_of_claims_have_exact_intervals():
    images = torch.eye(30)
    wrong = self_retrieval(images.roll(1, 0), images)
    assert wrong["recall_at_1"] == 0.0
    assert wrong["recall_at_1_ci"] == exact_interval(0, 30)
    right = self_retrieval(images, images, num_distractors=9)
    assert right["recall_at_1_ci"] == exact_interval(30, 30)
    row = SuiteRow(captions=["a"] * 30)
    row.mean("hallucination", [0] * 30, weights=[2] * 30, is_share=True)
    assert row.numbers["hallucination_ci"] == list(exact_interval(0, 30))
    # A score that is 0 everywhere is not a proportion.
    row.mean("clip_score", [0.0] * 30)
    assert row.numbers["clip_score_ci"] == [0.0, 0.0]
