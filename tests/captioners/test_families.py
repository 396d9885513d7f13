"""Which features work with which family, as docs/families.md says; what does not work is refused, and says why."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator

import datasets
import pytest
import torch
import transformers
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.captioners.loading import FAMILIES as REGISTERED
from hf_captionrl.data import CaptionCollator, CaptionDataset, cached_pixels
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, SmileConfig, SmileTrainer
from tests.captioners.models import ANY_CHAT, MODELS, build
from tests.rewards.conftest import OfContext
from tests.tiny import tiny_images
from tests.tiny.chat import CHAT_TYPES
from tests.tolerances import assert_close, resolution
from tests.trainers.one_step import PLAIN_SGD

CAPTIONS = ["a red cat", "two small birds near the tree", "a dog"]
TILED = ("llava_onevision", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")
"""Split images into tiles or keep their size, so that features alone do not determine the inputs."""


@functools.cache
def built(name: str) -> tuple[Captioner, torch.nn.Module]:
    """A captioner, and an unmodified model of the original class."""
    model, processor = build(name)
    plain = copy.deepcopy(model)
    return load_captioner(model, processor=processor), plain


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def captioner(name) -> Captioner:
    """A copy, because tests train it and add adapters."""
    return copy.deepcopy(built(name)[0])


def some_images() -> list:
    """Images of two sizes."""
    images = [*tiny_images(2, size=20), *tiny_images(1, seed=5, size=40)]
    images[2] = images[2].crop((0, 0, 40, 14))
    return images


def batch_of(captioner: Captioner) -> dict[str, Tensor]:
    """Images with one caption each."""
    return captioner.collate(some_images(), CAPTIONS)


def gradients(captioner: Captioner, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    captioner.model.zero_grad()
    (-captioner.log_probs(batch).sum()).backward()
    return {n: p.grad.clone() for n, p in captioner.model.named_parameters() if p.grad is not None}


def own_chat(captioner: Captioner, image, caption: str) -> tuple[dict[str, Tensor], int]:
    """The processor's output for a chat with its answer, and the position where the answer begins."""
    processor, prompt = captioner.processor, captioner.prompt
    if captioner.family == "paligemma":
        found = dict(processor(text=[f"<image>{prompt}"], images=[image], suffix=[caption], return_tensors="pt"))
        return found, int((found.pop("labels")[0] != -100).nonzero()[0])
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": caption}]}
    asked = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    whole = processor.apply_chat_template([*chat, answer], tokenize=False)
    settings = {"add_special_tokens": False} if asked.startswith("<s>") else {}
    before, found = (
        dict(processor(text=[text], images=[image], return_tensors="pt", **settings)) for text in (asked, whole)
    )
    first = before["input_ids"].size(1)
    assert torch.equal(found["input_ids"][:, :first], before["input_ids"])
    return found, first


def own_log_probs(plain: torch.nn.Module, captioner: Captioner, labels: Tensor) -> Iterator[Tensor]:
    """Log-probabilities of each caption's tokens by the original class, whose processor reads the whole chat of one image."""
    for row, (image, caption) in enumerate(zip(some_images(), CAPTIONS, strict=True)):
        inputs, first = own_chat(captioner, image, caption)
        number = int((labels[row] != -100).sum())
        # Not every template ends the answer with the end token: LLaVA's ends it with a space.
        assert torch.equal(inputs["input_ids"][0, first : first + number - 1], labels[row, : number - 1])
        logits = plain(**inputs).logits[0, first - 1 : first - 1 + number]
        yield logits.log_softmax(-1).gather(-1, labels[row, :number, None]).squeeze(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", CHAT_TYPES)
def test_log_probs_equal_those_of_the_original_class(name, captioner):
    """Of other families: test_head_tap.py, test_own_processors.py."""
    plain, batch = built(name)[1], batch_of(captioner)
    assert captioner.self_check(batch) < resolution(10)
    assert not captioner.use_full_logits
    found, labels = captioner.log_probs(batch), captioner.align_labels(batch["labels"])
    for row, expected in enumerate(own_log_probs(plain, captioner, labels)):
        assert_close(found[row, : len(expected)], expected)
        assert not found[row, len(expected) :].any()


@pytest.mark.parametrize("name", ["vit-bert", "blip2-t5", "llava", "qwen2_vl"])
def test_one_rl_step_equals_a_gradient_computed_by_hand(name, captioner, tmp_path, scenes):
    """A step of REINFORCE equals minus the learning rate times the manual gradient."""
    plain, seen = copy.deepcopy(captioner), []

    def rewarded(context):
        seen.append(context)
        return [reward(caption) for caption in context.captions]

    args = CaptionRLConfig(
        str(tmp_path / "out"),
        **PLAIN_SGD,
        per_device_train_batch_size=2,
        num_generations=2,
        do_sample=True,
        baseline="none",
        max_completion_length=4,
        cache_image_features=name not in TILED,
        feature_cache_dir=str(tmp_path / "cache"),
        report_to="none",
        guard="off",
        log_completions=False,
    )
    CaptionRLTrainer(captioner, OfContext(rewarded), args, scenes).train()
    (context,) = seen
    images = plain.encode_images([scenes[row]["image"].convert("RGB") for row in context.rows.tolist()])
    plain.freeze_vision()
    batch = {**plain.encode_completions(context.ids, context.mask), **images}
    log_probs = plain.log_probs(batch, of_generation=True)
    rewards = torch.tensor([reward(caption) for caption in context.captions])
    (-rewards * log_probs.sum(1) / context.mask.sum(1)).mean().backward()
    trained = dict(captioner.model.named_parameters())
    moved = 0.0
    for path, parameter in plain.model.named_parameters():
        step = torch.zeros(()) if parameter.grad is None else -args.learning_rate * parameter.grad
        moved = max(moved, float(step.abs().max()))
        assert_close(trained[path].detach(), parameter.detach() + step, msg=path)
    assert moved > 1e-3
    assert all(parameter.grad is None for parameter in plain.vision_tower.parameters())


def reward(caption: str) -> float:
    return 1.0 + len(caption) % 3


@pytest.mark.parametrize("name", [*MODELS, *ANY_CHAT])
def test_image_features_replace_images_of_one_caption_and_of_several(name, captioner, tmp_path, scenes):
    batch = batch_of(captioner)
    images = {key: batch.pop(key) for key in captioner.image_inputs if key in batch}
    with torch.no_grad():
        expected = captioner.log_probs({**batch, **images})
        features = captioner.image_features(**images)
        side = {key: value for key, value in images.items() if key != "pixel_values"}
        torch.testing.assert_close(captioner.log_probs({**batch, **side, "image_features": features}), expected)
        twice = {key: value.repeat_interleave(2, 0) for key, value in batch.items()}
        torch.testing.assert_close(captioner.log_probs({**twice, **images}), expected.repeat_interleave(2, 0))
        if name in ANY_CHAT:
            return
        if name not in TILED:
            torch.testing.assert_close(captioner.log_probs({**batch, "image_features": features}), expected)
            return
    args = SmileConfig(str(tmp_path), **PLAIN_SGD, cache_image_features=True, report_to="none")
    with pytest.raises(ValueError, match="features alone do not determine its inputs"):
        SmileTrainer(captioner, args, scenes)


@pytest.mark.parametrize("name", [*MODELS, *ANY_CHAT])
def test_lora_trains_only_adapters_and_connectors_and_a_frozen_tower_has_no_gradient(captioner):
    """The adapters of each part are in that part; besides them only the modules between the two are trained."""
    tower = {id(module) for module in captioner.vision_tower.modules()}
    for tune in ("language", "vision"):
        pattern = re.compile(captioner.lora_targets(tune))
        found = [m for n, m in captioner.base_model.named_modules() if pattern.fullmatch(n)]
        assert {id(module) in tower for module in found} == {tune == "vision"}
        assert all(isinstance(module, torch.nn.Linear | Conv1D) for module in found)
    captioner.add_lora("both", r=2)
    found = gradients(captioner, batch_of(captioner))
    weights = {id(p) for p in captioner.vision_tower.parameters()}
    adapted = {n: id(p) in weights for n, p in captioner.model.named_parameters() if "lora_B" in n}
    assert {adapted[n] for n, value in found.items() if n in adapted and value.abs().max() > 0} == {False, True}
    assert all("lora_" in n or "modules_to_save" in n for n in found)
    images = captioner.encode_images(some_images())
    assert captioner.image_features(**images).requires_grad
    captioner.freeze_vision()
    assert not captioner.image_features(**images).requires_grad


def test_log_probs_in_bf16_are_near_fp32(captioner):
    batch = batch_of(captioner)
    with torch.no_grad():
        expected = captioner.log_probs(batch)
        captioner.model.to(torch.bfloat16)
        found = captioner.log_probs(batch)
    assert captioner.generate(**captioner.encode_images(tiny_images(1)), max_new_tokens=3).captions
    chosen = expected != 0
    assert (found.float() - expected)[chosen].abs().mean() < 0.2
    assert all(value.isfinite().all() for value in gradients(captioner, batch).values())
    # Cached features are fp32.
    images = {key: batch.pop(key) for key in captioner.image_inputs if key in batch}
    with torch.no_grad():
        batch |= {**images, "image_features": captioner.image_features(**images).float()}
        del batch["pixel_values"]
        assert_close(captioner.log_probs(batch), found, dtype="bfloat16", ulps=1)


def test_activation_checkpointing_keeps_the_gradient(captioner):
    captioner.add_lora("language", r=2)
    for module in captioner.model.modules():  # lora_B is initially 0, which would hide half of the gradient
        if "lora_B" in getattr(module, "_modules", {}):
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.1)
    captioner.model.train()
    batch = batch_of(captioner)
    runs = [0]
    for module in captioner.model.modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_hook(lambda *_: runs.append(runs.pop() + 1))
    expected = gradients(captioner, batch)
    once = runs[0]
    captioner.model.enable_input_require_grads()
    captioner.model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(captioner, batch)
    assert runs[0] - once > once
    assert found.keys() == expected.keys()
    for key in expected:
        assert_close(found[key], expected[key], ulps=64, magnitude=1)


@pytest.mark.parametrize("name", [*MODELS, *ANY_CHAT])
def test_saved_captioner_loads_equal(captioner, tmp_path):
    captioner.prompt = "a picture of"
    images, batch = captioner.encode_images(tiny_images(2, size=20)), batch_of(captioner)
    captioner.save_pretrained(tmp_path)
    again = load_captioner(tmp_path)
    assert (type(again), again.own_loop) == (type(captioner), captioner.own_loop)
    assert again.prompt == "a picture of"
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert again.generate(**images, **settings).captions == captioner.generate(**images, **settings).captions
    with torch.no_grad():
        torch.testing.assert_close(again.log_probs(batch), captioner.log_probs(batch))
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("name", [*MODELS, *ANY_CHAT])
def test_a_caption_that_is_cut_lacks_its_end(captioner):
    for max_length, has_end in ((40, [False, True]), (None, [True, True])):
        batch = captioner.encode_captions(["a red cat " * 42, "a red cat"], max_length=max_length)
        last = batch["attention_mask"].sum(1) - 1
        assert (batch["input_ids"][range(2), last] == captioner.eos_token_id).tolist() == has_end


def test_every_family_is_tested():
    assert {built(name)[1].config.model_type for name in MODELS} == REGISTERED.keys()


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=2, num_validation=1, num_test=0)["train"]


def data():
    rows = {"image": some_images(), "image_id": ["a", "b", "c"], "captions": [[text] for text in CAPTIONS]}
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def check(captioner, folder):
    """Cached pixels equal the processor's, before and after normalisation, alone and in a batch with captions."""
    images, rows = some_images(), data()
    pixels = cached_pixels(rows, captioner.prepared_pixels, directory=folder, progress=False)
    stacked = pixels.tensor()
    processor, whole = captioner.image_processor, captioner.encode_images(images)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    # The 8-bit values again, from what the vision tower gets.
    undone = (whole["pixel_values"].double().flatten(0, -4) * std + mean) / processor.rescale_factor
    assert torch.equal(stacked, undone.round().to(torch.uint8))
    assert torch.equal(stacked, captioner.prepare_pixels(images))
    assert_equal(captioner.encode_pixels(stacked), whole)
    collate = CaptionCollator(captioner)
    batch = collate([CaptionDataset(rows, pixels=pixels)[i] for i in range(3)])
    assert_equal(batch, collate([CaptionDataset(rows)[i] for i in range(3)]))
    assert_equal(batch, captioner.collate(images, CAPTIONS))


@pytest.mark.parametrize("name", MODELS)
def test_cached_pixels_equal_the_processors_or_are_refused(tmp_path, name):
    captioner = copy.deepcopy(built(name)[0])
    if name not in TILED:
        check(captioner, tmp_path)
        return
    with pytest.raises(ValueError, match="splits images into tiles or keeps their size"):
        cached_pixels(data(), captioner.prepared_pixels, directory=tmp_path)


def of_pillow(processor):
    settings = processor.image_processor.to_dict()
    kind = getattr(transformers, f"{settings.pop('image_processor_type')}Pil")
    processor.image_processor = kind(**settings)
    assert processor.image_processor.backend == "pil"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("git", of_pillow),
        # Processors that split images into tiles, set to one size.
        ("internvl", lambda p: vars(p.image_processor).update(min_patches=1, max_patches=1)),
        ("idefics3", lambda p: vars(p.image_processor).update(do_image_splitting=False)),
    ],
)
def test_processors_of_pillow_and_of_one_size_are_split(tmp_path, name, change):
    model, processor = build(name)
    change(processor)
    check(load_captioner(model, processor=processor), tmp_path)


@pytest.mark.parametrize("left_out", ["do_normalize", "do_rescale"])
def test_processors_that_leave_out_a_step_are_split(left_out):
    model, processor = build("blip")
    setattr(processor.image_processor, left_out, False)
    captioner = load_captioner(model, processor=processor)
    images = some_images()
    assert_equal(captioner.encode_pixels(captioner.prepare_pixels(images)), captioner.encode_images(images))


def between_whole_numbers(pixels, settings):
    return pixels * 0.7


def black_at_the_edge(pixels, settings):
    if settings.get("do_normalize", True) and settings.get("do_resize", True):
        pixels[..., -1] = 0.0
    return pixels


@pytest.mark.parametrize(
    ("change", "message"),
    [(between_whole_numbers, "does more with pixels"), (black_at_the_edge, "changes pixels after normalising")],
)
def test_processors_that_do_more_are_refused(change, message):
    model, processor = build("blip")

    class Changed(type(processor.image_processor)):
        def __call__(self, images, **settings):
            return {"pixel_values": change(super().__call__(images, **settings)["pixel_values"], settings)}

    processor.image_processor.__class__ = Changed
    with pytest.raises(ValueError, match=message):
        load_captioner(model, processor=processor).prepare_pixels(some_images())
