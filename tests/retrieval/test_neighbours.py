"""Nearest neighbours equal a plain loop, including ties and precision."""

import math

import numpy as np
import pytest
import torch

from hf_captionrl.retrieval.neighbours import multimodal_features, nearest_neighbours
from tests.tolerances import close


def clustered(count, width=16, seed=0, noise=0.7):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(count // 20, 1), width, generator=generator)
    which = torch.randint(len(centres), (count,), generator=generator)
    return centres[which] + noise * torch.randn(count, width, generator=generator)


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def plain_neighbours(features, k):
    """Neighbours in descending order of cosine similarity, ties by row; computed with Python floats."""
    rows = [[float(x) for x in row] for row in features]
    found = []
    for i, row in enumerate(rows):
        others = sorted((-cosine(row, other), j) for j, other in enumerate(rows) if j != i)
        found.append([(j, -score) for score, j in others[:k]])
    return found


@pytest.mark.parametrize("block_size", [None, 7])
def test_neighbours_equal_a_plain_loop(block_size):
    features = clustered(60)
    indices, similarities = nearest_neighbours(features, 12, block_size=block_size)
    expected = plain_neighbours(features, 12)
    assert indices.tolist() == [[j for j, _ in row] for row in expected]
    assert similarities.numpy() == close(np.array([[s for _, s in row] for row in expected]), dtype="float32")
    assert similarities.dtype == torch.float32


def test_neighbours_are_the_nearest_image_of_each_other_concept():
    features, concepts = np.array(clustered(60)), [row // 3 for row in range(60)]
    features[1] = features[0]
    indices, _ = nearest_neighbours(features, 12, concepts=concepts)
    expected = []
    for i, row in enumerate(plain_neighbours(features, 59)):
        first = {concepts[j]: j for j, _ in reversed(row) if concepts[j] != concepts[i]}
        expected.append([j for j, _ in row if first.get(concepts[j]) == j][:12])
    assert indices.tolist() == expected != nearest_neighbours(features, 12)[0].tolist()
    with pytest.raises(ValueError, match="1 to 19"):
        nearest_neighbours(features, 20, concepts=concepts)


@pytest.mark.parametrize(("count", "k"), [(30, 8), (1000, 3)])
def test_ties_are_in_the_order_of_the_rows(count, k):
    # Unit vectors along axes: every cosine is exactly 0 or 1. With many more images than k, groups are searched.
    generator = torch.Generator().manual_seed(1)
    axis = torch.randint(5, (count,), generator=generator).tolist()
    features = torch.eye(5)[axis]
    indices, similarities = nearest_neighbours(features, k)
    for i in range(0, count, 7):
        same = [j for j in range(count) if j != i and axis[j] == axis[i]]
        other = [j for j in range(count) if axis[j] != axis[i]]
        assert indices[i].tolist() == (same + other)[:k]
    assert set(similarities.flatten().tolist()) <= {0.0, 1.0}


def test_search_by_groups_equals_a_full_sort_including_remaining_columns():
    features = clustered(32 * 82 + 13, width=24, seed=3)  # 13 columns are in no group
    features[-4:] = features[:4] + 0.01  # so that their nearest images are in these columns
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    rows = torch.tensor([0, 5, 2623, 2624, 2636])
    indices, _ = nearest_neighbours(features, 9, rows=rows)
    scores = unit[rows] @ unit.T
    scores[torch.arange(5), rows] = -2
    assert indices.tolist() == scores.argsort(dim=1, descending=True)[:, :9].tolist()
    assert (indices >= 32 * 82).any()


def test_copies_are_neighbours_but_not_the_image_itself():
    features = clustered(40)
    features[7] = features[3]
    indices, similarities = nearest_neighbours(features, 39)
    assert indices[3, 0] == 7
    assert indices[7, 0] == 3
    assert float(similarities[3, 0]) == pytest.approx(1)
    for i, row in enumerate(indices.tolist()):
        assert sorted([*row, i]) == list(range(40))


WITH_ZERO = clustered(10) * (torch.arange(10) != 4)[:, None]
FOUR, WITHOUT_CAPTION = clustered(4, 8), [torch.ones(1, 8), torch.ones(2, 8), torch.empty(0, 8), torch.ones(1, 8)]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *((lambda k=k: nearest_neighbours(clustered(10), k), f"k is {k}") for k in (0, 10)),
        (lambda: nearest_neighbours(WITH_ZERO, 2), r"features\[4\] is zero"),
        (lambda: nearest_neighbours(clustered(10), 2, rows=[10]), "rows"),
        (lambda: multimodal_features(FOUR, clustered(3, 8)), "text features of 3"),
        (lambda: multimodal_features(FOUR, WITHOUT_CAPTION), r"text_features\[2\] is NaN"),
    ],
)
def test_the_argument_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_multimodal_cosine_is_the_mean_of_both():
    images, captions = clustered(12, 8, seed=1), clustered(60, 8, seed=2).view(12, 5, 8)
    joined = multimodal_features(images, captions)
    assert joined.shape == (12, 16)
    text = captions.mean(dim=1)
    for i in range(12):
        for j in range(12):
            both = [cosine(of[i].tolist(), of[j].tolist()) for of in (images, text)]
            assert float(joined[i] @ joined[j]) == close(sum(both) / 2, dtype="float32")
    assert torch.equal(joined, multimodal_features(images, text))
    assert torch.allclose(joined, multimodal_features(images, list(captions)))


def test_concatenated_features_equal_a_plain_loop():
    """The more the captions of an image differ, the shorter their mean, and the less they count."""
    images, captions = clustered(5, 8, seed=3), clustered(15, 8, seed=4).view(5, 3, 8)
    captions = torch.nn.functional.normalize(captions, dim=2)
    found = multimodal_features(images, captions, equal_weights=False)
    for row, joined in enumerate(found):
        z = images[row] / images[row].norm()
        whole = torch.cat([z, sum(captions[row]) / 3])
        torch.testing.assert_close(joined, whole / whole.norm())
    assert not torch.allclose(found, multimodal_features(images, captions), atol=0.01)
