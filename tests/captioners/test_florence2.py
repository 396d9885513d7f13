"""Florence-2 equals its original processor and model."""

import pytest
import torch

from hf_captionrl.captioners import ProcessorPair, load_captioner
from tests.tiny_families import tiny_family

from .family_suite import FamilySuite, log_probs_of


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


def test_processor_expands_the_task():
    model, processor = tiny_family("florence2")
    captioner = load_captioner(model, processor=processor, prompt="<CAPTION>")
    text = captioner.tokenizer.decode(captioner.fixed_side_inputs(1)["prefix_ids"][0])
    assert text.endswith("What does the image describe?</s>")
    assert text.count("<image>") == 5
    assert captioner.prompt_ids() == [captioner.tokenizer.eos_token_id, captioner.tokenizer.bos_token_id]
    captioner.prompt = "<DETAILED_CAPTION>"
    assert "Describe in detail" in captioner.tokenizer.decode(captioner.fixed_side_inputs(1)["prefix_ids"][0])
    model.name_or_path = "florence-community/Florence-2-base"
    assert load_captioner(model, processor=processor).prompt == "<CAPTION>"


def test_invalid_processor_or_features_raise():
    model, processor = tiny_family("florence2")
    with pytest.raises(ValueError, match="ProcessorPair has no num_image_tokens and no task_prompts_without_inputs"):
        load_captioner(model, processor=ProcessorPair(processor.image_processor, processor.tokenizer))
    captioner = load_captioner(model, processor=processor)
    with pytest.raises(ValueError, match="3 rows are not a square feature map"):
        captioner.generate(image_features=torch.randn(1, 3, 32))
