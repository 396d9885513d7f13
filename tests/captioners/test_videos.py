"""Concatenated frames: a captioner with features `(B, F * M, D)` equals its decoder applied to them directly."""

import copy
import functools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from hf_captionrl.apps.experiments.data import SampleArguments, Sampler
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import VideoFeatures, pipeline, vision_tower_features
from hf_captionrl.data import pool_frames, sample_frames
from hf_captionrl.scenes import load_moving_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.captioners.models import captioner_of
from tests.tiny import IMAGE_SIZE, tiny_captioner, tiny_git
from tests.tiny.chat import tiny_chat
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


@torch.no_grad()
def test_only_ordered_frames_distinguish_a_reversed_video(pixels):
    captioner = tiny_captioner("blip")

    def log_probs(pixels, pooling):
        features = pool_frames(captioner.image_features(pixels.flatten(0, 1)), F, pooling)
        return captioner.log_probs(captioner.collate(None, CAPTIONS, image_features=features))

    mean, concat, ordered = (
        float((log_probs(pixels, pooling) - log_probs(pixels.flip(1), pooling)).abs().max())
        for pooling in ("mean", "concat", "ordered")
    )
    assert max(mean, concat) < resolution(10)
    assert ordered > 1e-3


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


def test_git_for_videos_adds_temporal_embeddings(pixels):
    captioner = video_git()
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
    start = torch.tensor([captioner.prompt_ids()] * B)
    ends = {"eos_token_id": captioner.eos_token_id, "pad_token_id": captioner.pad_token_id}
    for beams in (1, 2):
        native = captioner.base_model.generate(
            input_ids=start, pixel_values=pixels, num_beams=beams, **ends, **settings
        )[:, start.size(1) :]
        assert torch.equal(captioner.generate(image_features=features, num_beams=beams, **settings).ids, native)
    swapped = captioner.collate(None, CAPTIONS[:B], image_features=joined(captioner, pixels.flip(1)))
    assert (captioner.log_probs(swapped) - captioner.log_probs(batch)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "pooling", "message"),
    [
        ("clipcap", "concat", r"'concat', but ClipCap\w+ accepts .* not of 4"),
        ("git for videos", "concat", "expects videos of 3 frames"),
        ("llava", "native", "video_processor"),
        ("qwen2_vl", "native", "different numbers of tokens for videos of 4 frames"),
    ],
)
def test_frame_pooling_that_a_model_does_not_support_raises(name, pooling, message):
    captioner = video_git() if name == "git for videos" else captioner_of(name)
    if name == "qwen2_vl":
        captioner.processor.video_processor.patch_size = 8
    with pytest.raises(ValueError, match=message):
        captioner.check_frame_pooling(pooling, 4)
    assert captioner.native_frames == 0
    captioner.check_frame_pooling("mean", 4)


F4 = 4
NATIVE = ("llava_onevision", "internvl", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NATIVE_CAPTIONS = ["a red cat", "two small birds near the tree", "a dog"]


@functools.cache
def built(model_type):
    """A model of the original class, and a captioner of a copy."""
    model, processor = tiny_chat(model_type)
    if model_type == "smolvlm":
        processor.chat_template = DEFAULT_CHAT_TEMPLATE  # its processor always uses this one for videos
    if model_type.startswith("qwen"):
        video = type(processor.video_processor)
        processor.video_processor = video(patch_size=8, size={"shortest_edge": 1, "longest_edge": 1})
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Larger weights: otherwise random models attend uniformly, ignore order, and assign equal probabilities.
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "lm_head.weight")):
                value.mul_(8)
    captioner = load_captioner(copy.deepcopy(model), processor=processor, prompt="what moves?")
    captioner.check_frame_pooling("native", F4)
    return model, captioner


@functools.cache
def videos():
    """Videos of noise that gets brighter, with different image sizes."""
    random = np.random.default_rng(0)
    return [
        [Image.fromarray((random.integers(0, 90, (h, w, 3)) + 50 * f).astype(np.uint8)) for f in range(F4)]
        for w, h in ((40, 24), (24, 40), (30, 30))
    ]


def own_inputs(captioner, frames):
    """The processor's output for a video and the question."""
    content = [{"type": "video"}, {"type": "text", "text": captioner.prompt}]
    chat = [{"role": "user", "content": content}]
    turn = captioner.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    settings = {"add_special_tokens": False} if turn.startswith("<s>") else {}
    times = {"fps": 1.0, "duration": float(F4), "total_num_frames": F4, "frames_indices": list(range(F4))}
    settings |= {"video_metadata": [times], "do_sample_frames": False, "return_tensors": "pt"}
    return dict(captioner.processor(text=[turn], videos=[frames], **settings))


def own_log_probs(model, captioner, frames, caption):
    inputs = own_inputs(captioner, frames)
    ids = captioner.encode_captions([caption])["input_ids"]
    assert ids[0, 0] == inputs["input_ids"][0, -1]
    text = ids[:, 1:]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], text], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, text.size(1)))
    with torch.no_grad():
        logits = model(**inputs).logits[:, -text.size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, text[..., None])[0, :, 0]


@torch.no_grad()
@pytest.mark.parametrize("model_type", NATIVE)
def test_log_probs_equal_the_original_class(model_type):
    model, captioner = built(model_type)
    features = captioner.image_features(**captioner.encode_videos(videos()))
    assert "what moves?" in captioner.tokenizer.decode(captioner.fixed_side_inputs(1)["prefix_ids"][0])
    batch = captioner.collate(None, NATIVE_CAPTIONS, image_features=features)
    found = captioner.log_probs(batch)
    whole = captioner.log_probs({**captioner.encode_captions(NATIVE_CAPTIONS), **captioner.encode_videos(videos())})
    for row, caption in enumerate(NATIVE_CAPTIONS):
        expected = own_log_probs(model, captioner, videos()[row], caption)
        supervised = batch["labels"][row, 1:] != -100
        assert_close(found[row][supervised], expected)
        assert_close(whole[row][supervised], expected)
    assert captioner.self_check(batch) < resolution(10)
    assert not captioner.use_full_logits
    # Three captions per video: each uses the features of its video.
    many = captioner.collate(None, [c for c in NATIVE_CAPTIONS for _ in range(3)], image_features=features)
    assert_close(captioner.log_probs(many)[::3], found)
    turned = captioner.image_features(**captioner.encode_videos([v[::-1] for v in videos()]))
    backwards = captioner.collate(None, NATIVE_CAPTIONS, image_features=turned)
    assert ((captioner.log_probs(backwards) - found).abs().amax(1) > 1e-3).all()


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llava_onevision", "smolvlm", "qwen2_5_vl"])
def test_captions_equal_the_original_generate(model_type):
    model, captioner = built(model_type)
    features = captioner.image_features(**captioner.encode_videos(videos()))
    tokens = {model.config.image_token_id, getattr(model.config, "video_token_id", model.config.image_token_id)}
    for beams in (1, 3):
        settings = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "num_return_sequences": beams}
        written = captioner.generate(image_features=features, **settings)
        assert len(written.captions) == 3 * beams
        for row in range(3):
            inputs = own_inputs(captioner, videos()[row])
            ends = {"eos_token_id": list(captioner.end_token_ids), "pad_token_id": captioner.pad_token_id}
            own = model.generate(**inputs, **ends, suppress_tokens=sorted(tokens), **settings)
            own = own[:, inputs["input_ids"].size(1) :]
            mine = written.ids[row * beams : (row + 1) * beams]
            assert torch.equal(mine[:, : own.size(1)], own)
            assert (mine[:, own.size(1) :] == captioner.pad_token_id).all()
    direct = captioner.generate(**captioner.encode_videos(videos()), **settings)
    assert direct.captions == written.captions


def test_templates_without_a_video_token_or_with_another_ending_raise():
    model, processor = tiny_chat("llava_onevision")
    processor.chat_template = processor.chat_template.replace("<video>", "")
    with pytest.raises(ValueError, match=r"does not render one video token:"):
        load_captioner(model, processor=processor).check_frame_pooling("native", F4)
    processor.chat_template = None  # then the video token and the prompt, on separate lines
    captioner = load_captioner(model, processor=processor, prompt="what?")
    captioner.check_frame_pooling("native", F4)
    assert captioner.tokenizer.decode(captioner.fixed_side_inputs(1)["prefix_ids"][0]).endswith("<video>\nwhat?")
    with pytest.raises(ValueError, match=r"ends with token \d+ after a video and with token \d+ after an image"):
        captioner_of("smolvlm").check_frame_pooling("native", F4)


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


def test_a_step_of_smile_on_moving_scenes(tmp_path):
    captioner = captioner_of("llava_onevision")
    data = clips(6, F4)
    trainer = trainer_of(captioner, data, tmp_path, "native")
    before = {name: value.clone() for name, value in captioner.model.named_parameters()}
    tower = captioner.vision_state()
    assert np.isfinite(trainer.train().training_loss)
    changed = {n for n, p in captioner.model.named_parameters() if not torch.equal(p, before[n])}
    assert any("language_model" in name for name in changed)
    assert not any("vision_tower" in n or "projector" in n or "newline" in n for n in changed)
    assert "image_newline" in tower
    assert len(trainer.generate_captions(data)) == 6
    # The trainer's inputs for one video equal the processor's output.
    found = vision_tower_features(captioner, data, cache_dir=str(tmp_path / "cache"), frame_pooling="native")
    frames = sample_frames(data[0]["image"], F4)
    with torch.no_grad():
        expected = captioner.image_features(**captioner.encode_videos([frames]))
    torch.testing.assert_close(torch.tensor(np.array(found[0])), expected[0])
    # A saved captioner uses its video inputs again.
    trainer.save_model(str(tmp_path / "saved"))
    caption = pipeline(tmp_path / "saved", device="cpu", **SETTINGS)
    want = captioner.generate(**captioner.encode_videos([frames]), **SETTINGS).captions
    alone = captioner.generate(**captioner.encode_images([frames[0]]), **SETTINGS).captions
    assert caption([frames[0], data[0]["image"]]) == [*alone, *want]
    assert caption.captioner.video_signature() == captioner.video_signature()


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
    batches = {"seed": 0, "batch_size": 2, "max_new_tokens": 4, "cache_dir": str(tmp_path / "cache")}
    groups = Sampler(films, SampleArguments(num_samples=2), **batches).write(captioner, do_sample=False, num_beams=2)
    two = {**SETTINGS, "num_beams": 2, "num_return_sequences": 2}
    assert groups == [captioner.generate(image_features=each, **two).captions for each in by_hand]


def test_a_captioner_of_images_says_nothing_of_videos_and_sees_their_mean(films, tmp_path):
    captioner = tiny_captioner("blip")
    captioner.save_pretrained(tmp_path)
    assert set(json.loads((tmp_path / "captioner.json").read_text())) == {"family", "prompt"}
    caption = pipeline(tmp_path, device="cpu", **SETTINGS)
    assert (caption.captioner.frame_pooling, caption.captioner.num_frames, caption.num_frames) == ("mean", 0, 8)
