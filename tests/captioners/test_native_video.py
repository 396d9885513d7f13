"""A captioner with native video inputs gives the same results as the model's original class."""

import copy
import functools

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import vision_tower_features
from hf_captionrl.data import cached_features, sample_frames
from hf_captionrl.retrieval import FeatureCache
from hf_captionrl.scenes import load_moving_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner
from tests.tiny_chat import tiny_chat
from tests.tiny_families import tiny_family
from tests.tolerances import assert_close, resolution

F = 4
NATIVE = ("llava_onevision", "internvl", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CAPTIONS = ["a red cat", "two small birds near the tree", "a dog"]
SIZES = ((40, 24), (24, 40), (30, 30))


def _made(model_type):
    model, processor = tiny_chat(model_type)
    if model_type == "smolvlm":
        processor.chat_template = DEFAULT_CHAT_TEMPLATE  # its processor always uses this one for videos
    if model_type.startswith("qwen"):
        video = type(processor.video_processor)
        processor.video_processor = video(patch_size=8, size={"shortest_edge": 1, "longest_edge": 1})
    return model, processor


@functools.cache
def built(model_type):
    """A model of the original class, and a captioner of a copy."""
    model, processor = _made(model_type)
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Larger weights: otherwise random models attend uniformly, ignore order, and assign equal probabilities.
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "lm_head.weight")):
                value.mul_(8)
    captioner = load_captioner(copy.deepcopy(model), processor=processor, prompt="what moves?")
    captioner.check_frame_pooling("native", F)
    return model, captioner


@functools.cache
def videos():
    """Videos of coloured noise that gets brighter, with different image sizes."""
    random = np.random.default_rng(0)

    def frame(f, width, height):
        colour = random.integers(0, 60, 3) + 50 * f
        return Image.fromarray((colour + random.integers(0, 45, (height, width, 3))).astype(np.uint8))

    return [[frame(f, *size) for f in range(F)] for size in SIZES]


def own_inputs(captioner, frames):
    """The processor's output for a video and the question."""
    content = [{"type": "video"}, {"type": "text", "text": captioner.prompt}]
    turn = captioner.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    settings = {"add_special_tokens": False} if turn.startswith("<s>") else {}
    metadata = {"fps": 1.0, "duration": float(F), "total_num_frames": F, "frames_indices": list(range(F))}
    found = captioner.processor(
        text=[turn],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
        **settings,
    )
    return dict(found)


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


def features_of(captioner, some):
    with torch.no_grad():
        return captioner.image_features(**captioner.encode_videos(some))


@pytest.mark.parametrize("model_type", NATIVE)
def test_log_probs_equal_the_original_class(model_type):
    model, captioner = built(model_type)
    features = features_of(captioner, videos())
    assert features.shape[:1] == (3,)
    assert "what moves?" in captioner.tokenizer.decode(captioner.fixed_side_inputs(1)["prefix_ids"][0])
    batch = captioner.collate(None, CAPTIONS, image_features=features)
    found = captioner.log_probs(batch).detach()
    whole = captioner.log_probs({**captioner.encode_captions(CAPTIONS), **captioner.encode_videos(videos())}).detach()
    for row, caption in enumerate(CAPTIONS):
        expected = own_log_probs(model, captioner, videos()[row], caption)
        supervised = batch["labels"][row, 1:] != -100
        assert_close(found[row][supervised], expected)
        assert_close(whole[row][supervised], expected)
    assert captioner.self_check(batch) < resolution(10)
    assert not captioner.use_full_logits
    # Three captions per video: each uses the features of its video.
    many = captioner.collate(None, [c for c in CAPTIONS for _ in range(3)], image_features=features)
    assert_close(captioner.log_probs(many)[::3], found)
    backwards = captioner.collate(None, CAPTIONS, image_features=features_of(captioner, [v[::-1] for v in videos()]))
    assert ((captioner.log_probs(backwards) - found).abs().amax(1) > 1e-3).all()


@pytest.mark.parametrize("model_type", NATIVE)
def test_captions_equal_the_original_generate(model_type):
    model, captioner = built(model_type)
    features = features_of(captioner, videos())
    tokens = {model.config.image_token_id, getattr(model.config, "video_token_id", model.config.image_token_id)}
    for beams in (1, 3):
        settings = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "num_return_sequences": beams}
        written = captioner.generate(image_features=features, **settings)
        assert len(written.captions) == 3 * beams
        for row in range(3):
            inputs = own_inputs(captioner, videos()[row])
            own = model.generate(
                **inputs,
                eos_token_id=list(captioner.end_token_ids),
                pad_token_id=captioner.pad_token_id,
                suppress_tokens=sorted(tokens),
                **settings,
            )[:, inputs["input_ids"].size(1) :]
            mine = written.ids[row * beams : (row + 1) * beams]
            assert torch.equal(mine[:, : own.size(1)], own)
            assert (mine[:, own.size(1) :] == captioner.pad_token_id).all()
    direct = captioner.generate(**captioner.encode_videos(videos()), **settings)
    assert direct.captions == written.captions


@pytest.mark.parametrize("model_type", ["llava_onevision", "smolvlm"])
def test_images_are_still_accepted(model_type):
    model, captioner = built(model_type)
    image = videos()[0][0]
    expected = load_captioner(copy.deepcopy(model), processor=captioner.processor, prompt=captioner.prompt)
    batch, own = captioner.collate([image], CAPTIONS[:1]), expected.collate([image], CAPTIONS[:1])
    torch.testing.assert_close(captioner.log_probs(batch), expected.log_probs(own))


@pytest.mark.parametrize("model_type", ["idefics3", "llava", "paligemma", "gemma3"])
def test_chat_models_without_video_inputs_raise(model_type):
    model, processor = tiny_chat(model_type)
    captioner = load_captioner(model, processor=processor)
    with pytest.raises(
        ValueError, match=r"'native', but \w+ has no video inputs: its \w+ has no video_processor\. Use"
    ):
        captioner.check_frame_pooling("native", F)
    assert captioner.native_frames == 0


def test_other_families_without_video_inputs_raise():
    blip2, processor = tiny_family("blip2-opt")
    for captioner in (tiny_captioner("blip"), load_captioner(blip2, processor=processor)):
        with pytest.raises(ValueError, match=r"'native', but Blip\w+ is only supported with image inputs"):
            captioner.check_frame_pooling("native", F)
        with pytest.raises(ValueError, match=r"Blip\w+ has no video inputs"):
            captioner.encode_videos(videos())


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_processors_without_a_fixed_video_size_raise(model_type):
    model, processor = tiny_chat(model_type)
    processor.video_processor.patch_size = 8
    captioner = load_captioner(model, processor=processor)
    with pytest.raises(ValueError, match=r"returns different numbers of tokens for videos of 4 frames"):
        captioner.check_frame_pooling("native", F)
    assert captioner.native_frames == 0


def test_templates_without_a_video_token_or_with_another_ending_raise():
    model, processor = tiny_chat("llava_onevision")
    processor.chat_template = processor.chat_template.replace("<video>", "")
    with pytest.raises(ValueError, match=r"does not render one video token:"):
        load_captioner(model, processor=processor).check_frame_pooling("native", F)
    processor.chat_template = None  # then the video token and the prompt, on separate lines
    captioner = load_captioner(model, processor=processor, prompt="what?")
    captioner.check_frame_pooling("native", F)
    assert captioner.tokenizer.decode(captioner.fixed_side_inputs(1)["prefix_ids"][0]).endswith("<video>\nwhat?")
    model, processor = tiny_chat("smolvlm")
    with pytest.raises(ValueError, match=r"ends with token \d+ after a video and with token \d+ after an image"):
        load_captioner(model, processor=processor).check_frame_pooling("native", F)


def clips(number):
    """Moving scenes, of which F frames are sampled."""
    data = load_moving_scenes(num_train=number, num_validation=0, num_test=0)["train"]
    return data.add_column("video_frames", [F] * number)


def test_a_step_of_smile_on_moving_scenes(tmp_path):
    model, processor = _made("llava_onevision")
    captioner = load_captioner(model, processor=processor)
    data = clips(6)
    args = SmileConfig(
        str(tmp_path / "out"),
        max_steps=1,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        freeze_vision_tower=True,
        cache_image_features=True,
        feature_cache_dir=str(tmp_path / "cache"),
        frame_pooling="native",
        generation_num_beams=1,
        generation_max_new_tokens=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SmileTrainer(captioner, args=args, train_dataset=data)
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
    expected = features_of(captioner, [sample_frames(data[0]["image"], F)])
    torch.testing.assert_close(torch.tensor(np.array(found[0])), expected[0])
    captioner.save_pretrained(tmp_path / "saved")
    loaded = load_captioner(str(tmp_path / "saved"))
    settings = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    assert loaded.generate(**loaded.encode_videos(videos()), **settings).captions == (
        captioner.generate(**captioner.encode_videos(videos()), **settings).captions
    )
    loaded.check_frame_pooling("native", F)
    assert loaded.video_signature() == captioner.video_signature()
    with pytest.raises(ValueError, match=r"'native', a model's video inputs, but the data are images"):
        vision_tower_features(captioner, data.remove_columns("video_frames"), frame_pooling="native")


def test_native_frame_pooling_needs_videos(tmp_path):
    data = clips(3)
    asked = []

    def encode(frames):
        asked.append(len(frames))
        return torch.ones(len(frames) // F, 2, 3)

    cache = FeatureCache(tmp_path, model_id="m", revision="r", what="w")
    found = cached_features(cache, data, encode, batch_size=F + 1, progress=False, pooling="native")
    assert found.shape == (3, 2, 3)
    assert asked == [F, F, F]
