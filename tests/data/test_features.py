"""Cached features and pixels: a warm cache opens no image, and a changed file is read again."""

import functools
import pickle

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hf_captionrl.captioners.captioner import PreparedPixels
from hf_captionrl.data import (
    ImageError,
    ImageReader,
    cached_features,
    cached_pixels,
    load_captions,
    open_image,
    sample_frames,
)
from hf_captionrl.data.features import source_keys
from hf_captionrl.retrieval import FeatureCache
from tests.data.films import COLOURS, make_tgif, middles
from tests.data.photos import embedded, photographs, png
from tests.tolerances import assert_close, within


def files(folder, number=4):
    """A data set of paths to files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i}.png" for i in range(number)]
    for i, path in enumerate(paths):
        path.write_bytes(png(i))
    return datasets.Dataset.from_dict({"image": [*map(str, paths)]}).cast_column("image", datasets.Image()), paths


class Encode:
    """Mean colours, and how many images were encoded."""

    def __init__(self):
        self.images = 0

    def __call__(self, images):
        self.images += len(images)
        return torch.stack([torch.tensor(np.asarray(image).reshape(-1, 3).mean(0)) for image in images]).float()


class EncodeTokens(Encode):
    """Mean colours at two positions, `(B, 2, 3)`."""

    def __call__(self, images):
        means = super().__call__(images)
        return torch.stack([means, 255 - means], 1)


def features(folder, dataset, encode, what="image"):
    cache = FeatureCache(folder, model_id="m", revision="r", what=what)
    return np.asarray(cached_features(cache, dataset, encode, progress=False))


def refuse(*args, **kwargs):
    raise AssertionError("an image was opened")


@pytest.mark.parametrize("kind", ["paths", "bytes"])
def test_a_warm_cache_opens_no_image(tmp_path, monkeypatch, kind):
    dataset = files(tmp_path / "images")[0] if kind == "paths" else embedded(4)
    encode = Encode()
    cold = features(tmp_path / "cache", dataset, encode)
    assert encode.images == 4
    monkeypatch.setattr(Image, "open", refuse)
    np.testing.assert_array_equal(features(tmp_path / "cache", dataset, encode), cold)
    assert encode.images == 4
    with pytest.raises(ImageError, match="an image was opened"):  # the replacement is noticed
        features(tmp_path / "cache", dataset, encode, what="another kind")


@pytest.mark.parametrize("change", ["time", "size"])
def test_a_changed_file_is_encoded_again(tmp_path, change):
    dataset, paths = files(tmp_path / "images")
    before = features(tmp_path / "cache", dataset, Encode())
    size, other = paths[2].stat().st_size, png(77)
    paths[2].write_bytes(other if change == "time" else png(77, size=(20, 20)))
    assert (paths[2].stat().st_size == size) is (change == "time")
    encode = Encode()
    after = features(tmp_path / "cache", dataset, encode)
    assert encode.images == 1
    assert (after != before).any(1).tolist() == [False, False, True, False]


def test_copies_share_a_key(tmp_path):
    dataset, paths = files(tmp_path / "images")
    keys = source_keys(dataset)
    assert len(set(keys)) == 4
    assert source_keys(files(tmp_path / "elsewhere")[0]) == keys
    bytes_of = datasets.Dataset.from_dict({"image": [{"bytes": p.read_bytes(), "path": None} for p in paths]})
    assert source_keys(bytes_of) == keys


def processor(side):
    """What a captioner passes: BLIP's image processor in two parts."""
    images = transformers.BlipImageProcessor(size={"height": side, "width": side})
    return PreparedPixels(images, lambda batch: images(images=batch, return_tensors="pt")["pixel_values"])


@pytest.fixture(scope="module")
def blip():
    return processor(64)


def directly(dataset, side):
    """Pixels by Pillow alone, (N, 3, H, W): resized by hand, and equal to torchvision's up to rounding."""
    column = dataset.cast_column("image", datasets.Image(decode=False))["image"]
    resized = [open_image(value).resize((side, side), Image.Resampling.BICUBIC) for value in column]
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in resized])


def test_pixels_are_those_of_the_resized_photographs(tmp_path, blip):
    dataset = photographs(tmp_path / "images", 3)
    rows = cached_pixels(dataset, blip, directory=tmp_path / "cache", progress=False)
    pixels = rows.tensor()
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 3, 64, 64))
    assert (pixels.int() - directly(dataset, 64).int()).abs().max() <= 1
    for row, image in zip(pixels, dataset["image"], strict=True):
        assert torch.equal(row, blip.prepare(image))
    again = pickle.loads(pickle.dumps(rows))  # as in a data loader's worker
    assert torch.equal(again.tensor(1), pixels[1])


def test_features_of_a_video_are_the_mean_over_its_frames(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    encode = EncodeTokens()
    cache = functools.partial(FeatureCache, tmp_path / "cache", model_id="m", revision="r", what="vision_tower")
    features = cached_features(cache(), ds, encode, batch_size=9, progress=False)
    assert features.shape == (4, 2, 3)
    assert encode.images == 4 * 4
    for n in range(4):
        shown = np.mean([COLOURS[(n + k) % 7] for k in middles([50, 50, 100 + 10 * n], 4)], axis=0)
        assert np.asarray(features[n][0]) == within(shown, 2)
        assert np.asarray(features[n][1]) == within(255 - shown, 2)
    # Keyed by content and number of frames: a copy is not encoded again, another number is.
    cached_features(cache(), ds, encode, progress=False)
    assert encode.images == 16
    other = load_captions("tgif", data_dir=tmp_path, num_frames=1)
    single = cached_features(cache(), other, encode, progress=False)
    assert encode.images == 20
    assert not np.allclose(np.asarray(single[0]), np.asarray(features[0]))


def test_concatenated_frames_have_other_cache_keys_than_means(tmp_path):
    ds, encode = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=3), EncodeTokens()
    cache = FeatureCache(tmp_path / "cache", model_id="m", revision="r", what="frames")
    joined = cached_features(cache, ds, encode, progress=False, pooling="concat")
    assert joined.shape == (4, 3 * 2, 3)
    for n in range(4):
        alone = [EncodeTokens()([frame])[0] for frame in sample_frames(ds[n]["image"], 3)]
        np.testing.assert_allclose(np.asarray(joined[n]), torch.cat(alone).numpy(), rtol=1e-6)
    marked = cached_features(cache, ds, encode, progress=False, pooling="ordered")
    assert encode.images == 2 * 4 * 3  # another key
    for n in range(4):
        for f in range(3):
            code = [np.sin(f), np.cos(f), np.sin(f * 10000 ** (-2 / 3))]
            for m in range(2):
                added = np.asarray(marked[n])[2 * f + m] - np.asarray(joined[n])[2 * f + m]
                assert_close(added, code, ulps=512)
    cached_features(cache, ds, encode, progress=False, pooling="concat")
    assert encode.images == 24


def test_images_are_opened_in_the_order_of_the_rows(tmp_path):
    dataset, paths = files(tmp_path, 8)
    paths[3].write_bytes(b"no image")
    reader = ImageReader(dataset.add_column("image_id", list("abcdefgh")), split="all")
    rows = [6, 3, 0, 7, 1, 2, 5, 4]
    images = reader.open_all(rows)
    assert list(images) == [row for row in rows if row != 3]
    assert all(image.tobytes() == open_image(paths[row]).tobytes() for row, image in images.items())
    assert [(entry.row, entry.reason) for entry in reader.unreadable.values()] == [(3, "image_unreadable")]


def test_another_processor_has_other_rows(tmp_path, blip):
    dataset, other = embedded(2), processor(64)
    other.processor.resample = Image.Resampling.NEAREST
    before, after = (
        cached_pixels(dataset, parts, directory=tmp_path, progress=False).tensor() for parts in (blip, other)
    )
    assert not torch.equal(before[0], after[0])
    assert torch.equal(after[0], other.prepare(open_image(dataset[0]["image"])))
