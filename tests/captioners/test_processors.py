"""Processors of other models: an error if the mismatch is certain, a warning if it may be harmless."""

import copy
import functools
import logging

import pytest

from hf_captionrl.captioners import ProcessorPair, load_captioner
from tests.captioners.test_families import build

_build = functools.cache(build)
OWN = ("blip", "git", "vit-gpt2", "vit-bert", "clipcap", "blip2-t5", "llava", "qwen2_vl", "internvl", "paligemma")


def load(name, processor):
    """A captioner of a tiny model with a processor."""
    return load_captioner(copy.deepcopy(_build(name)[0]), processor=processor)


def refused(name, processor, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(name, processor)
    assert "\n" not in str(caught.value)
    assert "Pass the" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("blip", "git", r"^The start token of BlipFor\w+ \(id 5\) is the word 'a'"),
        ("git", "blip2-t5", r"The end token of Git\w+ \(id 3\) is the word '▁a'"),
        (
            "vit-gpt2",
            "blip",
            r"^The end token of Vision\w+ has the id 269, but the tokenizer has only 51 tokens",
        ),
        ("clipcap", "git", r"has the id 269, but the tokenizer has only 49 tokens"),
        ("vit-bert", "pix2struct", "returns no pixel_values, which Vision"),
        ("paligemma", "llava", r"needs a PaliGemmaProcessor, not a LlavaProcessor"),
        (
            "qwen2_vl",
            "llava",
            r"The token <image> has the id 6 in the tokenizer and 8 in the configuration of this Qwen2VL",
        ),
        ("internvl", "qwen2_vl", r"returns image_grid_thw, which InternVL\w+ does not accept"),
        ("qwen2_vl", "internvl", r"returns no image_grid_thw, which Qwen2VL\w+ needs"),
        ("idefics3", "llava", r"have 4 axes, but Idefics3\w+ expects 5"),
    ],
)
def test_processor_of_another_model_raises(name, other, message):
    refused(name, _build(other)[1], message)


def test_processor_pairs_and_templates_without_an_image_token_are_rejected_for_chat_models():
    own = _build("llava")[1]
    for name in ("llava", "qwen2_vl"):
        refused(
            name,
            ProcessorPair(own.image_processor, own.tokenizer),
            "does not process images and text with image tokens",
        )
    without = copy.deepcopy(_build("qwen2_vl")[1])
    without.chat_template = without.chat_template.replace("<|image_pad|>", "")
    refused(
        "qwen2_vl",
        without,
        r"^The chat template of the Qwen2VLProcessor has no image token \(<\|image_pad\|>\)",
    )


@pytest.mark.parametrize("name", ["blip", "git", "vit-gpt2", "clipcap", "llava"])
def test_image_size_mismatch_raises(name):
    own = _build(name)[1]
    images = copy.deepcopy(own.image_processor)
    edge = {"height": 48, "width": 48}
    images.size = {"shortest_edge": 48} if "shortest_edge" in dict(images.size) else edge
    if getattr(images, "crop_size", None):
        images.crop_size = edge
    other = copy.copy(own) if name == "llava" else ProcessorPair(images, own.tokenizer)
    other.image_processor = images
    refused(name, other, r"returns 48 x 48 pixels, but the vision tower of \w+ expects 16 x 16")


def test_ordinary_word_after_the_answer_in_the_template_is_not_an_end_token():
    own = _build("llava")[1]
    expected = load("llava", own).end_token_ids
    for end, first in ((" dog.\n", ()), ("<s>", (own.tokenizer.bos_token_id,))):
        other = copy.copy(own)
        other.chat_template = own.chat_template.replace(" {% endfor %}", end + "{% endfor %}")
        assert load("llava", other).end_token_ids == (*first, *expected)


def test_mismatch_that_may_be_harmless_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        for name in OWN:
            load(name, _build(name)[1])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load("vit-bert", _build("blip2-t5")[1])
    assert "The end token of VisionEncoderDecoderModel (id 3) is the word '▁a'" in caplog.text
