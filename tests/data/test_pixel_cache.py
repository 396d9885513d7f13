"""Prepared pixels on disk: exact or as JPEGs, never decoded twice."""

import pickle

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hf_captionrl.captioners.captioner import PreparedPixels
from hf_captionrl.data import CaptionCollator, CaptionDataset, DecodedPixels, ImageError, cached_pixels, open_image
from hf_captionrl.data import features as pixel_cache
from hf_captionrl.data.video import VIDEO_FRAMES
from tests.data.photos import embedded, png
from tests.data.sample_photo import photographs
from tests.tolerances import within


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
    found = cached_pixels(dataset, blip, directory=tmp_path / "cache", progress=False)
    assert (len(found), found[0].dtype, tuple(found[-1].shape)) == (3, torch.uint8, (3, 64, 64))
    pixels = torch.stack([found[i] for i in range(3)])
    assert (pixels.int() - directly(dataset, 64).int()).abs().max() <= 1
    for row, image in zip(pixels, dataset["image"], strict=True):
        assert torch.equal(row, blip.prepare(image))
    again = pickle.loads(pickle.dumps(found))  # as in a data loader's worker
    assert torch.equal(again[1], pixels[1])
    with pytest.raises(IndexError):
        found[3]


@pytest.mark.parametrize("side", [224, 384])
def test_jpegs_take_a_tenth_of_the_space_and_change_photographs_little(tmp_path, side):
    dataset, parts = photographs(tmp_path / "images", 4), processor(side)
    exact = cached_pixels(dataset, parts, directory=tmp_path / "cache", progress=False)
    lossy = cached_pixels(dataset, parts, form="jpeg", directory=tmp_path / "cache", progress=False)
    sizes = [pixels.rows.shape[1:] for pixels in (exact, lossy)]
    assert np.prod(sizes[1]) / np.prod(sizes[0]) == within(0.1, 0.005)
    errors = torch.stack([(a.int() - b.int()).abs().float() for a, b in zip(exact, lossy, strict=True)])
    # The stated error, of a scan with film grain.
    assert errors.mean() == within({224: 3.8, 384: 2.1}[side], 0.3)


@pytest.mark.parametrize("side", [16, 64, 224])
def test_noise_gets_a_jpeg_of_low_quality(tmp_path, side):
    noise = [{"bytes": png(seed, size=(side, side)), "path": None} for seed in range(2)]
    dataset = datasets.Dataset.from_dict({"image": noise}).cast_column("image", datasets.Image())
    found = cached_pixels(dataset, processor(side), form="jpeg", directory=tmp_path, progress=False)
    exact = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in dataset["image"]])
    pixels = torch.stack([*found])
    assert pixels.shape == exact.shape
    assert torch.corrcoef(torch.stack([pixels.flatten(), exact.flatten()]).float())[0, 1] > 0.3


def test_an_image_that_does_not_fit_as_a_jpeg_is_refused(tmp_path, monkeypatch, blip):
    monkeypatch.setattr(pixel_cache, "_JPEG_HEADER", 0)
    monkeypatch.setattr(pixel_cache, "_JPEG_SHARE", 20)
    with pytest.raises(ValueError, match=r"does not fit into 614 bytes .* Use cache_pixels='uint8'"):
        cached_pixels(embedded(2), blip, form="jpeg", directory=tmp_path, progress=False)


def test_another_processor_has_other_rows(tmp_path, blip):
    dataset, other = embedded(2), processor(64)
    other.processor.resample = Image.Resampling.NEAREST
    before, after = (cached_pixels(dataset, parts, directory=tmp_path, progress=False) for parts in (blip, other))
    assert not torch.equal(before[0], after[0])
    assert torch.equal(after[0], other.prepare(open_image(dataset[0]["image"])))
    slow = transformers.BlipImageProcessorPil(size={"height": 64, "width": 64})
    prepared = PreparedPixels(slow, lambda images: slow(images=images, return_tensors="pt")["pixel_values"])
    # The settings are equal, and Pillow rounds differently.
    assert prepared.signature != blip.signature


def test_videos_and_unknown_forms_are_refused(tmp_path, blip):
    with pytest.raises(ValueError, match=r"form is 'png'. Use 'uint8'"):
        cached_pixels(embedded(2), blip, form="png", directory=tmp_path)
    videos = embedded(2).add_column(VIDEO_FRAMES, [4, 4])
    with pytest.raises(ValueError, match=r"videos .* cache_image_features=True"):
        cached_pixels(videos, blip, directory=tmp_path)


def test_a_row_that_cannot_be_decoded_is_named(blip):
    images = [{"bytes": data, "path": None} for data in (png(0), png(1)[:60])]
    columns = {"image": images, "image_id": ["good", "bad"], "captions": [["a"], ["b"]]}
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image(decode=False))
    items = CaptionDataset(dataset, pixels=DecodedPixels(dataset, blip))
    assert items[0]["image"].shape == (3, 64, 64)
    with pytest.raises(ImageError) as error:
        items[1]
    assert error.value.reason == "image_truncated"
    assert "row 1, image_id 'bad'" in error.value.__notes__[0]


class Kept:
    """A captioner that keeps what it is given."""

    def collate(self, images, captions, *, image_features=None, max_length=40):
        return {"images": images, "captions": captions}


def test_items_and_batches_hold_pixels(tmp_path, monkeypatch, blip):
    dataset = embedded(4)
    pixels = cached_pixels(dataset, blip, directory=tmp_path, progress=False)
    items = CaptionDataset(dataset, pixels=pixels)
    monkeypatch.setattr(Image, "open", None)  # any call raises
    batch = CaptionCollator(Kept())([items[2], items[0]])
    assert torch.equal(torch.stack(batch["images"]), torch.stack([pixels[2], pixels[0]]))
    assert (items[2]["image_id"], items[2]["image_features"]) == ("id-2", None)
    for more, named in (
        ({"image_features": pixels}, "image_features and pixels"),
        ({"transform": str}, "pixels and transform"),
    ):
        with pytest.raises(ValueError, match=f"{named} exclude each other"):
            CaptionDataset(dataset, pixels=pixels, **more)
    with pytest.raises(ValueError, match="pixels has 4 rows and the data set 3"):
        CaptionDataset(dataset.select(range(3)), pixels=pixels)
