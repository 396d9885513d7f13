"""Copies: equal pixels, saved again, and look-alikes that are none."""

import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.apps.album.sources import copy_cosine, copy_leaders, saved_again, small_picture, threshold_of


def pictures(*levels):
    return np.stack([np.full(768, level, dtype=np.uint8) for level in levels])


def unit(*angles):
    return torch.tensor([[np.cos(angle), np.sin(angle)] for angle in angles], dtype=torch.float32)


@pytest.mark.parametrize("among", ["all", "neighbours"])
def test_near_copies_need_cosine_and_picture(among):
    features = unit(0, 0.01, 0.02, 1.0, 1.001)
    levels = pictures(100, 101, 150, 100, 100)
    near = None
    if among == "neighbours":
        cosines = features @ features.T - 2 * torch.eye(5)
        near = (cosines.topk(2).indices, cosines.topk(2).values)
    found = copy_leaders(list("abcde"), levels, features, near, threshold=0.999)
    # 2 looks different, 3 has another cosine.
    assert found.tolist() == [0, 0, 2, 3, 3]
    assert copy_leaders(list("abcde"), levels, features, near, threshold=1.1).tolist() == [0, 1, 2, 3, 4]
    assert copy_leaders(list("abcda"), levels, features, near, threshold=1.1).tolist() == [0, 1, 2, 3, 0]


def test_groups_do_not_grow_along_chains():
    """Each is a near-copy of the one before, but the last one is not one of the first."""
    angles = np.arange(4) * 0.04
    found = copy_leaders(list("abcd"), pictures(*[100] * 4), unit(*angles), None, threshold=float(np.cos(0.05)))
    assert found.tolist() == [0, 0, 2, 2]


def test_leader_that_becomes_a_copy_takes_its_copies_along():
    found = copy_leaders(list("abb"), pictures(100, 100, 100), unit(0, 0.01, 0.01), None, threshold=0.999)
    assert found.tolist() == [0, 0, 0]


def test_threshold_is_what_saved_copies_reach():
    class Brightness:
        """The angle is the mean brightness, so that saving again changes it a little."""

        def image_features(self, images):
            return unit(*(np.asarray(image, dtype=float).mean() / 255 for image in images))

    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)) for _ in range(5)]
    found = threshold_of([copy_cosine(Brightness(), image) for image in images])
    cosines = [float(torch.mul(*Brightness().image_features([i, saved_again(i)])).sum()) for i in images]
    assert min(cosines) <= found <= max(cosines)
    assert saved_again(images[0]).size == (48, 32)
    assert small_picture(images[0]).shape == (768,)
    assert threshold_of([]) == 1
