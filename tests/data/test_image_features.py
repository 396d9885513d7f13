"""Features are computed from images opened with `open_image`."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.data import ImageError, cached_features, iterate_images, open_image
from hf_captionrl.data.caption_columns import replace_column, undecoded
from hf_captionrl.retrieval import FeatureCache
from tests.data.photos import embedded, png


def with_image(data):
    images = undecoded(embedded(3))["image"][:]
    images[1] = {"bytes": data, "path": None}
    return replace_column(embedded(3), "image", images, datasets.Image())


def encode(images):
    return torch.stack([torch.tensor(np.asarray(image).reshape(-1, 3).mean(0)) for image in images]).float()


@pytest.mark.parametrize(
    ("data", "reason"),
    [(png(1)[:200], "image_truncated"), (png(1, size=(1, 9)), "image_too_small"), (b"%!PS", "image_unreadable")],
)
def test_a_bad_image_is_named_as_such(tmp_path, data, reason):
    cache = FeatureCache(tmp_path, model_id="m", revision="r")
    for read in (lambda ds: list(iterate_images(ds)), lambda ds: cached_features(cache, ds, encode, progress=False)):
        with pytest.raises(ImageError) as error:
            read(with_image(data))
        assert error.value.reason == reason


def test_images_are_those_of_open_image():
    found = list(iterate_images(embedded(3)))
    assert [image.tobytes() for image in found] == [open_image(png(n)).tobytes() for n in range(3)]
    assert all(isinstance(image, Image.Image) for image in found)
