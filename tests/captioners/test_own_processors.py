"""BLIP-2 and InstructBLIP equal their original processors and models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_captionrl.captioners import (
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


def test_a_processor_without_the_tokenizer_of_the_qformer_is_refused():
    model, processor = tiny_family("instructblip-llama")
    with pytest.raises(ValueError, match="qformer_tokenizer"):
        load_captioner(model, processor=ProcessorPair(processor.image_processor, processor.tokenizer))
