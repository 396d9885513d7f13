"""Intervals and tests for scores of any scale, and for proportions of 0 and 1."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, sem, t

from hf_captionrl.metrics import (
    bootstrap_interval,
    exact_interval,
    mean_interval,
    paired_test,
    proportion_interval,
    self_retrieval,
)
from hf_captionrl.metrics.suites import SuiteRow
from tests.numerics.drawn import few, seeds
from tests.tolerances import close, within


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
@given(seeds)
def test_a_paired_test_approximates_all_signs(seed):
    drawn = np.random.default_rng(seed)
    a, b = drawn.integers(0, 8, 10).astype(float), drawn.integers(0, 8, 10).astype(float)
    assert paired_test(a, b, num_resamples=2000)["p_value"] == within(enumerated(a - b), 0.05)


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
    # Captions of one image are not independent, so the interval is that of the means of the images.
    reach = t.ppf(0.975, 19) * sem(values.reshape(20, 3).mean(1))
    assert proportion_interval(values, groups=groups) == close((values.mean() - reach, values.mean() + reach))
    rare = [0.0] * 5 + [0.001]
    assert proportion_interval(rare)[0] == 0 > mean_interval(rare)[0]
    counts = drawn.integers(0, 4, 40)
    assert proportion_interval(counts, weights=counts + 2) == bootstrap_interval(counts, weights=counts + 2)
    # None or all of 20 images count as 20 trials; images without anything to count are excluded.
    assert proportion_interval([0] * 60, groups=groups) == exact_interval(0, 20)
    assert proportion_interval([1] * 60, groups=groups) == exact_interval(20, 20)
    assert proportion_interval([0] * 5, weights=[3, 0, 2, 4, 0]) == exact_interval(0, 3)
    assert proportion_interval([3, 0, 2], weights=[3, 0, 2]) == exact_interval(2, 2)
    for bad, weights in (([-1.0, 1.0], None), ([1.5, 0.0], None), ([2.0, 1.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match=r"Use mean_interval"):
            proportion_interval(bad, weights=weights)


def covered(interval, draw, truth=0.0, trials=1000):
    """The share of samples, of fixed seeds, whose interval contains the true mean."""
    found = [interval(*draw(np.random.default_rng(seed))) for seed in range(trials)]
    return np.mean([low <= truth <= high for low, high in found])


def of_students(values, groups=None):
    """By the means of equally large groups."""
    means = values if groups is None else np.array([values[groups == group].mean() for group in np.unique(groups)])
    reach = t.ppf(0.975, len(means) - 1) * sem(means)
    return means.mean() - reach, means.mean() + reach


IMAGES_OF_5 = np.repeat(np.arange(20), 5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda drawn: (drawn.normal(size=10),),
        lambda drawn: (drawn.normal(size=20)[IMAGES_OF_5] + drawn.normal(size=100), IMAGES_OF_5),
    ],
    ids=["10 captions", "20 images of 5 captions"],
)
def test_intervals_of_means_of_small_samples_contain_the_mean(draw):
    def interval(values, groups=None):
        found = mean_interval(values, groups=groups)
        assert found == close(of_students(values, groups), magnitude=4, ulps=256)
        return found

    assert covered(interval, draw) >= 0.93
    assert covered(lambda values, groups=None: bootstrap_interval(values, groups=groups), draw) < 0.93


def test_the_documented_coverage_of_skewed_scores():
    for number, documented in ((10, 0.84), (20, 0.87), (100, 0.92)):
        found = covered(mean_interval, lambda drawn, n=number: (drawn.lognormal(size=n),), math.exp(0.5), 4000)
        assert found == within(documented, 0.01)


def test_the_mean_of_groups_of_different_sizes():
    values, groups = np.array([1.0, 2.0, 6.0, 3.0, 4.0]), ["a", "a", "a", "b", "c"]
    apart = [sum(values[:3] - 3.2), 3 - 3.2, 4 - 3.2]
    reach = t.ppf(0.95, 2) * math.sqrt(3 / 2 * sum(a**2 for a in apart)) / 5
    assert mean_interval(values, groups=groups, confidence=0.9) == close((3.2 - reach, 3.2 + reach))
    assert mean_interval([2.0]) == mean_interval([1.0, 2.0], groups=[0, 0]) == (-math.inf, math.inf)


def excludes_0(interval):
    return interval[0] > 0 or interval[1] < 0


def test_a_paired_interval_excludes_0_exactly_where_the_test_rejects():
    rejected = 0
    for seed in range(400):
        drawn = np.random.default_rng(seed)
        number = int(drawn.integers(3, 40))
        scores = [drawn.normal(size=number), drawn.integers(-2, 4, number) / 10][seed % 2] + drawn.normal() / 3
        groups = drawn.integers(number, size=number) if seed % 3 else None
        found = paired_test(scores, np.zeros(number), groups=groups, num_resamples=[999, 1999][seed % 2], seed=seed)
        assert excludes_0(found["interval"]) == (found["p_value"] < 0.05)
        rejected += found["p_value"] < 0.05
    assert 40 < rejected < 360


def test_a_paired_interval_has_the_shifts_that_the_test_does_not_reject():
    scores, groups = np.random.default_rng(0).normal(0.5, 1, 20), [0, 1, *range(1, 19)]
    low, high = paired_test(scores, np.zeros(20), groups=groups, num_resamples=999)["interval"]
    assert low < scores.mean() < high
    for shift in np.linspace(low - 0.5, high + 0.5, 200):
        found = paired_test(scores, np.full(20, shift), groups=groups, num_resamples=999)
        assert (found["p_value"] >= 0.05) == (low <= shift <= high)


def test_paired_intervals_of_8_images_exclude_a_true_difference_of_0_as_often_as_they_say():
    def paired(values):
        found = paired_test(values, np.zeros(8), num_resamples=1000)
        assert excludes_0(found["interval"]) == (found["p_value"] < 0.05)
        return found["interval"]

    def draw(drawn):
        return (drawn.normal(size=8),)

    assert 0.03 < 1 - covered(paired, draw) < 0.065
    assert 1 - covered(bootstrap_interval, draw) > 0.09
    # 5 images have 32 patterns of signs, of which 2 are as extreme as the largest difference.
    assert paired_test([1.0] * 5, [0.0] * 5)["interval"] == (-math.inf, math.inf)


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
