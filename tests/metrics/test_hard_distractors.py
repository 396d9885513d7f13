"""Recall among nearest and random images equals the mean over all draws."""

import itertools

import numpy as np
import pytest

from hf_captionrl.metrics.hard_distractors import hard_distractor_recall
from tests.closeness import close


@pytest.mark.parametrize(("nearest", "distractors"), [(1, 3), (2, 4), (3, 3)])
def test_equals_the_mean_over_all_draws(nearest, distractors):
    generator = np.random.default_rng(nearest)
    text, images = generator.normal(size=(2, 8, 4))
    text += images  # so that some captions find their image
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    expected = []
    for i in range(8):
        others = sorted((j for j in range(8) if j != i), key=lambda j: -(images[i] @ images[j]))
        hard, rest = others[:nearest], others[nearest:]
        wins = [
            all(text[i] @ images[i] > text[i] @ images[j] for j in (*hard, *drawn))
            for drawn in itertools.combinations(rest, distractors - nearest)
        ]
        expected.append(np.mean(wins))
    found = hard_distractor_recall(text, images, num_nearest=nearest, num_distractors=distractors)
    assert 0 < np.mean(expected) < 1
    assert found["recall_at_1_per_sample"] == close(expected, ulps=64)
    low, high = found["recall_at_1_ci"]
    assert low <= found["recall_at_1"] <= high


def test_wrong_numbers_are_refused():
    features = np.eye(5)
    with pytest.raises(ValueError, match=r"num_nearest is 4. Use 1 to num_distractors \(3\)"):
        hard_distractor_recall(features, features, num_nearest=4, num_distractors=3)
    with pytest.raises(ValueError, match="of more than 99 images"):
        hard_distractor_recall(features, features, num_nearest=4)
