"""Features are computed from images opened with `open_image`."""

import datasets
import numpy as np
import pytest
import torch

from hf_captionrl.data import ImageError, cached_features
from hf_captionrl.data.columns import replace_column, undecoded
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
    with pytest.raises(ImageError) as error:
        cached_features(cache, with_image(data), encode, progress=False)
    assert error.value.reason == reason
