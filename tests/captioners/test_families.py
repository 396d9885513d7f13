"""What works with which family: every cell of the table in docs/families.md is a test here.

A cell that does not work is refused, and says why; that is what its test looks for.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_captionrl.captioners import Captioner, LogProbsObjective, load_captioner
from hf_captionrl.losses import fused_smile_loss, smile_loss
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, SmileConfig, SmileTrainer
from tests.tiny import FAMILIES, tiny_images, tiny_model
from tests.tiny_chat import CHAT_TYPES, tiny_chat
from tests.tiny_families import FAMILY_NAMES, tiny_family

MODELS = (*FAMILIES, *FAMILY_NAMES, *CHAT_TYPES)
CAPTIONS = ["a red cat", "two small birds near the tree", "a dog"]
TILED = ("llava_onevision", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")
"""Cut images into tiles or take them at their own size, so that features alone do not say what an image is."""
NO_CHECKPOINTING = ("pix2struct",)
"""transformers itself refuses them."""
SECONDS = 10
"""Of the processor, a family: a slow tiny family would make the whole suite slow."""

spent: dict[str, float] = defaultdict(float)


def build(name: str) -> tuple:
    if name in FAMILIES:
        return tiny_model(name)
    return tiny_family(name) if name in FAMILY_NAMES else tiny_chat(name)


@functools.cache
def _built(name: str) -> Captioner:
    model, processor = build(name)
    return load_captioner(model, processor=processor)


@pytest.fixture(params=MODELS)
def name(request):
    start = time.process_time()
    yield request.param
    spent[request.param] += time.process_time() - start


@pytest.fixture
def captioner(name) -> Captioner:
    """A copy: tests train it and put adapters on it."""
    return copy.deepcopy(_built(name))


def batch_of(captioner: Captioner) -> dict[str, Tensor]:
    """Images of two sizes, and a caption each."""
    images = [*tiny_images(2, size=20), *tiny_images(1, seed=5, size=40)]
    images[2] = images[2].crop((0, 0, 40, 14))
    return captioner.collate(images, CAPTIONS)


def gradients(captioner: Captioner, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    captioner.model.zero_grad()
    (-captioner.log_probs(batch).sum()).backward()
    return {n: p.grad.clone() for n, p in captioner.model.named_parameters() if p.grad is not None}


# The cells, a column each


def test_smile(captioner):
    """Fused SMILE equals Algorithm 1 on the full logits of the model's own class."""
    batch = batch_of(captioner)
    labels = captioner.align_labels(batch["labels"])
    model = captioner.model
    with torch.no_grad():
        fused = model(
            **batch,
            head_objective=lambda head: {
                "loss": fused_smile_loss(head.hidden, head.weight, head.labels, bias=head.bias, softcap=head.softcap)
            },
        ).loss
        plain = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**plain).logits  # the text comes last; encoder-decoders predict from the first position on
        logits = logits if captioner.is_encoder_decoder else logits[:, -labels.size(1) - 1 : -1]
    torch.testing.assert_close(fused, smile_loss(logits.float(), labels), atol=2e-5, rtol=1e-5)


def test_mle(captioner):
    """Cross-entropy through the tap is the model's own loss, and full logits are not fallen back to."""
    assert captioner.self_check(batch_of(captioner)) < 1e-4
    assert not captioner.use_full_logits


def test_generate(captioner):
    """What is written is what is most probable, token by token; samples and beams come in groups; each scores itself."""
    images = captioner.encode_images(tiny_images(2, size=20))
    written = captioner.generate(**images, max_new_tokens=5, do_sample=False, num_beams=1)
    scored = captioner.encode_completions(written.ids, written.mask)
    suppressed = getattr(captioner, "image_token_id", lambda model: None)(captioner.base_model)
    with torch.no_grad():
        logits = captioner.model(**{k: v for k, v in {**scored, **images}.items() if k != "labels"}).logits.float()
    labels = captioner.align_labels(scored["labels"])
    logits = logits if captioner.is_encoder_decoder else logits[:, -labels.size(1) - 1 : -1]
    if suppressed is not None and captioner.family in ("chat", "paligemma"):
        logits[..., suppressed] = -torch.inf
    chosen = labels != -100
    best = logits.argmax(-1)
    ends = torch.isin(labels, torch.tensor(captioner.end_token_ids))
    assert (best == labels)[chosen & ~ends].all()
    many = captioner.generate(**images, max_new_tokens=4, do_sample=True, num_return_sequences=3)
    assert len(many.captions) == 6
    beams = captioner.generate(**images, max_new_tokens=4, num_beams=2, num_return_sequences=2)
    assert len(beams.captions) == 4
    log_probs = captioner.log_probs({**captioner.encode_completions(many.ids, many.mask), **images})
    assert log_probs.shape[0] == 6
    assert (log_probs <= 1e-6).all()
    assert (log_probs < 0).any()


def test_rl_step(name, captioner, tmp_path, scenes):
    """One step of reinforcement: two captions an image, the image encoded once."""
    encoded = []
    inner = type(captioner).encode.__func__

    def counted(cls, model, inputs):
        encoded.append(len(inputs["pixel_values"]))
        return inner(cls, model, inputs)

    type(captioner).encode, before = classmethod(counted), type(captioner).__dict__.get("encode")
    try:
        args = CaptionRLConfig(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            do_sample=True,
            max_completion_length=4,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            guard="off",
            freeze_image_tower=True,
            use_cpu=True,
            log_completions=False,
            disable_tqdm=True,
        )
        weights = {n: p.detach().clone() for n, p in captioner.model.named_parameters()}
        trainer = CaptionRLTrainer(captioner, lambda c: [len(t) for t in c.captions], args, scenes)
        trainer.train()
    finally:
        if before is None:
            del type(captioner).encode
        else:
            type(captioner).encode = before
    moved = [n for n, p in captioner.model.named_parameters() if not torch.equal(p, weights[n])]
    tower = {id(p) for p in captioner.vision_tower.parameters()}
    assert moved
    assert not [n for n, p in captioner.model.named_parameters() if n in moved and id(p) in tower]
    assert sum(encoded) == 2


def test_features(name, captioner, tmp_path, scenes):
    """Features stand for images; the trainer computes them once for a run, or says why it cannot."""
    batch = batch_of(captioner)
    images = {key: batch.pop(key) for key in captioner.image_inputs if key in batch}
    with torch.no_grad():
        expected = captioner.log_probs({**batch, **images})
        features = captioner.image_features(**images)
        side = {key: value for key, value in images.items() if key != "pixel_values"}
        torch.testing.assert_close(captioner.log_probs({**batch, **side, "image_features": features}), expected)
    args = SmileConfig(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        freeze_image_tower=True,
        cache_image_features=True,
        feature_cache_dir=str(tmp_path / "cache"),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    if name in TILED:
        with pytest.raises(ValueError, match="features alone do not say what an image is"):
            SmileTrainer(captioner, args, scenes)
        return
    with torch.no_grad():
        torch.testing.assert_close(captioner.log_probs({**batch, "image_features": features}), expected)
    SmileTrainer(captioner, args, scenes).train()


@pytest.mark.parametrize("tune", ["language", "vision"])
def test_lora(captioner, tune):
    """Adapters learn, and nothing else but what stands between tower and language model."""
    captioner.add_lora(tune, r=2)
    found = gradients(captioner, batch_of(captioner))
    assert any("lora_B" in n and value.abs().max() > 0 for n, value in found.items())
    assert all("lora_" in n or "modules_to_save" in n for n in found)


def test_bf16(captioner):
    """In 16 bits the log-probabilities are those of 32 within its precision."""
    batch = batch_of(captioner)
    with torch.no_grad():
        expected = captioner.log_probs(batch)
        captioner.model.to(torch.bfloat16)
        found = captioner.log_probs(batch)
    assert captioner.generate(**captioner.encode_images(tiny_images(1)), max_new_tokens=3).captions
    chosen = expected != 0
    assert (found.float() - expected)[chosen].abs().mean() < 0.2
    found = gradients(captioner, batch)
    assert all(value.isfinite().all() for value in found.values())


def test_checkpointing(name, captioner):
    """Recomputing activations gives the same gradient, with an adapter too."""
    captioner.add_lora("language", r=2)
    for module in captioner.model.modules():  # B = 0 at first, which would hide half of the gradient
        if "lora_B" in getattr(module, "_modules", {}):
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.1)
    captioner.model.train()
    batch = batch_of(captioner)
    expected = gradients(captioner, batch)
    captioner.model.enable_input_require_grads()
    if name in NO_CHECKPOINTING:
        with pytest.raises(ValueError, match="does not support activation checkpointing"):
            captioner.model.gradient_checkpointing_enable({"use_reentrant": False})
        return
    captioner.model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(captioner, batch)
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], atol=1e-5, rtol=1e-4)


def test_save_and_load(captioner, tmp_path):
    """A saved captioner writes and scores as before."""
    captioner.prompt = "a picture of"
    images, batch = captioner.encode_images(tiny_images(2, size=20)), batch_of(captioner)
    captioner.save_pretrained(tmp_path)
    again = load_captioner(tmp_path)
    assert type(again) is type(captioner)
    assert again.prompt == "a picture of"
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert again.generate(**images, **settings).captions == captioner.generate(**images, **settings).captions
    with torch.no_grad():
        torch.testing.assert_close(again.log_probs(batch), captioner.log_probs(batch))
    assert not list(tmp_path.glob("*.bin"))


# The table


def test_no_tiny_family_is_slow():
    slow = {name: round(seconds, 1) for name, seconds in spent.items() if seconds > SECONDS}
    assert not slow


COLUMNS = {
    "SMILE": "test_smile",
    "MLE": "test_mle",
    "RL step": "test_rl_step",
    "generate": "test_generate",
    "features cached": "test_features",
    "LoRA language / vision": "test_lora",
    "bf16": "test_bf16",
    "checkpointing": "test_checkpointing",
    "save and load": "test_save_and_load",
}


def table() -> str:
    lines = ["| model | family | " + " | ".join(COLUMNS) + " |", "|:--|:--|" + ":-:|" * len(COLUMNS)]
    for name in MODELS:
        refused = {"test_features": TILED, "test_checkpointing": NO_CHECKPOINTING}
        cells = ["refused" if name in refused.get(test, ()) else "yes" for test in COLUMNS.values()]
        lines.append(f"| {name} | `{_built(name).family}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_table_in_the_docs_is_this_one():
    assert all(test in globals() for test in COLUMNS.values())
    page = Path(__file__).parents[2] / "docs" / "families.md"
    assert table() in page.read_text()


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=2, num_validation=1, num_test=0)["train"]


def test_an_objective_needs_labels():
    captioner = _built("llava")
    batch = batch_of(captioner)
    del batch["labels"]
    with pytest.raises(ValueError, match="needs labels"):
        captioner.model(**batch, head_objective=LogProbsObjective())
