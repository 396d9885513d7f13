"""Features that other commands cached are not computed again."""

import datasets
import numpy as np
import pytest
import torch

from hf_captionrl.apps.album.sources import read_images
from hf_captionrl.data import cached_features
from hf_captionrl.retrieval import FeatureCache


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


@pytest.fixture
def photos(tmp_path, scenes):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, image in enumerate(scenes[:4]):
        image.save(folder / f"{number}.png")
    scenes[0].save(folder / "4.bmp")  # the same pixels in another file
    return folder


def paths(folder):
    return [str(path) for path in sorted(folder.iterdir())]


def dataset_of(folder):
    return datasets.Dataset.from_dict({"image": paths(folder)}).cast_column("image", datasets.Image())


def test_features_of_files_are_found(tmp_path, photos):
    scorer = Counted()
    dataset = dataset_of(photos)
    wanted = cached_features(cache_of(tmp_path / "cache"), dataset, scorer.image_features, progress=False)
    assert scorer.encoded == 5
    facts = read_images(paths(photos), scorer, cache=cache_of(tmp_path / "cache"))
    assert scorer.encoded == 5
    assert torch.equal(facts.features, torch.from_numpy(np.array(wanted)))


def test_only_new_pixels_are_encoded(tmp_path, photos):
    scorer = Counted()
    expected = read_images(paths(photos), scorer).features
    assert scorer.encoded == 4  # the copy is not encoded
    assert torch.equal(expected[0], expected[4])
    cached_features(
        cache_of(tmp_path / "cache"), dataset_of(photos).select([0, 2]), scorer.image_features, progress=False
    )
    scorer.encoded = 0
    facts = read_images(paths(photos), scorer, cache=cache_of(tmp_path / "cache"))
    assert scorer.encoded == 2
    assert torch.equal(facts.features, expected)
    again = read_images(paths(photos), scorer, cache=cache_of(tmp_path / "cache"))
    assert scorer.encoded == 2
    assert torch.equal(again.features, expected)
