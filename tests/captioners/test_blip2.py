"""BLIP-2 and InstructBLIP, decoder-only and with T5, equal their original processors and models."""

import pytest
import torch

from hf_captionrl.captioners import Blip2Captioner, Blip2EncoderDecoderCaptioner, ProcessorPair, load_captioner
from tests.tiny_families import tiny_family

from .family_suite import FamilySuite, log_probs_of


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
        ids = model.generate(
            **inputs, max_new_tokens=number, suppress_tokens=[model.config.image_token_id], **settings
        )
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
    model, processor = tiny_family(name)
    captioner = load_captioner(model, processor=processor)
    assert type(captioner) is family
    assert captioner.prompt == ""
    assert len(captioner.generate(image_features=torch.randn(2, 5, 32), max_new_tokens=3).captions) == 2


def test_opt_ends_with_a_newline():
    model, processor = tiny_family("blip2-opt")
    captioner = load_captioner(model, processor=processor)
    assert captioner.tokenizer.decode([captioner.eos_token_id]) == "\n"
    batch = captioner.encode_captions(["a cat"])
    assert batch["labels"][0, -1] == captioner.eos_token_id
    assert captioner.decode(batch["labels"][:, 1:]) == ["a cat"]


def test_the_prompt_reaches_encoder_and_qformer():
    model, processor = tiny_family("instructblip-t5")
    captioner = load_captioner(model, processor=processor, prompt="a photo of")
    first = captioner.fixed_side_inputs(2)
    captioner.prompt = "the picture"
    second = captioner.fixed_side_inputs(2)
    for name in ("prefix_ids", "qformer_input_ids"):
        assert first[name].shape[0] == 2
        assert first[name].tolist() != second[name].tolist()
    assert captioner.text_prompt == ""


def test_published_prompts():
    model, processor = tiny_family("blip2-opt")
    model.name_or_path = "Salesforce/blip2-opt-2.7b-coco"
    assert load_captioner(model, processor=processor).prompt == "a photo of"
    model.name_or_path = "Salesforce/blip2-opt-2.7b"
    assert load_captioner(model, processor=processor).prompt == ""


def test_processors_of_other_models_raise():
    model, processor = tiny_family("instructblip-llama")
    pair = ProcessorPair(processor.image_processor, processor.tokenizer)
    with pytest.raises(ValueError, match="no qformer_tokenizer"):
        load_captioner(model, processor=pair)
    model, _ = tiny_family("blip2-opt")
    _, other = tiny_family("pix2struct")
    with pytest.raises(ValueError, match="<image> has the id None in the tokenizer"):
        load_captioner(model, processor=other)
    model.config.image_token_index = None
    with pytest.raises(ValueError, match="None in the configuration"):
        load_captioner(model, processor=processor)


def test_image_token_is_never_generated():
    model, processor = tiny_family("blip2-opt")
    captioner = load_captioner(model, processor=processor)
    token = model.config.image_token_id
    settings = {"max_new_tokens": 4, "sequence_bias": {(token,): 100.0}, "do_sample": False}
    written = captioner.generate(image_features=torch.randn(2, 5, 32), **settings)
    assert not (written.ids == token).any()
