"""Kendall's tau against scipy, accuracy on pairs, their bootstrap against resampled captions, and the adjusted p-values."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, kendalltau

from hf_captionrl.experimental.rating_agreement import agreement


def rated(n=200, images=23, raters=3):
    generator = np.random.default_rng(0)
    scores = generator.normal(size=n).round(1)
    ratings = np.clip(np.round(scores[:, None] + generator.normal(size=(n, raters)) + 2.5), 1, 4)
    ratings[generator.random((n, raters)) < 0.1] = np.nan
    ratings[np.isnan(ratings).all(1), 0] = 2
    return scores, ratings, generator.integers(0, images, n).tolist()


def pairs(scores, ratings):
    known = ~np.isnan(ratings)
    return np.broadcast_to(scores[:, None], ratings.shape)[known], ratings[known]


@pytest.mark.parametrize("variant", ["b", "c"])
def test_tau_equals_scipy(variant):
    scores, ratings, images = rated()
    found = agreement(scores, ratings, groups=images, variant=variant, num_bootstrap=0)
    assert found["tau"] == pytest.approx(kendalltau(*pairs(scores, ratings), variant=variant).statistic, abs=1e-12)
    assert "tau_ci" not in found
    assert found["num_ratings"] == (~np.isnan(ratings)).sum()
    one = np.nan_to_num(ratings[:, 0], nan=3)  # one rating per caption needs no second axis
    found = agreement(scores, one, variant=variant, num_bootstrap=0)
    assert found["tau"] == pytest.approx(kendalltau(scores, one, variant=variant).statistic, abs=1e-12)


def resampled(images, seed, number):
    """Rows of the captions of images that are drawn with replacement, several times."""
    rows_of = {name: [row for row, image in enumerate(images) if image == name] for name in dict.fromkeys(images)}
    share = np.full(len(rows_of), 1 / len(rows_of))
    for counts in np.random.default_rng(seed).multinomial(len(rows_of), share, size=number):
        yield [row for rows, count in zip(rows_of.values(), counts, strict=True) for row in int(count) * rows]


@pytest.mark.parametrize("variant", ["b", "c"])
def test_interval_is_that_of_resampled_images(variant):
    scores, ratings, images = rated(n=60, images=8)
    found = agreement(scores, ratings, groups=images, variant=variant, num_bootstrap=50, seed=5)
    whole = pairs(scores, ratings)
    m = min(len(set(values)) for values in whole)
    taus = []
    for rows in resampled(images, 5, 50):
        x, y = pairs(scores[rows], ratings[rows])
        if variant == "b":
            taus.append(kendalltau(x, y).statistic)
        else:  # with the number of values of all captions
            signs = sum(np.sign(x[i] - x) @ np.sign(y[i] - y) for i in range(len(x))) / 2
            taus.append(2 * signs / (len(x) ** 2 * (m - 1) / m))
    assert found["tau_ci"] == pytest.approx(np.percentile(taus, [2.5, 97.5]), abs=1e-9)


def test_differences_of_metrics():
    scores, ratings, images = rated(n=400, images=60)
    noise = np.random.default_rng(1).normal(size=400)
    found = agreement({"good": scores, "same": 3 * scores, "noise": noise}, ratings, groups=images)
    assert found["metrics"]["good"] == agreement(scores, ratings, groups=images)
    by_pair = {(row["first"], row["second"]): row for row in found["differences"]}
    assert by_pair["good", "same"]["difference"] == by_pair["good", "same"]["interval"][0] == 0
    assert by_pair["good", "same"]["adjusted_p_value"] == 1
    better = by_pair["good", "noise"]
    assert 0 < better["interval"][0] < better["difference"] < better["interval"][1]
    assert better["p_value"] <= better["adjusted_p_value"] < 0.05
    values, adjusted = ([row[key] for row in found["differences"]] for key in ("p_value", "adjusted_p_value"))
    assert adjusted == pytest.approx(false_discovery_control(values))


def test_a_constant_metric_agrees_with_nobody():
    _, ratings, images = rated()
    for variant in ("b", "c"):
        assert agreement(np.ones(200), ratings, groups=images, variant=variant, num_bootstrap=3)["tau"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1.0] * 199}, "199 scores"),
        ({"scores": [float("nan")] * 200}, "scores"),
        ({"ratings": np.full((200, 3), np.nan)}, "ratings\\[0\\]"),
        ({"ratings": np.ones((200, 3))}, "equal"),
        ({"groups": [0]}, "groups"),
    ],
)
def test_bad_input(change, message):
    scores, ratings, images = rated()
    with pytest.raises(ValueError, match=message):
        agreement(**{"scores": scores, "ratings": ratings, "groups": images, **change})
