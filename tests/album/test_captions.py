"""Captions of an album, with the embedded captioners: candidates, their seed, and the choice among them."""

import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.album import captions as album_captions
from hf_captionrl.album.captions import album_candidates, caption_album, compare_captioners
from hf_captionrl.album.distinct_captions import same_text
from hf_captionrl.data import ImageError
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.models import model_path
from hf_captionrl.trainers import caption_generation


@pytest.fixture(scope="module")
def captioner():
    return load_captioner(model_path("scenes:blip-mle"), device="cpu")


@pytest.fixture(scope="module")
def scorer():
    return load_scorer(model_path("scenes:siglip-held-out"), device="cpu")


@pytest.fixture(scope="module")
def images():
    """The first bag of look-alikes."""
    return load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"][:3]


def test_candidates_are_beams_and_samples(captioner, images):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = album_candidates(captioner, images, num_beams=2, num_samples=3, seed=1, batch_size=2)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers"
    assert [len(mine) for mine in first] == [5, 5, 5]
    assert first == album_candidates(captioner, images, num_beams=2, num_samples=3, seed=1, batch_size=2)
    assert first != album_candidates(captioner, images, num_beams=2, num_samples=3, seed=2, batch_size=2)
    beams = captioner.generate(**captioner.encode_images(images), do_sample=False, num_beams=2, num_return_sequences=2)
    assert [mine[:2] for mine in first] == [beams.captions[2 * i : 2 * i + 2] for i in range(3)]
    assert album_candidates(captioner, images, num_beams=2, num_samples=0) == [mine[:2] for mine in first]


def test_album_of_look_alikes_gets_distinct_captions(captioner, scorer, images):
    found = caption_album(captioner, scorer, images)
    assert len({same_text(caption.caption) for caption in found.captions}) == 3
    greedy = compare_captioners({"MLE": captioner}, scorer, images)["MLE"]
    assert found.num_found > sum(finding.rank == 1 for finding in greedy)
    # One image twice: no text distinguishes the two, and the result says so.
    twice = caption_album(captioner, scorer, [images[0], images[1], images[0]])
    assert (0, 2) in twice.not_distinguished
    assert twice.captions[0].rank > 1


def test_copies_tie_even_if_features_depend_on_the_place_in_the_batch(images, monkeypatch):
    class Placed:
        """As on some processors: the last bit depends on the row."""

        def image_features(self, opened):
            pixels = [torch.tensor(np.asarray(image.convert("RGB"), dtype=np.float32)).flatten() for image in opened]
            return torch.stack([colours + 1e-3 * row for row, colours in enumerate(pixels)])

    album = [images[0], images[1], images[0], images[2], images[1]]
    for batch_size in (1, 2, 5):
        features = album_captions._image_features(Placed(), album, batch_size)
        assert torch.equal(features[2], features[0])
        assert torch.equal(features[4], features[1])
        assert len(features.unique(dim=0)) == 3


def test_degenerate_candidates_are_used_only_without_others(scorer, images, monkeypatch):
    loop = "a pig on a blue background on a blue background"
    said = [[loop, "a pig"], [loop], ["", "a tree"]]
    monkeypatch.setattr(album_captions, "album_candidates", lambda *_, **__: said)
    found = caption_album(None, scorer, images)
    assert [caption.caption for caption in found.captions] == ["a pig", loop, "a tree"]


@pytest.mark.parametrize(
    ("settings", "message"), [({"num_beams": 0}, "num_beams is 0"), ({"num_samples": -1}, "num_samples is -1")]
)
def test_bad_settings(captioner, images, settings, message):
    with pytest.raises(ValueError, match=message):
        album_candidates(captioner, images, **settings)
    with pytest.raises(ValueError, match="no images"):
        album_candidates(captioner, [])
    with pytest.raises(ValueError, match="no images"):
        compare_captioners({"MLE": captioner}, None, [])


class Counted:
    """Counts decoded images that are held at one time."""

    def __init__(self, monkeypatch):
        self.most, self._held = 0, []
        for module in (album_captions, caption_generation):
            monkeypatch.setattr(module, "open_image", self._wrap(module.open_image))

    def _wrap(self, open_image):
        def opened(value, **settings):
            image = open_image(value, **settings)
            self._held = [reference for reference in self._held if reference() is not None]
            self._held.append(weakref.ref(image))
            self.most = max(self.most, len(self._held))
            return image

        return opened


@pytest.fixture
def files(tmp_path):
    """Photographs of 2 megapixels, as files."""
    paths = []
    for number in range(9):
        paths.append(tmp_path / f"{number}.jpg")
        Image.new("RGB", (1600, 1200), (number * 25, 90, 40)).save(paths[-1])
    return paths


def test_album_of_files_is_decoded_in_batches(captioner, scorer, files, monkeypatch):
    counted = Counted(monkeypatch)
    found = caption_album(captioner, scorer, files, batch_size=2, num_beams=1, num_samples=1, max_new_tokens=3)
    assert len(found.captions) == 9
    # A batch, its copies that are being encoded, and the one before until it is let go: never the album.
    assert 2 <= counted.most <= 6
    counted = Counted(monkeypatch)
    compare_captioners(
        {"MLE": captioner, "again": captioner}, scorer, files, batch_size=2, num_beams=1, max_new_tokens=3
    )
    assert 2 <= counted.most <= 4


def test_batch_size_does_not_change_the_candidates(captioner, scorer, images):
    one = caption_album(captioner, scorer, images, batch_size=1)
    whole = caption_album(captioner, scorer, images)
    assert len(one.captions) == len(whole.captions) == 3
    # Beams and images are the same for every batch size; samples are drawn batch by batch.
    settings = {"num_beams": 2, "num_samples": 0, "max_new_tokens": 8}
    by_one = album_candidates(captioner, images, batch_size=1, **settings)
    assert by_one == album_candidates(captioner, images, batch_size=3, **settings)


def test_unreadable_image_of_an_album_is_named(captioner, scorer, files):
    files[4].write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"4\.jpg"):
        compare_captioners({"MLE": captioner}, scorer, files, batch_size=2)
