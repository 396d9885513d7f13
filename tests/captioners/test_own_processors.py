"""BLIP-2, InstructBLIP, Florence-2, Kosmos-2 and Pix2Struct equal their original processors and models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.captioners import (
    Blip2Captioner,
    Blip2EncoderDecoderCaptioner,
    Captioner,
    ProcessorPair,
    load_captioner,
)
from tests.captioners.models import captioner_of
from tests.tiny import tiny_images
from tests.tiny.families import tiny_family
from tests.tolerances import assert_close, resolution

CAPTIONS = ["a red cat", "two small birds near the tree", "the yellow boat"]


def log_probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """`(T, V)` and `(T,)` -> `(T,)`."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


class FamilySuite:
    """The tests; a subclass computes the reference results with the processor and the model of its family."""

    name: str
    prompt = "a photo of"
    image_size = 20

    def own_log_probs(self, model: Any, processor: Any, image: Any, caption: str) -> Tensor:
        """Log-probabilities of the caption and its end token, from the original forward."""
        raise NotImplementedError

    def own_ids(self, model: Any, processor: Any, image: Any, number: int, **settings: Any) -> list[int]:
        """Ids after the prompt, from the original `generate`."""
        raise NotImplementedError

    @pytest.fixture
    def captioner(self) -> Captioner:
        return captioner_of(self.name, prompt=self.prompt)

    @pytest.fixture
    def images(self) -> list[Any]:
        return [*tiny_images(1, size=self.image_size), *tiny_images(1, seed=1, size=2 * self.image_size)]

    def test_log_probs_equal_those_of_the_untouched_model(self, captioner, images):
        plain, processor = tiny_family(self.name)
        batch = captioner.collate(images, CAPTIONS[:2])
        assert captioner.self_check(batch) < resolution(10)
        assert not captioner.use_full_logits
        ours = captioner.log_probs(batch).detach()
        supervised = captioner.align_labels(batch["labels"]) != -100
        for row, image, caption in zip(range(2), images, CAPTIONS[:2], strict=True):
            theirs = self.own_log_probs(plain, processor, image, caption).detach()
            assert_close(ours[row][supervised[row]], theirs)
        assert (ours[~supervised] == 0).all()
        # Control: another image gives another result.
        swapped = captioner.log_probs(captioner.collate(images[::-1], CAPTIONS[:2])).detach()
        assert (ours - swapped).abs().max() > 1e-3

    def test_captions_equal_the_models_own(self, captioner, images):
        plain, processor = tiny_family(self.name)
        settings = {"do_sample": False, "num_beams": 3}
        encoded = captioner.encode_images(images)
        written = captioner.generate(**encoded, max_new_tokens=7, **settings)
        for row, image in enumerate(images):
            beyond = [*range(captioner.num_tokens or captioner.vocab_size, captioner.vocab_size)] or None
            theirs = self.own_ids(plain, processor, image, 7, suppress_tokens=beyond, **settings)
            assert written.ids[row][: len(theirs)].tolist() == theirs
        features = captioner.image_features(**encoded).detach()
        known = captioner.generate(image_features=features, max_new_tokens=7, **settings)
        assert torch.equal(known.ids, written.ids)


class TestBlip2WithOpt(FamilySuite):
    name = "blip2-opt"

    def read(self, processor, image, text=None):
        """Inputs for the prompt or a whole text; the Q-Former always reads the prompt."""
        inputs = dict(processor(images=image, text=self.prompt, return_tensors="pt"))
        if text is not None:
            whole = processor(images=image, text=text, return_tensors="pt")
            inputs |= {name: whole[name] for name in ("input_ids", "attention_mask")}
        return inputs

    def own_log_probs(self, model, processor, image, caption):
        before = self.read(processor, image)["input_ids"].size(1)
        inputs = self.read(processor, image, f"{self.prompt} {caption}")
        end = torch.tensor([[model.config.text_config.eos_token_id]])
        ids = torch.cat([inputs["input_ids"], end], 1)
        logits = model(**{**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits
        return log_probs_of(logits[0, before - 1 : -1], ids[0, before:])

    def own_ids(self, model, processor, image, number, **settings):
        inputs = self.read(processor, image)
        settings["suppress_tokens"] = [model.config.image_token_id]
        ids = model.generate(**inputs, max_new_tokens=number, **settings)
        return ids[0, inputs["input_ids"].size(1) :].tolist()


class TestInstructBlipWithLlama(TestBlip2WithOpt):
    name = "instructblip-llama"


class TestBlip2WithT5(FamilySuite):
    name = "blip2-t5"

    def own_log_probs(self, model, processor, image, caption):
        labels = processor.tokenizer(caption, return_tensors="pt").input_ids
        assert labels[0, -1] == processor.tokenizer.eos_token_id
        inputs = processor(images=image, text=self.prompt, return_tensors="pt")
        return log_probs_of(model(**inputs, labels=labels).logits[0], labels[0])

    def own_ids(self, model, processor, image, number, **settings):
        inputs = processor(images=image, text=self.prompt, return_tensors="pt")
        return model.generate(**inputs, max_new_tokens=number, **settings)[0, 1:].tolist()


class TestInstructBlipWithT5(TestBlip2WithT5):
    name = "instructblip-t5"


@pytest.mark.parametrize(
    ("name", "family"), [("blip2-opt", Blip2Captioner), ("instructblip-t5", Blip2EncoderDecoderCaptioner)]
)
def test_language_model_determines_the_class(name, family):
    captioner = captioner_of(name)
    assert type(captioner) is family
    assert captioner.prompt == ""
    assert len(captioner.generate(image_features=torch.randn(2, 5, 32), max_new_tokens=3).captions) == 2


def test_opt_ends_with_a_newline_and_never_writes_the_image_token():
    captioner = captioner_of("blip2-opt")
    assert captioner.tokenizer.decode([captioner.eos_token_id]) == "\n"
    batch = captioner.encode_captions(["a cat"])
    assert batch["labels"][0, -1] == captioner.eos_token_id
    assert captioner.decode(batch["labels"][:, 1:]) == ["a cat"]
    token = captioner.model.config.image_token_id
    settings = {"max_new_tokens": 4, "sequence_bias": {(token,): 100.0}, "do_sample": False}
    written = captioner.generate(image_features=torch.randn(2, 5, 32), **settings)
    assert not (written.ids == token).any()


def test_the_prompt_reaches_encoder_and_qformer():
    captioner = captioner_of("instructblip-t5", prompt="a photo of")
    first = captioner.fixed_side_inputs(2)
    captioner.prompt = "the picture"
    second = captioner.fixed_side_inputs(2)
    for name in ("prefix_ids", "qformer_input_ids"):
        assert first[name].shape[0] == 2
        assert first[name].tolist() != second[name].tolist()
    assert captioner.text_prompt == ""


class TestFlorence2(FamilySuite):
    name = "florence2"
    prompt = "<CAPTION>"
    image_size = 32

    def own_log_probs(self, model, processor, image, caption):
        labels = processor.tokenizer(caption, return_tensors="pt").input_ids
        assert labels[0, 0] == processor.tokenizer.bos_token_id
        inputs = processor(images=image, text=self.prompt, return_tensors="pt")
        logits = model(**inputs, labels=labels).logits
        return log_probs_of(logits[0, 1:], labels[0, 1:])  # <s> is forced

    def own_ids(self, model, processor, image, number, **settings):
        inputs = processor(images=image, text=self.prompt, return_tensors="pt")
        return model.generate(**inputs, max_new_tokens=number + 1, **settings)[0, 2:].tolist()


class TestKosmos2(FamilySuite):
    name = "kosmos2"
    prompt = "<grounding> An image of"

    def own_log_probs(self, model, processor, image, caption):
        before = processor(images=image, text=self.prompt)["input_ids"]
        inputs = processor(images=image, text=f"{self.prompt} {caption}", return_tensors="pt")
        ids = torch.cat([inputs["input_ids"], torch.tensor([[2]])], 1)
        places = F.pad(inputs["image_embeds_position_mask"], (0, 1))
        assert ids[0, : len(before)].tolist() == before
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": places}
        logits = model(pixel_values=inputs["pixel_values"], **given).logits
        return log_probs_of(logits[0, len(before) - 1 : -1], ids[0, len(before) :])

    def own_ids(self, model, processor, image, number, **settings):
        inputs = processor(images=image, text=self.prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=number, **settings)
        return ids[0, inputs["input_ids"].size(1) :].tolist()


class TestPix2Struct(FamilySuite):
    name = "pix2struct"

    @staticmethod
    def read(processor, image):
        return processor(images=image, return_tensors="pt", max_patches=processor.image_processor.max_patches)

    def own_log_probs(self, model, processor, image, caption):
        before = processor.tokenizer(self.prompt, add_special_tokens=False).input_ids
        labels = processor.tokenizer(f"{self.prompt} {caption}", return_tensors="pt").input_ids
        logits = model(**self.read(processor, image), labels=labels).logits
        return log_probs_of(logits[0, len(before) :], labels[0, len(before) :])

    def own_ids(self, model, processor, image, number, **settings):
        before = processor.tokenizer(self.prompt, add_special_tokens=False, return_tensors="pt").input_ids
        inputs = self.read(processor, image)
        ids = model.generate(**inputs, decoder_input_ids=before, max_new_tokens=number, **settings)
        return ids[0, 1 + before.size(1) :].tolist()


def test_padding_does_not_affect_the_result():
    captioner = captioner_of("pix2struct")
    wide = tiny_images(1, size=20)[0].resize((60, 12))
    patches = captioner.encode_images([wide])["pixel_values"]
    empty = (patches == 0).all(-1)
    assert empty.any()
    features = captioner.image_features(patches)
    assert torch.equal((features == 0).all(-1), empty)
    text = captioner.encode_captions(["a red cat", "the dog"])
    number = int((~empty).sum())
    torch.testing.assert_close(
        captioner.log_probs({**text, "image_features": features}),
        captioner.log_probs({**text, "image_features": features[:, :number]}),
    )


def test_cached_keys_do_not_change_captions():
    """Published configurations set `use_cache` to false, which reads the whole caption again for every token."""
    captioner = captioner_of("pix2struct")
    assert captioner.model.config.text_config.use_cache is False
    images = captioner.encode_images(tiny_images(3))
    settings = {"max_new_tokens": 12, "suppress_tokens": [captioner.eos_token_id, captioner.pad_token_id]}
    widths = []
    head = captioner.output_head(captioner.base_model)
    head.register_forward_pre_hook(lambda module, args: widths.append(args[0].size(1)))
    found = captioner.generate(**images, **settings).ids
    assert widths[1:] == [1] * 11
    whole = captioner.generate(**images, **settings, use_cache=False).ids
    assert widths[-1] == widths[0] + 11
    assert found.tolist() == whole.tolist()
    assert len(set(found.flatten().tolist())) > 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("instructblip-llama", "pair", "qformer_tokenizer"),
        ("blip2-opt", "pix2struct", "<image> has the id None"),
        ("pix2struct", lambda model, own: setattr(own.image_processor, "is_vqa", True), "is_vqa"),
    ],
)
def test_parts_that_do_not_fit_are_refused(name, change, message):
    model, processor = tiny_family(name)
    if callable(change):
        change(model, processor)
    else:
        pair = ProcessorPair(processor.image_processor, processor.tokenizer)
        processor = pair if change == "pair" else tiny_family(change)[1]
    with pytest.raises(ValueError, match=message):
        load_captioner(model, processor=processor)
