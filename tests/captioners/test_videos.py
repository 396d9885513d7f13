"""Concatenated frames: a captioner with features `(B, F * M, D)` equals its decoder applied to them directly."""

import json

import pytest
import torch

from hf_captionrl.apps.experiments.data import SampleArguments, Sampler
from hf_captionrl.captioners.pipeline import VideoFeatures, pipeline
from hf_captionrl.data import pool_frames, sample_frames
from hf_captionrl.scenes import load_moving_scenes
from hf_captionrl.trainers import SLEConfig, SmileConfig, SmileTrainer
from tests.captioners.models import captioner_of
from tests.tiny import IMAGE_SIZE, tiny_captioner
from tests.tolerances import assert_close, resolution

F, B = 3, 2
CAPTIONS = ["a red cat", "two dogs on the left", "a boat", "the small pig"]


@pytest.fixture(scope="module")
def pixels():
    """B videos of F frames of noise."""
    return torch.rand(B, F, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0))


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


@pytest.mark.parametrize("family", ["blip", "vit-gpt2", "vit-bert"])
def test_log_probs_equal_a_plain_forward(family, pixels):
    captioner = tiny_captioner(family)
    features = pool_frames(captioner.image_features(pixels.flatten(0, 1)).detach(), F, "concat")
    oracle = joined(captioner, pixels)
    assert features.shape == oracle.shape
    batch = captioner.collate(None, CAPTIONS, image_features=features)
    found = captioner.log_probs(batch)
    for row, caption in enumerate(CAPTIONS):
        ids = captioner.encode_captions([caption])["input_ids"]
        with torch.no_grad():
            expected = scored(plain_logits(captioner, ids, oracle[row // 2, None]), ids)[0]
        supervised = batch["labels"][row, 1:] != -100
        assert_close(found[row][supervised], expected[supervised[: len(expected)].nonzero()[:, 0]])
    assert captioner.self_check(batch) < resolution(10)
    assert not captioner.use_full_logits


SETTINGS = {"num_beams": 1, "do_sample": False, "max_new_tokens": 4}


def trainer_of(captioner, data, folder, pooling):
    args = SmileConfig(
        str(folder / "out"),
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        freeze_vision_tower=True,
        cache_image_features=True,
        feature_cache_dir=str(folder / "cache"),
        frame_pooling=pooling,
        generation_num_beams=1,
        generation_max_new_tokens=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return SmileTrainer(captioner, args=args, train_dataset=data)


def clips(number, frames):
    """Moving scenes, of which some frames are sampled."""
    data = load_moving_scenes(num_train=number, num_validation=0, num_test=0)["train"]
    return data.add_column("video_frames", [frames] * number)


@pytest.mark.parametrize("name", ["clipcap", "git", "llava"])
def test_frame_pooling_that_a_model_does_not_support_raises(name):
    captioner = captioner_of(name)
    with pytest.raises(ValueError, match=r"'concat', but \w+ accepts .* not of 4"):
        captioner.check_frame_pooling("concat", 4)
    captioner.check_frame_pooling("mean", 4)


@pytest.fixture(scope="module")
def films():
    return clips(2, F)


def features(captioner, row, pooling):
    """What a video is to the captioner, by hand."""
    inputs = captioner.encode_images(sample_frames(row["image"], F))
    return pool_frames(captioner.image_features(**inputs).detach(), F, pooling)


@pytest.mark.parametrize("pooling", ["mean", "ordered"])
def test_the_pooling_of_the_training_is_that_of_the_captions(films, tmp_path, pooling):
    folder = tmp_path / "saved"
    trainer_of(tiny_captioner("blip"), films, tmp_path, pooling).save_model(str(folder))
    assert json.loads((folder / "captioner.json").read_text())["frame_pooling"] == pooling
    caption = pipeline(folder, device="cpu", **SETTINGS)
    captioner = caption.captioner
    assert (captioner.frame_pooling, captioner.num_frames, caption.num_frames) == (pooling, F, F)
    by_hand = [features(captioner, row, pooling) for row in films]
    want = [captioner.generate(image_features=each, **SETTINGS).captions[0] for each in by_hand]
    paths = [row["image"] for row in films]
    assert caption(paths) == want
    assert caption(films) == want
    (seen,) = VideoFeatures(captioner, paths[:1], F)
    assert_close(seen, by_hand[0][0])
    # Arguments override the values that were saved with the captioner.
    told = pipeline(captioner, num_frames=2, frame_pooling="mean", **SETTINGS)
    assert told.num_frames == 2
    assert VideoFeatures(captioner, paths, 2, "mean")[0].shape == features(captioner, films[0], "mean")[0].shape
    # Several captions per image are written the same way.
    batches = {
        "per_device_eval_batch_size": 2,
        "generation_max_new_tokens": 4,
        "feature_cache_dir": str(tmp_path / "cache"),
    }
    sampler = Sampler(films, SampleArguments(num_samples=2), SLEConfig("unused", use_cpu=True, **batches))
    groups = sampler.write(captioner, do_sample=False, num_beams=2)
    two = {**SETTINGS, "num_beams": 2, "num_return_sequences": 2}
    assert groups == [captioner.generate(image_features=each, **two).captions for each in by_hand]


def test_a_captioner_of_images_says_nothing_of_videos_and_sees_their_mean(films, tmp_path):
    captioner = tiny_captioner("blip")
    captioner.save_pretrained(tmp_path)
    assert set(json.loads((tmp_path / "captioner.json").read_text())) == {"family", "prompt"}
    caption = pipeline(tmp_path, device="cpu", **SETTINGS)
    assert (caption.captioner.frame_pooling, caption.captioner.num_frames, caption.num_frames) == ("mean", 0, 8)
