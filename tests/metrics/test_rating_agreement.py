"""Kendall's tau against scipy, accuracy on pairs, their bootstrap against resampled captions, and the adjusted p-values."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import false_discovery_control, kendalltau

from hf_captionrl.metrics import agreement
from hf_captionrl.metrics.rating_agreement import benjamini_hochberg, pairwise_accuracy

SAMPLE = json.loads((Path(__file__).parent / "flickr8k_expert_sample.json").read_text())


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


def voted(pairs=150, images=20):
    """Scores, votes, images and categories of captions; two neighbours are a pair."""
    generator = np.random.default_rng(3)
    scores, votes = generator.integers(0, 4, 2 * pairs), generator.integers(0, 6, 2 * pairs)
    group, kind = generator.integers(0, images, pairs), generator.integers(0, 2, pairs)
    return scores, votes, np.repeat(group, 2).tolist(), np.repeat(np.where(kind, "HI", "HM"), 2).tolist()


def plain_accuracy(scores, votes):
    right = 0.0
    for i in range(0, len(scores), 2):
        if scores[i] == scores[i + 1] or votes[i] == votes[i + 1]:
            right += 0.5
        else:
            right += (scores[i] > scores[i + 1]) == (votes[i] > votes[i + 1])
    return right / (len(scores) // 2)


def test_accuracy_and_its_interval_equal_plain_loops():
    scores, votes, images, kinds = voted()
    found = pairwise_accuracy(scores, votes, groups=images, categories=kinds, num_bootstrap=40, seed=2)
    assert found["accuracy"] == pytest.approx(plain_accuracy(scores, votes))
    for kind, part in found["categories"].items():
        rows = [row for row, each in enumerate(kinds) if each == kind]
        assert part["accuracy"] == pytest.approx(plain_accuracy(scores[rows], votes[rows]))
    drawn = [plain_accuracy(scores[rows], votes[rows]) for rows in resampled(images, 2, 40)]
    assert found["accuracy_ci"] == pytest.approx(np.percentile(drawn, [2.5, 97.5]))
    assert (found["num_pairs"], found["num_images"]) == (150, 20)
    assert pairwise_accuracy(-scores, votes)["accuracy"] == pytest.approx(1 - found["accuracy"])
    both = pairwise_accuracy({"scores": scores, "constant": np.ones(300)}, votes, num_bootstrap=9)
    assert both["metrics"]["constant"]["accuracy"] == 0.5
    assert both["differences"][0]["difference"] == pytest.approx(found["accuracy"] - 0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scores": [1.0] * 3, "ratings": [1, 2, 3]}, "ratings"),
        ({"ratings": np.full(4, np.nan)}, "NaN"),
        ({"ratings": np.ones((4, 2))}, "ratings"),
        ({"scores": [1.0] * 6}, "6 scores"),
        ({"confidence": 0}, "confidence"),
    ],
)
def test_bad_input_for_pairs(change, named):
    with pytest.raises(ValueError, match=named):
        pairwise_accuracy(**{"scores": [1.0, 2, 3, 4], "ratings": [1, 2, 3, 4], **change})


def test_adjusted_p_values_equal_scipy():
    values = np.random.default_rng(0).random(30)
    assert benjamini_hochberg(values) == pytest.approx(false_discovery_control(values))
    assert benjamini_hochberg([]) == []


def test_a_constant_metric_agrees_with_nobody():
    _, ratings, images = rated()
    for variant in ("b", "c"):
        assert agreement(np.ones(200), ratings, groups=images, variant=variant, num_bootstrap=3)["tau"] == 0


def test_scores_of_flickr8k_expert():
    """Scores of the package's metrics for 300 rated captions; the tau of all 5,664 is in reproduction/results/agreement.json."""
    for name, scores in SAMPLE["scores"].items():
        found = agreement(scores, SAMPLE["ratings"], groups=SAMPLE["images"], num_bootstrap=200)
        assert found["tau"] == pytest.approx(SAMPLE["tau"][name], abs=1e-9)
        assert found["tau_ci"][0] < found["tau"] < found["tau_ci"][1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scores": []}, "scores"),
        ({"scores": {}}, "scores"),
        ({"scores": [1.0] * 199}, "199 scores"),
        ({"scores": [float("nan")] * 200}, "scores"),
        ({"ratings": np.full((200, 3), np.nan)}, "ratings\\[0\\]"),
        ({"ratings": np.ones((200, 3))}, "equal"),
        ({"groups": [0]}, "groups"),
        ({"variant": "a"}, "variant"),
        ({"confidence": 1}, "confidence"),
    ],
)
def test_bad_input(change, named):
    scores, ratings, images = rated()
    with pytest.raises(ValueError, match=named):
        agreement(**{"scores": scores, "ratings": ratings, "groups": images, **change})
