"""Rollouts sample from the policy's distribution."""

import pytest
import torch

from hf_captionrl.trainers.caption_rl_trainer import image_inputs, reference_ids, write_completions
from tests.tiny import tiny_captioner, tiny_images

SETTINGS = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8}


def drawn(captioner, images, **settings):
    torch.manual_seed(0)
    return write_completions(captioner, images, **SETTINGS, **settings).ids.tolist()


@pytest.mark.parametrize("family", ["blip", "git", "vit-gpt2", "clipcap"])
def test_published_generation_settings_do_not_change_the_rollout(family):
    """Repetition penalties and forced ends would sample from another distribution than the scored one."""
    captioner = tiny_captioner(family)
    images = [captioner.encode_images(tiny_images(2))]
    plain = drawn(captioner, images)
    writer = captioner.base_model.text_decoder if family == "blip" else captioner.base_model
    writer.generation_config.repetition_penalty = 50.0
    writer.generation_config.min_new_tokens = 8
    assert drawn(captioner, images) == plain
    assert writer.generation_config.repetition_penalty == 50.0  # kept in the saved model
    torch.manual_seed(0)
    assert captioner.generate(**images[0], **SETTINGS).ids.tolist() != plain


def test_generation_settings_are_restored_after_an_error():
    captioner = tiny_captioner("git")
    before = captioner.base_model.generation_config
    with pytest.raises(ValueError, match="either pixel_values or image_features"):
        write_completions(captioner, [{}])
    assert captioner.base_model.generation_config is before


def test_generation_batch_size_does_not_change_the_captions():
    captioner = tiny_captioner("vit-gpt2")
    images = captioner.encode_images(tiny_images(5))["pixel_values"]
    batches = [{"pixel_values": images[:3]}, {"pixel_values": images[3:]}]
    greedy = {"do_sample": False, "max_new_tokens": 6}
    whole = write_completions(captioner, batches, **greedy)
    for size in (1, 2, 5):
        assert write_completions(captioner, batches, batch_size=size, **greedy).captions == whole.captions


def test_frozen_tower_encodes_once_and_trained_tower_in_the_update():
    captioner = tiny_captioner("blip")
    batch = captioner.encode_images(tiny_images(2))
    kept = image_inputs(captioner, [dict(batch)])
    assert list(kept[0]) == ["pixel_values"]
    captioner.freeze_vision()
    inputs = dict(batch)
    (found,) = image_inputs(captioner, [inputs])
    assert list(found) == ["image_features"]
    assert "pixel_values" not in inputs
    assert inputs["image_features"] is found["image_features"]


def test_references_are_encoded_like_completions():
    captioner = tiny_captioner("blip", prompt="a ")
    ids, mask = reference_ids(captioner, ["red cat", "", "dog"])
    tokens = captioner.tokenizer("red cat", add_special_tokens=False).input_ids
    assert ids[0][mask[0]].tolist() == [*tokens, captioner.eos_token_id]
    assert ids[1][mask[1]].tolist() == [captioner.eos_token_id]
    assert mask.sum(1).tolist() == [3, 1, 2]
