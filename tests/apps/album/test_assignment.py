"""Assignment and choice against all possible choices; components, their split and its bound; blocks against plain loops."""

import itertools

import numpy as np
import pytest
import torch

from hf_captionrl.apps.album import assignment as candidate_scores
from hf_captionrl.apps.album.assignment import (
    CandidateScores,
    best_assignment,
    choose_candidates,
    confusions_of,
    distinct_captions,
    score_candidates,
)
from tests.tolerances import assert_close


def enumerate_assignments(gains):
    """The largest sum of gains over every assignment; each row may stay without a column."""
    best = None
    for choice in itertools.product(*([None, *mine] for mine in gains)):
        taken = [column for column in choice if column is not None]
        if len(set(taken)) == len(taken):
            total = sum(0 if c is None else mine[c] for c, mine in zip(choice, gains, strict=True))
            best = total if best is None else max(best, total)
    return best


def test_assignment_is_optimal():
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows, columns = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        # Small integers, so that there are ties.
        gains = [{c: int(rng.integers(-3, 6)) for c in range(columns) if rng.random() < 0.6} for _ in range(rows)]
        found = best_assignment(gains)
        taken = [column for column in found if column is not None]
        assert len(set(taken)) == len(taken)
        total = sum(0 if c is None else mine[c] for c, mine in zip(found, gains, strict=True))
        assert total == enumerate_assignments(gains)


def random_choice(rng, number, texts, most):
    counts = rng.integers(1, most + 1, number)
    starts = np.cumsum([0, *counts])
    names = rng.integers(-1, texts, starts[-1])
    margin = rng.normal(size=starts[-1]).astype(np.float32).clip(-2, 2)
    return starts, names, CandidateScores(margin, np.where(margin > 0, 1, 2))


def value_of(starts, names, scores, chosen):
    """(distinct texts, rank 1 among them, sum of their margins); a text that is used twice counts once, with its best."""
    best = {}
    for i in chosen:
        if names[i] >= 0:
            value = (scores.rank[i] == 1, float(scores.margin[i]))
            best[names[i]] = max(best.get(names[i], value), value)
    return (len(best), sum(first for first, _ in best.values()), sum(margin for _, margin in best.values()))


def best_by_enumeration(starts, names, scores):
    """The best value over every choice; an image may go without, and texts that two images have are no choice."""
    best = (-1, 0, 0.0)
    for choice in itertools.product(*([None, *range(a, b)] for a, b in itertools.pairwise(starts))):
        chosen = [i for i in choice if i is not None]
        used = [names[i] for i in chosen]
        if -1 not in used and len(set(used)) == len(used):
            best = max(best, value_of(starts, names, scores, chosen))
    return best


def test_choice_over_components_is_optimal():
    rng = np.random.default_rng(0)
    for _ in range(60):
        starts, names, scores = random_choice(rng, int(rng.integers(1, 7)), int(rng.integers(1, 9)), 4)
        found = choose_candidates(starts, names, scores)
        assert all(low <= i < high for i, low, high in zip(found.chosen, starts, starts[1:], strict=False))
        best = best_by_enumeration(starts, names, scores)
        own = value_of(starts, names, scores, found.chosen[found.has_own])
        assert own[:2] == best[:2]
        assert_close(own[2], best[2], dtype=torch.float32, magnitude=4)


def test_split_components_give_distinct_texts_and_no_better_choice():
    for seed in range(10):
        starts, names, scores = random_choice(np.random.default_rng(seed), 60, 45, 5)
        best = choose_candidates(starts, names, scores)
        split = choose_candidates(starts, names, scores, max_component=7)
        own = names[split.chosen[split.has_own]]
        assert len(set(own.tolist())) == len(own)
        best_value, split_value = (value_of(starts, names, scores, c.chosen[c.has_own]) for c in (best, split))
        assert best_value > split_value, "the test needs a component that is split"


def unit(rng, rows, size=6):
    features = rng.normal(size=(rows, size))
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@pytest.fixture
def album():
    """Seven images, one of them twice, with 1 to 4 candidates each."""
    rng = np.random.default_rng(1)
    images = unit(rng, 7, 5).astype(np.float32)
    images[4] = images[1]
    starts = np.cumsum([0, 2, 1, 4, 3, 1, 2, 4])
    return torch.from_numpy(unit(rng, starts[-1], 5).astype(np.float32)), starts, torch.from_numpy(images)


@pytest.mark.parametrize("floats", [1, 60])  # a block per image, and blocks of several
def test_scores_in_blocks_against_a_loop(album, floats, monkeypatch):
    monkeypatch.setattr(candidate_scores, "_BLOCK_FLOATS", floats)
    text, starts, images = album
    found = score_candidates(text.__getitem__, starts, images)
    confused = confusions_of(lambda rows: text[starts[rows]], np.arange(8), images)
    for image in range(7):
        for row in range(starts[image], starts[image + 1]):
            # One of the two equal images stands for both: the same product at another address may differ in its last bit.
            score = {j: float(text[row] @ images[4 if j == 1 else j]) for j in range(7)}
            own, against = score[image], {j: score[j] for j in range(7) if j != image}
            assert_close(float(found.margin[row]), own - max(against.values()), dtype=torch.float32, magnitude=1)
            assert found.rank[row] == 1 + sum(score >= own for score in against.values())
            if row == starts[image]:
                worse = sorted((j for j, s in against.items() if s >= own), key=lambda j: -against[j])
                rank, margin, others = confused[image]
                assert (rank, list(others)) == (1 + len(worse), worse[:5])
                assert_close(margin, own - max(against.values()), dtype=torch.float32, magnitude=1)
    assert found.rank[starts[1]] > 1, "a caption of image 1 also fits its copy, image 4"


def choice(candidates, text, images):
    text = torch.nn.functional.normalize(torch.as_tensor(text, dtype=torch.float32))
    return distinct_captions(candidates, text.__getitem__, images)


def test_the_best_text_of_each_image_alone_is_not_the_best_choice():
    candidates = [["a pig", "a small pig"], ["a pig"]]
    found = choice(candidates, [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], np.eye(2))
    assert found == ["a small pig", "a pig"]
    # The negative control: the enumeration gives another choice another value.
    margin = np.array([0.8, 0.6, 0.4])
    scores, starts, names = CandidateScores(margin, np.ones(3, int)), np.array([0, 2, 3]), np.array([0, 1, 0])
    best = best_by_enumeration(starts, names, scores)
    assert best == pytest.approx((2, 2, 1.0))
    assert best > value_of(starts, names, scores, [0, 2])


def test_identical_images_are_not_distinguished():
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    candidates = [["a", "b"], ["c"], ["a", "d"]]
    text = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    found = choice(candidates, text, images)
    assert len(set(found)) == 3
    features = dict(zip("abcd", text[[0, 1, 2, 4]], strict=True))
    chosen = torch.stack([features[caption] for caption in found])
    confused = confusions_of(chosen.__getitem__, np.arange(4), images)
    assert [rows for _, _, rows in confused] == [(2,), (), (0,)]
    assert confused[0][1] == 0


def test_too_few_blank_and_single_captions():
    assert choice([["A pig"], ["a pig."], ["a dog"]], torch.eye(3), torch.eye(3)) == ["A pig", "a pig.", "a dog"]
    # Blank captions are used only without others.
    assert choice([[" ", "a pig"], ["."]], [[1.0, 0], [0.5, 0.5], [0, 1.0]], torch.eye(2)) == ["a pig", "."]
    assert choice([["a", "b"]], [[0.6, 0.8], [0.8, 0.6]], [[1.0, 0.0]]) == ["b"]
