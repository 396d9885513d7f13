"""Concatenated frames: a captioner with features `(B, F * M, D)` equals its decoder applied to them directly."""

import copy

import pytest
import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import pool_frames
from tests.tiny import tiny_captioner, tiny_git
from tests.tolerances import assert_close, resolution

F, B = 3, 2
CROSS = ("blip", "vit-gpt2", "vit-bert")
CAPTIONS = ["a red cat", "two dogs on the left", "a boat", "the small pig"]


def pixels_of(captioner):
    """B videos of F frames of noise."""
    size = captioner.vision_tower.config.image_size
    return torch.rand(B, F, 3, size, size, generator=torch.Generator().manual_seed(0))


def frame_features(captioner, pixels):
    return captioner.image_features(pixels.flatten(0, 1))  # (B * F, M, D)


def joined(captioner, pixels):
    """The expected features: the outputs of the tower for each frame, concatenated."""
    with torch.no_grad():
        return torch.cat([captioner.image_features(pixels[:, f]) for f in range(F)], dim=1)


def plain_logits(captioner, ids, features):
    """The decoder alone, with the features as encoder states."""
    model = captioner.base_model
    if captioner.family == "blip":
        return model.text_decoder(input_ids=ids, encoder_hidden_states=features, use_cache=False).logits
    if hasattr(model, "enc_to_dec_proj"):
        features = model.enc_to_dec_proj(features)
    return model.decoder(input_ids=ids, encoder_hidden_states=features, use_cache=False).logits


def scored(logits, ids):
    return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("family", CROSS)
@pytest.mark.parametrize("group", [1, 2])
def test_log_probs_equal_a_plain_forward(family, group):
    captioner = tiny_captioner(family)
    pixels = pixels_of(captioner)
    features = pool_frames(frame_features(captioner, pixels).detach(), F, "concat")
    oracle = joined(captioner, pixels)
    assert features.shape == oracle.shape
    assert features.size(1) == F * captioner.image_features(pixels[:, 0]).size(1)
    batch = captioner.collate(None, CAPTIONS[: B * group], image_features=features)
    found = captioner.log_probs(batch)
    for row, caption in enumerate(CAPTIONS[: B * group]):
        ids = captioner.encode_captions([caption])["input_ids"]
        with torch.no_grad():
            expected = scored(plain_logits(captioner, ids, oracle[row // group, None]), ids)[0]
        supervised = batch["labels"][row, 1:] != -100
        assert_close(found[row][supervised], expected[supervised[: len(expected)].nonzero()[:, 0]])
    assert captioner.self_check(batch) < resolution(10)
    assert not captioner.use_full_logits


@pytest.mark.parametrize("family", CROSS)
def test_greedy_captions_equal_a_plain_loop(family):
    captioner = tiny_captioner(family)
    features = joined(captioner, pixels_of(captioner))
    written = captioner.generate(image_features=features, max_new_tokens=6, num_beams=1, do_sample=False)
    for row in range(B):
        ids = torch.tensor([captioner.prompt_ids()])
        start = ids.size(1)
        for _ in range(written.mask[row].sum()):
            with torch.no_grad():
                ids = torch.cat([ids, plain_logits(captioner, ids, features[row, None])[:, -1:].argmax(-1)], 1)
        assert ids[0, start:].tolist() == written.ids[row][written.mask[row]].tolist()


def test_only_ordered_frames_distinguish_a_reversed_video():
    captioner = tiny_captioner("blip")
    features = frame_features(captioner, pixels_of(captioner)).detach()
    backwards = features.unflatten(0, (B, F)).flip(1).flatten(0, 1)
    found = {}
    for pooling in ("mean", "concat", "ordered"):
        one, other = (
            captioner.log_probs(
                captioner.collate(None, CAPTIONS[:B], image_features=pool_frames(x, F, pooling))
            ).detach()
            for x in (features, backwards)
        )
        found[pooling] = float((one - other).abs().max())
    assert max(found["mean"], found["concat"]) < resolution(10)
    assert found["ordered"] > 1e-3


def video_git():
    """GIT for videos of F frames, with large temporal embeddings."""
    model, processor = tiny_git()
    config = copy.deepcopy(model.config)
    config.num_image_with_embedding = F
    torch.manual_seed(1)
    made = type(model)(config)
    made.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for embedding in made.git.img_temporal_embedding:
            embedding.normal_()
    return load_captioner(made.eval(), processor=processor)


def test_git_for_videos_adds_temporal_embeddings():
    captioner = video_git()
    pixels = pixels_of(captioner)
    features = joined(captioner, pixels)
    before = features.clone()
    captioner.check_frame_pooling("concat", F)
    batch = captioner.collate(None, CAPTIONS[:B], image_features=features)
    ids = batch["input_ids"]
    with torch.no_grad():
        own = captioner.model(input_ids=ids, attention_mask=batch["attention_mask"], pixel_values=pixels).logits
    expected = scored(own[:, -ids.size(1) :], ids)
    supervised = batch["labels"][:, 1:] != -100
    assert_close(captioner.log_probs(batch)[supervised], expected[supervised])
    assert torch.equal(features, before)  # the model adds its embeddings to a copy
    assert captioner.self_check(batch) < resolution(10)
    settings = {"max_new_tokens": 6, "do_sample": False}
    for beams in (1, 2):
        start = torch.tensor([captioner.prompt_ids()] * B)
        native = captioner.base_model.generate(
            input_ids=start,
            pixel_values=pixels,
            num_beams=beams,
            eos_token_id=captioner.eos_token_id,
            pad_token_id=captioner.pad_token_id,
            **settings,
        )[:, start.size(1) :]
        assert torch.equal(captioner.generate(image_features=features, num_beams=beams, **settings).ids, native)
    swapped = captioner.collate(
        None, CAPTIONS[:B], image_features=features.unflatten(1, (F, -1)).flip(1).flatten(1, 2)
    )
    assert (captioner.log_probs(swapped) - captioner.log_probs(batch)).abs().max() > 1e-3


def test_unsupported_frame_pooling_raises():
    with pytest.raises(ValueError, match=r"'concat', but ClipCapForConditionalGeneration accepts .* not of 4\. Use"):
        tiny_captioner("clipcap").check_frame_pooling("concat", 4)
    with pytest.raises(ValueError, match=r"4 frames, but this GitForCausalLM expects images"):
        tiny_captioner("git").check_frame_pooling("concat", 4)
    with pytest.raises(ValueError, match=r"expects videos of 3 frames"):
        video_git().check_frame_pooling("concat", 4)
    with pytest.raises(ValueError, match=r"'ordered', but GitForCausalLM accepts"):
        video_git().check_frame_pooling("ordered", F)
    with pytest.raises(
        ValueError, match=r"'native', but BlipForConditionalGeneration is only supported with image inputs"
    ):
        tiny_captioner("blip").check_frame_pooling("native", 4)
    with pytest.raises(ValueError, match=r"frame_pooling is 'max'"):
        pool_frames(torch.ones(4, 2, 3), 2, "max")
    for family in ("clipcap", "git", "blip"):
        tiny_captioner(family).check_frame_pooling("mean", 4)
