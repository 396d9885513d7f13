"""Image processors in two parts, for every family: equal to the whole to the last bit, or refused with the reason."""

import copy

import datasets
import pytest
import torch
import transformers

from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import CaptionCollator, CaptionDataset, DecodedPixels, cached_pixels
from tests.captioners.test_families import CAPTIONS, MODELS, TILED, _built, build, some_images
from tests.tiny import tiny_model
from tests.tiny.chat import tiny_chat

REFUSED = dict.fromkeys(TILED, "splits images into tiles or keeps their size") | {
    "pix2struct": "returns flattened_patches.* normalised by the mean of their image"
}


def data():
    rows = {"image": some_images(), "image_id": ["a", "b", "c"], "captions": [[text] for text in CAPTIONS]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features({
        "image": datasets.Image(), "image_id": datasets.Value("string"), "captions": datasets.List(datasets.Value("string"))
    }))  # fmt: skip


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def check(captioner, folder):
    """Cached pixels equal the processor's, before and after normalisation, alone and in a batch with captions."""
    images, rows = some_images(), data()
    pixels = cached_pixels(rows, captioner.prepared_pixels, directory=folder, progress=False)
    stacked = torch.stack([pixels[i] for i in range(3)])
    processor, whole = captioner.image_processor, captioner.encode_images(images)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    # The 8-bit values again, from what the vision tower gets.
    undone = (whole["pixel_values"].double().flatten(0, -4) * std + mean) / processor.rescale_factor
    assert torch.equal(stacked, undone.round().to(torch.uint8))
    assert torch.equal(stacked, captioner.prepare_pixels(images))
    assert_equal(captioner.encode_pixels(stacked), whole)
    collate = CaptionCollator(captioner)
    decoded = DecodedPixels(rows, captioner.prepared_pixels)
    assert torch.equal(torch.stack([decoded[i] for i in range(3)]), stacked)
    batch = collate([CaptionDataset(rows, pixels=pixels)[i] for i in range(3)])
    assert_equal(batch, collate([CaptionDataset(rows)[i] for i in range(3)]))
    assert_equal(batch, captioner.collate(images, CAPTIONS))


@pytest.mark.parametrize("name", MODELS)
def test_cached_pixels_equal_the_processors_or_are_refused(tmp_path, name):
    captioner = copy.deepcopy(_built(name)[0])
    if name not in REFUSED:
        check(captioner, tmp_path)
        return
    with pytest.raises(ValueError, match=rf"{REFUSED[name]}.* Leave out .*cache_pixels and image_decoder"):
        cached_pixels(data(), captioner.prepared_pixels, directory=tmp_path)


@pytest.mark.parametrize("name", ["blip", "git"])
def test_processors_of_pillow_are_split_too(tmp_path, name):
    model, processor = tiny_model(name)
    settings = processor.image_processor.to_dict()
    kind = getattr(transformers, f"{settings.pop('image_processor_type')}Pil")
    processor.image_processor = kind(**settings)
    captioner = load_captioner(model, processor=processor)
    assert captioner.image_processor.backend == "pil"
    check(captioner, tmp_path)


@pytest.mark.parametrize("left_out", ["do_normalize", "do_rescale"])
def test_processors_that_leave_out_a_step_are_split(left_out):
    model, processor = tiny_model("blip")
    setattr(processor.image_processor, left_out, False)
    captioner = load_captioner(model, processor=processor)
    images = some_images()
    assert_equal(captioner.encode_pixels(captioner.prepare_pixels(images)), captioner.encode_images(images))


ONE_TILE = {"min_patches": 1, "max_patches": 1}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("internvl", ONE_TILE), ("idefics3", {"do_image_splitting": False}), ("smolvlm", {"do_image_splitting": False})],
)
def test_tiling_processors_with_one_size_are_split(tmp_path, name, settings):
    model, processor = tiny_chat(name)
    for key, value in settings.items():
        setattr(processor.image_processor, key, value)
    check(load_captioner(model, processor=processor), tmp_path)


def test_pixels_between_whole_numbers_are_refused():
    model, processor = build("blip")

    class Blending(type(processor.image_processor)):
        def __call__(self, images, **kwargs):
            found = super().__call__(images, **kwargs)
            return {"pixel_values": found["pixel_values"] * 0.7}

    processor.image_processor.__class__ = Blending
    with pytest.raises(ValueError, match=r"does more with pixels than resize and crop them. Leave out"):
        load_captioner(model, processor=processor).prepare_pixels(some_images())


def test_pixels_that_change_after_normalisation_are_refused():
    model, processor = build("blip")

    class Padding(type(processor.image_processor)):
        def __call__(self, images, do_normalize=True, do_resize=True, **kwargs):
            found = super().__call__(images, do_normalize=do_normalize, do_resize=do_resize, **kwargs)
            if do_normalize and do_resize:
                found["pixel_values"][..., -1] = 0.0
            return found

    processor.image_processor.__class__ = Padding
    captioner = load_captioner(model, processor=processor)
    with pytest.raises(ValueError, match=r"changes pixels after normalising them. Leave out cache_pixels"):
        captioner.prepare_pixels(some_images())


def test_a_new_processor_is_split_again():
    model, processor = tiny_model("blip")
    captioner = load_captioner(model, processor=processor)
    before = captioner.prepare_pixels(some_images())
    captioner.image_processor = copy.deepcopy(captioner.image_processor)
    captioner.image_processor.resample = 0
    assert not torch.equal(captioner.prepare_pixels(some_images()), before)
