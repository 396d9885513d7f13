"""Pix2Struct equals its original processor and model."""

import pytest
import torch

from hf_captionrl.captioners import load_captioner
from tests.tiny import tiny_images
from tests.tiny_families import tiny_family

from .family_suite import FamilySuite, log_probs_of


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

    def test_gradient_checkpointing_changes_nothing(self, captioner, images):
        # transformers does not support it.
        with pytest.raises(ValueError, match="does not support activation checkpointing"):
            captioner.model.gradient_checkpointing_enable()


def test_padding_does_not_affect_the_result():
    model, processor = tiny_family("pix2struct")
    captioner = load_captioner(model, processor=processor)
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
    model, processor = tiny_family("pix2struct")
    assert model.config.text_config.use_cache is False
    captioner = load_captioner(model, processor=processor)
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


def test_checkpoint_with_rendered_questions_raises():
    model, processor = tiny_family("pix2struct")
    processor.image_processor.is_vqa = True
    with pytest.raises(ValueError, match="answers questions"):
        load_captioner(model, processor=processor)
