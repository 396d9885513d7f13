import math

import numpy as np
import pytest
import torch

from hf_captionrl.metrics import bootstrap, bootstrap_interval, paired_test
from tests.tolerances import within


def test_interval_of_a_mean_is_near_the_normal_one():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=2000)
    low, high = bootstrap_interval(values, num_resamples=4000)
    error = values.std() / np.sqrt(len(values))
    assert low == within(values.mean() - 1.96 * error, 0.2 * error)
    assert high == within(values.mean() + 1.96 * error, 0.2 * error)


def test_interval_has_the_nominal_coverage():
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        low, high = bootstrap_interval(
            generator.binomial(1, 0.3, size=120), num_resamples=300, confidence=0.9, seed=seed
        )
        covered += low <= 0.3 <= high
    assert 0.83 <= covered / 200 <= 0.96


def test_captions_of_one_image_are_drawn_together():
    values = np.repeat(np.random.default_rng(0).normal(size=100), 5)
    alone = bootstrap_interval(values)
    together = bootstrap_interval(values, groups=np.repeat(np.arange(100), 5))
    assert together[1] - together[0] > 1.8 * (alone[1] - alone[0])


def test_ratio_of_sums():
    wrong, claims = np.array([0, 1, 2, 0] * 100), np.array([2, 4, 5, 0] * 100)
    low, high = bootstrap_interval(wrong, weights=claims)
    assert low < 3 / 11 < high
    assert bootstrap_interval([1.0], weights=[4.0], num_resamples=10) == (0.25, 0.25)


def test_same_seed_same_interval():
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_paired_test_with_and_without_a_difference():
    generator = np.random.default_rng(0)
    base = generator.normal(size=300)
    better = paired_test(base + 0.2 + 0.3 * generator.normal(size=300), base)
    assert better["p_value"] < 0.001
    assert better["interval"][0] > 0
    same = paired_test(base, base)
    assert same["difference"] == 0
    assert same["p_value"] == 1.0


def test_paired_test_equals_enumeration():
    differences = [0.5, 1.0, -0.25, 2.0]
    sums = [
        abs(sum(s * d for s, d in zip((a, b, c, e), differences, strict=True)))
        for a in (1, -1)
        for b in (1, -1)
        for c in (1, -1)
        for e in (1, -1)
    ]
    exact = sum(s >= abs(sum(differences)) for s in sums) / 16
    found = paired_test(differences, [0.0] * 4, num_resamples=20_000)
    assert found["p_value"] == within(exact, 0.01)


def test_p_values_under_the_null_are_uniform():
    generator = np.random.default_rng(0)
    values = [
        paired_test(generator.normal(size=30), generator.normal(size=30), num_resamples=200, seed=i)["p_value"]
        for i in range(200)
    ]
    assert np.mean(np.array(values) < 0.1) == within(0.1, 0.06)


def exact_quantile(n, p, q):
    """Quantile `q` of a binomial with `n` trials, as a share of hits."""
    below = 0.0
    for hits in range(n + 1):
        below += math.comb(n, hits) * p**hits * (1 - p) ** (n - hits)
        if below >= q:
            return hits / n
    return 1.0


def test_interval_of_hits_equals_the_binomial_one():
    values = np.r_[np.ones(60), np.zeros(240)]
    low, high = bootstrap_interval(values, num_resamples=200_000)
    assert low == within(exact_quantile(300, 0.2, 0.025), 1.01 / 300)
    assert high == within(exact_quantile(300, 0.2, 0.975), 1.01 / 300)


def test_drawing_counts_equals_drawing_samples_in_distribution(monkeypatch):
    rng = np.random.default_rng(3)
    values, weights = rng.integers(0, 3, 800) * 1.0, rng.integers(1, 3, 800) * 1.0
    options = {"weights": weights, "groups": (np.arange(800) // 2).tolist(), "num_resamples": 40_000}
    counts = bootstrap_interval(values, **options)
    monkeypatch.setattr(bootstrap, "_SAMPLES_PER_VALUE", 10**9)
    samples = bootstrap_interval(values, **options)
    assert counts != samples  # two different methods
    assert counts == within(samples, 0.05 * (samples[1] - samples[0]))


@pytest.mark.parametrize(("wins", "losses"), [(30, 30), (40, 22), (50, 20)])
def test_paired_test_of_hits_equals_the_sign_test(wins, losses):
    a, b = np.zeros(500), np.zeros(500)
    a[:wins], b[wins : wins + losses] = 1.0, 1.0
    tosses, least = wins + losses, abs(wins - losses)
    exact = sum(math.comb(tosses, k) for k in range(tosses + 1) if abs(2 * k - tosses) >= least) / 2**tosses
    found = paired_test(a, b, num_resamples=100_000)
    assert found["p_value"] == within(exact, 0.006)
    assert found["difference"] == pytest.approx((wins - losses) / 500)


def test_labels_of_every_kind_are_groups():
    values = [1.0, 2.0, 3.0, 5.0]
    pairs = [("p", 0), ("q", 0), ("p", 0), ("q", 1)]
    assert bootstrap_interval(values, groups=pairs) == bootstrap_interval(values, groups=[0, 1, 0, 2])
    mixed = bootstrap_interval(values, groups=[1, "1", 1, (1,)])
    assert mixed == bootstrap_interval(values, groups=[0, 1, 0, 2])
    for kind in (np.array, torch.tensor, list):
        assert bootstrap_interval(values, groups=kind([7, 3, 7, 5])) == bootstrap_interval(values, groups=[2, 0, 2, 1])
    assert paired_test(values, [0.0] * 4, groups=pairs)["p_value"] > 0
