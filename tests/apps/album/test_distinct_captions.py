"""The choice for an album against all possible choices, and against plain loops; images that no text distinguishes."""

import itertools

import numpy as np
import pytest
import torch

from hf_captionrl.apps.album.assignment import distinct_captions, found_images, same_text
from tests.tolerances import close


def unit(rng, rows, size=6):
    features = rng.normal(size=(rows, size))
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def best_by_enumeration(candidates, text, images):
    """The best triple of (distinct texts, rank 1 among them, sum of their margins), over every choice.

    An image may also go without: its place in the triple is then zero. Texts that two images have count for neither.
    """
    starts = np.cumsum([0, *map(len, candidates)])
    best = (-1, -1, -np.inf)
    for choice in itertools.product(*([None, *range(len(mine))] for mine in candidates)):
        taken = [same_text(candidates[i][g]) for i, g in enumerate(choice) if g is not None]
        if len(set(taken)) != len(taken) or "" in taken:
            continue
        first, total = 0, 0.0
        for i, g in enumerate(choice):
            if g is None:
                continue
            scores = [float(text[starts[i] + g] @ image) for image in images]
            margin = scores[i] - max(scores[:i] + scores[i + 1 :])
            first += margin > 0
            total += margin
        best = max(best, (len(taken), first, total))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_choice_is_optimal_by_enumeration(seed):
    rng = np.random.default_rng(seed)
    number = int(rng.integers(2, 5))
    words = ["a pig", "A pig.", "a  dog", "a cat", "two dogs", "", "a cat "][: int(rng.integers(2, 8))]
    candidates = [[str(w) for w in rng.choice(words, int(rng.integers(1, 4)))] for _ in range(number)]
    text, images = unit(rng, sum(map(len, candidates))), unit(rng, number)
    found = distinct_captions(candidates, text, images)
    margins = {}  # of each text in use, with the image that it fits best
    for caption in found.captions:
        if key := same_text(caption.caption):
            margins[key] = max(caption.margin, margins.get(key, -np.inf))
    mine = (len(margins), sum(margin > 0 for margin in margins.values()), sum(margins.values()))
    assert mine == close(best_by_enumeration(candidates, text, images), dtype="float32")
    texts = [same_text(caption.caption) for caption in found.captions]
    assert [caption.is_distinct for caption in found.captions] == [bool(t) and texts.count(t) == 1 for t in texts]
    for caption, offered in zip(found.captions, candidates, strict=True):
        assert offered[caption.candidate] == caption.caption


def test_enumeration_detects_a_worse_choice():
    """The negative control: taking each image's best text first is not the best choice."""
    candidates = [["a pig", "a small pig"], ["a pig"]]
    images = np.eye(2)
    text = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    found = distinct_captions(candidates, text, images)
    assert [caption.caption for caption in found.captions] == ["a small pig", "a pig"]
    assert best_by_enumeration(candidates, text, images) == pytest.approx((2, 2, 1.0))
    assert best_by_enumeration([["a pig"], ["a pig"]], text[[0, 2]], images)[0] == 1


def test_ranks_and_found_images_against_a_loop():
    rng = np.random.default_rng(3)
    text, images = unit(rng, 9), unit(rng, 4)
    targets = rng.integers(0, 4, 9).tolist()
    rank, found = found_images(text, images, targets)
    for i, own in enumerate(targets):
        scores = [float(text[i] @ image) for image in images]
        assert rank[i] == sum(score >= scores[own] for score in scores)
        assert found[i] == max(range(4), key=scores.__getitem__)
    # A tie counts against the caption: it finds the copy, whichever stands first.
    rank, found = found_images(text[:2], images[[0, 0]])
    assert rank.tolist() == [2, 2]
    assert found.tolist() == [1, 0]


def test_identical_images_are_not_distinguished():
    images = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    candidates = [["a", "b"], ["c"], ["a", "d"]]
    text = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    found = distinct_captions(candidates, text, images)
    assert [caption.is_distinct for caption in found.captions] == [True, True, True]
    assert [caption.rank for caption in found.captions] == [2, 1, 2]
    assert found.captions[0].confused_with == (2,)
    assert found.captions[1].confused_with == ()
    assert found.captions[0].margin == 0


def test_too_few_texts_are_not_distinct():
    found = distinct_captions([["A pig"], ["a pig."], ["a dog"]], torch.eye(3), torch.eye(3))
    assert [caption.is_distinct for caption in found.captions] == [False, False, True]
    assert [caption.caption for caption in found.captions] == ["A pig", "a pig.", "a dog"]


def test_blank_captions_are_used_only_without_others():
    found = distinct_captions([[" ", "a pig"], ["."]], torch.tensor([[1.0, 0], [0.5, 0.5], [0, 1.0]]), torch.eye(2))
    assert [(c.caption, c.is_distinct) for c in found.captions] == [("a pig", True), (".", False)]


def test_album_of_one_image():
    found = distinct_captions([["a", "b"]], [[0.6, 0.8], [0.8, 0.6]], [[1.0, 0.0]])
    (only,) = found.captions
    assert (only.caption, only.rank, only.margin, only.confused_with) == ("b", 1, None, ())


@pytest.mark.parametrize(
    ("candidates", "message"),
    [([["a"], []], r"candidates\[1\] is \[\]"), (["a", "b"], r"candidates\[0\] is 'a'"), ([["a"]], "for 1 images")],
)
def test_bad_candidates_are_refused(candidates, message):
    with pytest.raises(ValueError, match=message):
        distinct_captions(candidates, np.eye(2), np.eye(2))
