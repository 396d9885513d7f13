"""The pipeline: every kind of input, in order, as the captioner itself would write."""

import datasets
import pytest
from PIL import Image

from hf_captionrl.captioners.pipeline import CaptionPipeline, pipeline
from hf_captionrl.data import ImageError, open_image, sample_frames
from tests.tiny import tiny_captioner, tiny_images

SETTINGS = {"num_beams": 1, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def captioner():
    return tiny_captioner("blip")


@pytest.fixture(scope="module")
def caption(captioner):
    return CaptionPipeline(captioner, batch_size=2, **SETTINGS)


@pytest.fixture(scope="module")
def images():
    return tiny_images(5)


@pytest.fixture(scope="module")
def expected(captioner, images):
    """One at a time, without the pipeline."""
    found = [captioner.generate(**captioner.encode_images([image]), **SETTINGS).captions[0] for image in images]
    assert len(set(found)) > 1, "or an order that is lost would not be seen"
    return found


def saved(images, folder):
    paths = []
    for i, image in enumerate(images):
        image.save(folder / f"{i}.png")
        paths.append(folder / f"{i}.png")
    return paths


def test_one_image_of_each_kind(caption, images, expected, tmp_path):
    (path,) = saved(images[:1], tmp_path)
    for item in (images[0], path, str(path), path.read_bytes(), {"bytes": path.read_bytes(), "path": None}):
        assert caption(item) == expected[0]


def test_lists_data_sets_and_any_batch_size(caption, images, expected, tmp_path):
    paths = saved(images, tmp_path)
    mixed = [images[0], str(paths[1]), paths[2].read_bytes(), paths[3], images[4]]
    rows = datasets.Dataset.from_dict({"image": images}).cast_column("image", datasets.Image())
    for inputs in (tuple(images), mixed, rows):
        for size in (1, 3, 16):
            assert caption(inputs, batch_size=size) == expected
    assert caption([]) == []


def test_several_captions_of_an_image(caption, captioner, images):
    settings = {**SETTINGS, "num_beams": 3, "num_return_sequences": 3}
    found = caption(images[:2], **settings)
    want = captioner.generate(**captioner.encode_images(images[:2]), **settings).captions
    assert found == [want[:3], want[3:]]
    assert caption(images[0], **settings) == want[:3]


def test_videos_stand_among_images(caption, captioner, images, expected, tmp_path):
    film = tmp_path / "film.gif"
    images[0].save(film, save_all=True, append_images=images[1:], duration=100)
    frames = sample_frames(film, 8)
    mean = captioner.image_features(**captioner.encode_images([open_image(f) for f in frames])).mean(0, keepdim=True)
    (want,) = captioner.generate(image_features=mean.detach(), **SETTINGS).captions
    assert caption([images[0], film, images[2]]) == [expected[0], want, expected[2]]
    assert caption(str(film)) == want


def test_shipped_models_and_folders(captioner, images, expected, tmp_path):
    captioner.save_pretrained(tmp_path / "model")
    assert pipeline(tmp_path / "model", device="cpu", **SETTINGS)(images) == expected
    assert isinstance(pipeline("scenes:blip-mle", device="cpu")(Image.new("RGB", (72, 72))), str)
    assert pipeline(captioner, **SETTINGS)(images[0]) == expected[0]


def test_what_is_refused(caption, images, tmp_path):
    with pytest.raises(TypeError, match="The inputs are a int"):
        caption(3)
    with pytest.raises(ImageError):
        caption([images[0], tmp_path / "missing.png"])
