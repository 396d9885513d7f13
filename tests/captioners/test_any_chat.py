"""Chat models of types without a family: they compute what the model alone computes, or are refused with the reason."""

from __future__ import annotations

import copy
import functools
import json
import types

import pytest
import torch
import transformers

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.decoding import DecodingLoop
from tests.captioners.models import ANY_CHAT, build
from tests.captioners.test_families import CAPTIONS, built, gradients, own_log_probs, some_images
from tests.tolerances import assert_close

GENERATED = {"qwen3_5", "qwen4_exp", "lfm2_vl", "minicpmv4_6"}
"""With caches of states, whose rows the package's loop cannot select."""


@pytest.fixture(params=ANY_CHAT)
def name(request):
    return request.param


@pytest.fixture
def captioner(name):
    return copy.deepcopy(built(name)[0])


def test_log_probs_and_gradients_equal_those_of_the_original_class(name, captioner):
    """The original class reads the whole chat from the processor, one image at a time; the captioner a padded batch."""
    plain = copy.deepcopy(built(name)[1])
    batch = captioner.collate(some_images(), CAPTIONS)
    found, labels = captioner.log_probs(batch), captioner.align_labels(batch["labels"])
    total = torch.zeros(())
    for row, expected in enumerate(own_log_probs(plain, captioner, labels)):
        assert_close(found[row, : len(expected)], expected, ulps=64)
        total = total - expected.sum()
    total.backward()
    ours = gradients(captioner, batch)
    theirs = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(value.abs().max()) for value in theirs.values())
    for key, value in theirs.items():
        magnitude = float(value.abs().max())
        if magnitude > 1e-5 * largest:  # biases of keys have no gradient but rounding
            assert_close(ours[key], value, ulps=1024, magnitude=magnitude, msg=key)


def test_captions_equal_those_of_the_original_class(name, captioner):
    """Greedy ones of the model's own `generate`, and the same ones as the only possible samples, several per image."""
    plain, tokens = built(name)[1], 6
    banned = [plain.config.image_token_id, *captioner.end_token_ids]
    settings = {"max_new_tokens": tokens, "suppress_tokens": banned}
    expected = []
    for image in some_images():
        asked = dict(captioner.processor(text=[captioner._turns()[0]], images=[image], return_tensors="pt"))
        ids = plain.generate(**asked, **settings, do_sample=False)
        expected.append(ids[0, asked["input_ids"].size(1) :].tolist())
    images = captioner.encode_images(some_images())
    assert captioner.generate(**images, **settings, do_sample=False).ids.tolist() == expected
    sampled = captioner.generate(**images, **settings, do_sample=True, top_k=1, num_return_sequences=2)
    assert sampled.ids.tolist() == [ids for ids in expected for _ in range(2)]
    assert captioner.own_loop == (name not in GENERATED)


def test_captions_of_reasoning_models_begin_after_the_reasoning():
    model, processor = build("qwen3_5")
    turn = "<|im_start|>assistant\n"
    thinks = "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
    assert processor.chat_template.count(turn) == 1
    processor.chat_template = processor.chat_template.replace(turn, turn + thinks)
    captioner = load_captioner(model, processor=processor)
    before = captioner.encode_images(some_images()[:1])["prefix_ids"][0].tolist() + captioner.prompt_ids()
    assert captioner.tokenizer.decode(before).endswith("assistant\n<think></think>")


# What the check finds: a part of a model is changed, and the check must see it.


def of_features(model):
    """Features that are given differ from those that the model computes."""
    forward = model.model.forward

    def changed(*ids, **inputs):
        if given := inputs.get("mm_encoder_outputs"):
            given["image"].pooler_output = [part.roll(1, 0) for part in given["image"].pooler_output]
        return forward(*ids, **inputs)

    model.model.forward = changed


def of_padding(model):
    """The padding of shorter rows is read."""
    forward = model.model.forward
    model.model.forward = lambda attention_mask, **inputs: forward(
        attention_mask=torch.ones_like(attention_mask), **inputs
    )


def test_half_precision_passes_the_check(name):
    model, processor = build(name)
    captioner = load_captioner(model.to(torch.bfloat16), processor=processor)
    assert captioner.own_loop == (name not in GENERATED)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llava_next", of_features, "log-probabilities differ"),
        ("mistral3", of_padding, "log-probabilities differ"),
    ],
)
def test_models_that_compute_something_else_are_refused(name, change, reason):
    model, processor = build(name)
    change(model)
    with pytest.raises(ValueError, match=rf"{name}.*{reason}"):
        load_captioner(model, processor=processor)


def test_what_can_be_replaced_is_replaced(monkeypatch):
    """Logits that change after the head: full logits. A wrong loop of the package: the one of transformers."""
    model, processor = build("mistral3")
    forward = type(model).forward

    def halved(self, *, labels=None, **inputs):
        output = forward(self, **inputs)
        output.logits = output.logits / 2
        if labels is not None:
            output.loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=output.logits.size(-1))
        return output

    model.__class__ = type(type(model).__name__, (type(model),), {"forward": functools.wraps(forward)(halved)})
    assert load_captioner(model, processor=processor).use_full_logits

    decode = DecodingLoop.__call__
    monkeypatch.setattr(DecodingLoop, "__call__", lambda *inputs, **named: decode(*inputs, **named).flip(-1))
    model, processor = build("mistral3")
    captioner = load_captioner(model, processor=processor)
    assert not captioner.own_loop
    assert captioner.generate(**captioner.encode_images(some_images()), max_new_tokens=3, do_sample=False).captions


def test_a_processor_without_a_chat_template_is_refused():
    model, processor = build("mistral3")
    processor.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        load_captioner(model, processor=processor)


@pytest.mark.parametrize("kind", ["idefics", "kosmos-2.5", "udop", "t5gemma2"])
def test_types_that_read_images_differently_are_refused_before_the_weights(kind, tmp_path):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {kind}")
    config = transformers.AutoConfig.for_model(kind)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for given in (types.SimpleNamespace(config=config), tmp_path):
        with pytest.raises(ValueError, match=rf"'{kind}'.*mm_encoder_outputs"):
            load_captioner(given)


def test_code_in_a_checkpoint_is_refused(tmp_path):
    code = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "moondream1", "auto_map": code}))
    with pytest.raises(ValueError, match="auto_map"):
        load_captioner(tmp_path)
