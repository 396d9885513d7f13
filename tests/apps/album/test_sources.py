"""Images of an album and their features."""

import numpy as np
import torch

from hf_captionrl.apps.album.sources import read_images
from hf_captionrl.retrieval import FeatureCache
from tests.apps.album.conftest import write_images


class Counted:
    """A scorer of mean colours that counts the images it encodes."""

    signature = "colours@1"
    name_or_path = "colours"

    def __init__(self):
        self.encoded = 0

    def image_features(self, images):
        self.encoded += len(images)
        return torch.stack([torch.tensor(np.asarray(image, np.float32).mean((0, 1)) / 255) for image in images])


def cache_of(folder):
    return FeatureCache(folder, model_id="colours", revision="1", what="image", dtype="float32")


def paths(folder):
    return [str(path) for path in sorted(folder.iterdir())]


def test_only_new_pixels_are_encoded(tmp_path, scenes):
    # The last one has the same pixels in another file.
    names = ["0.png", "1.png", "2.png", "3.png", "4.bmp"]
    files = paths(write_images([*scenes[:4], scenes[0]], names, tmp_path / "photos"))
    scorer = Counted()
    expected = read_images(files, scorer).features
    assert scorer.encoded == 4  # the copy is not encoded
    assert torch.equal(expected[0], expected[4])
    cache = cache_of(tmp_path / "cache")
    read_images(files[2:3], scorer, cache=cache)
    scorer.encoded = 0
    for _ in range(2):
        facts = read_images(files, scorer, cache=cache_of(tmp_path / "cache"), batch_size=2)
        assert scorer.encoded == 3
        assert torch.equal(facts.features, expected)
        assert facts.keys[0] == facts.keys[4]
