"""Kosmos-2 equals its original processor and model."""

import pytest
import torch
import torch.nn.functional as F

from hf_captionrl.captioners import ProcessorPair, load_captioner
from tests.tiny_families import tiny_family

from .family_suite import FamilySuite, log_probs_of


class TestKosmos2(FamilySuite):
    name = "kosmos2"
    prompt = "<grounding> An image of"

    def own_log_probs(self, model, processor, image, caption):
        before = processor(images=image, text=self.prompt)["input_ids"]
        inputs = processor(images=image, text=f"{self.prompt} {caption}", return_tensors="pt")
        ids = torch.cat([inputs["input_ids"], torch.tensor([[2]])], 1)
        places = F.pad(inputs["image_embeds_position_mask"], (0, 1))
        assert ids[0, : len(before)].tolist() == before
        logits = model(
            pixel_values=inputs["pixel_values"],
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            image_embeds_position_mask=places,
        ).logits
        return log_probs_of(logits[0, len(before) - 1 : -1], ids[0, len(before) :])

    def own_ids(self, model, processor, image, number, **settings):
        inputs = processor(images=image, text=self.prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=number, **settings)
        return ids[0, inputs["input_ids"].size(1) :].tolist()


def test_image_tokens_are_at_the_right_positions():
    model, processor = tiny_family("kosmos2")
    captioner = load_captioner(model, processor=processor, prompt="An image of")
    side = captioner.fixed_side_inputs(1)
    text = captioner.tokenizer.convert_ids_to_tokens(side["prefix_ids"][0])
    assert text[:2] == ["<s>", "<image>"]
    assert len(text) == 66
    assert captioner.tokenizer.convert_ids_to_tokens(captioner.prompt_ids()) == ["</image>", "▁An", "▁image", "▁of"]
    native = captioner.native_inputs(model, {**captioner.encode_captions(["a cat"]), **side})
    places = native["image_embeds_position_mask"][0]
    assert places.nonzero().flatten().tolist() == list(range(2, 66))
    assert len(places) == native["input_ids"].size(1)
    model.name_or_path = "microsoft/kosmos-2-patch14-224"
    assert load_captioner(model, processor=processor).prompt == "An image of"


def test_processor_of_another_model_raises():
    model, processor = tiny_family("kosmos2")
    with pytest.raises(ValueError, match="has no eoi_token"):
        load_captioner(model, processor=ProcessorPair(processor.image_processor, processor.tokenizer))
