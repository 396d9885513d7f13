"""A captioner that was trained on videos looks at videos as in training, also when it is loaded anew."""

import json

import pytest
import torch

from hf_captionrl.apps.experiments.data import SampleArguments, Sampler
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import VideoFeatures, pipeline
from hf_captionrl.data import sample_frames
from hf_captionrl.data.features import pool_frames
from hf_captionrl.scenes import load_moving_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner
from tests.tiny_chat import tiny_chat
from tests.tolerances import assert_close

F = 3
SETTINGS = {"num_beams": 1, "do_sample": False, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def clips():
    data = load_moving_scenes(num_train=2, num_validation=0, num_test=0)["train"]
    return data.add_column("video_frames", [F] * len(data))


def trained(captioner, clips, folder, pooling):
    """After the trainer has seen the data, but before it could change much."""
    config = SmileConfig(
        str(folder / "out"),
        max_steps=1,
        per_device_train_batch_size=2,
        freeze_vision_tower=True,
        cache_image_features=True,
        feature_cache_dir=str(folder / "cache"),
        frame_pooling=pooling,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SmileTrainer(captioner, args=config, train_dataset=clips)
    trainer.save_model(str(folder / "saved"))
    return folder / "saved"


def features(captioner, row, pooling):
    """What a video is to the captioner, by hand."""
    frames = captioner.image_features(**captioner.encode_images(sample_frames(row["image"], F))).detach()
    return pool_frames(frames, F, pooling)


@pytest.mark.parametrize("pooling", ["mean", "concat", "ordered"])
def test_the_pooling_of_the_training_is_that_of_the_captions(clips, tmp_path, pooling):
    folder = trained(tiny_captioner("blip"), clips, tmp_path, pooling)
    assert json.loads((folder / "captioner.json").read_text())["frame_pooling"] == pooling
    caption = pipeline(folder, device="cpu", **SETTINGS)
    captioner = caption.captioner
    assert (captioner.frame_pooling, captioner.num_frames, caption.num_frames) == (pooling, F, F)
    want = [
        captioner.generate(image_features=features(captioner, row, pooling), **SETTINGS).captions[0] for row in clips
    ]
    films = [row["image"] for row in clips]
    assert caption(films) == want
    assert caption(clips) == want
    (seen,) = VideoFeatures(captioner, films[:1], F)
    assert_close(seen, features(captioner, clips[0], pooling)[0])
    # Arguments override the values that were saved with the captioner.
    told = pipeline(captioner, num_frames=2, frame_pooling="mean", **SETTINGS)
    assert told.num_frames == 2
    assert VideoFeatures(captioner, films, 2, "mean")[0].shape == features(captioner, clips[0], "mean")[0].shape
    # Several captions per image are written the same way.
    sampler = Sampler(
        clips,
        SampleArguments(num_samples=2),
        seed=0,
        batch_size=2,
        max_new_tokens=4,
        cache_dir=str(tmp_path / "cache"),
    )
    groups = sampler.write(captioner, do_sample=False, num_beams=2)
    each = {**SETTINGS, "num_beams": 2, "num_return_sequences": 2}
    assert groups == [
        captioner.generate(image_features=features(captioner, row, pooling), **each).captions for row in clips
    ]


def test_an_adapter_remembers_too(clips, tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path / "base")
    captioner = load_captioner(str(tmp_path / "base"))
    captioner.add_lora("language", r=2)
    folder = trained(captioner, clips, tmp_path, "ordered")
    assert (folder / "adapter_config.json").is_file()
    loaded = load_captioner(str(folder))
    assert (loaded.frame_pooling, loaded.num_frames) == ("ordered", F)


def test_a_models_own_video_inputs_are_used_again(clips, tmp_path):
    model, processor = tiny_chat("llava_onevision")
    folder = trained(load_captioner(model, processor=processor), clips, tmp_path, "native")
    caption = pipeline(folder, device="cpu", **SETTINGS)
    frames = sample_frames(clips[0]["image"], F)
    with torch.no_grad():
        want = caption.captioner.generate(**caption.captioner.encode_videos([frames]), **SETTINGS).captions
    assert caption([clips[0]["image"]]) == want
    still = frames[0]
    alone = caption.captioner.generate(**caption.captioner.encode_images([still]), **SETTINGS).captions
    assert caption([still, clips[0]["image"]]) == [*alone, *want]


def test_a_captioner_of_images_says_nothing_of_videos_and_sees_their_mean(clips, tmp_path):
    captioner = tiny_captioner("blip")
    captioner.save_pretrained(tmp_path)
    assert set(json.loads((tmp_path / "captioner.json").read_text())) == {"family", "prompt"}
    caption = pipeline(tmp_path, device="cpu", **SETTINGS)
    assert (caption.captioner.frame_pooling, caption.captioner.num_frames, caption.num_frames) == ("mean", 0, 8)
    with pytest.raises(ValueError, match="accepts the image tokens of one frame"):
        pipeline(tiny_captioner("clipcap"), frame_pooling="concat")([clips[0]["image"]])
