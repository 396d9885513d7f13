"""Processors that are not the model's own: refused in a sentence where that can be told, with a warning where it may be harmless."""

import copy
import functools
import logging

import pytest

from hf_captionrl.captioners import ProcessorPair, load_captioner
from tests.captioners.test_families import build

_build = functools.cache(build)
OWN = ("blip", "git", "vit-gpt2", "vit-bert", "clipcap", "blip2-t5", "llava", "qwen2_vl", "internvl", "paligemma")


def load(name, processor):
    """A captioner of a tiny model with a processor; the model is shared, and left as it is by all but its first load."""
    return load_captioner(copy.deepcopy(_build(name)[0]), processor=processor)


def refused(name, processor, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(name, processor)
    assert "\n" not in str(caught.value)
    assert "Pass the" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("blip", "git", r"^BlipFor\w+ starts its captions with the token of id 5, which is the word 'a'"),
        ("git", "blip2-t5", r"ends its captions with the token of id 3, which is the word '▁a'"),
        (
            "vit-gpt2",
            "blip",
            r"^Vision\w+ ends its captions with the token of id 269, and the tokenizer knows 51 tokens",
        ),
        ("clipcap", "git", r"token of id 269, and the tokenizer knows 49 tokens"),
        ("vit-bert", "pix2struct", "returns no pixel_values, which Vision"),
        ("paligemma", "llava", r"given its images by a PaliGemmaProcessor, not by a LlavaProcessor"),
        (
            "qwen2_vl",
            "llava",
            r"The token <image> has the id 6 in the tokenizer and 8 in the configuration of this Qwen2VL",
        ),
        ("internvl", "qwen2_vl", r"gives image_grid_thw, which InternVL\w+ does not know"),
        ("qwen2_vl", "internvl", r"gives no image_grid_thw, which Qwen2VL\w+ needs"),
        ("idefics3", "llava", r"makes pixels of 4 axes, and Idefics3\w+ takes 5"),
    ],
)
def test_the_processor_of_another_model(name, other, message):
    refused(name, _build(other)[1], message)


def test_a_pair_is_no_chat_processor_and_a_template_needs_a_place_for_the_image():
    own = _build("llava")[1]
    for name in ("llava", "qwen2_vl"):
        refused(
            name, ProcessorPair(own.image_processor, own.tokenizer), "does not read an image and a text that speaks"
        )
    without = copy.deepcopy(_build("qwen2_vl")[1])
    without.chat_template = without.chat_template.replace("<|image_pad|>", "")
    refused(
        "qwen2_vl",
        without,
        r"^The chat template of the Qwen2VLProcessor has no place for an image \(<\|image_pad\|>\)",
    )


@pytest.mark.parametrize("name", ["blip", "git", "vit-gpt2", "clipcap", "llava"])
def test_images_of_another_size(name):
    own = _build(name)[1]
    images = copy.deepcopy(own.image_processor)
    edge = {"height": 48, "width": 48}
    images.size = {"shortest_edge": 48} if "shortest_edge" in dict(images.size) else edge
    if getattr(images, "crop_size", None):
        images.crop_size = edge
    other = copy.copy(own) if name == "llava" else ProcessorPair(images, own.tokenizer)
    other.image_processor = images
    refused(name, other, r"makes images of 48 x 48 pixels, and the vision tower of \w+ takes 16 x 16")


def test_a_word_behind_the_template_s_answer_is_no_end_token():
    own = _build("llava")[1]
    expected = load("llava", own).end_token_ids
    for end, first in ((" dog.\n", ()), ("<s>", (own.tokenizer.bos_token_id,))):
        other = copy.copy(own)
        other.chat_template = own.chat_template.replace(" {% endfor %}", end + "{% endfor %}")
        assert load("llava", other).end_token_ids == (*first, *expected)


def test_what_may_be_harmless_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        for name in OWN:
            load(name, _build(name)[1])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load("vit-bert", _build("blip2-t5")[1])
    assert "The end token of VisionEncoderDecoderModel (id 3) is the word '▁a'" in caplog.text
