"""PEFT: LoRA on language model, vision tower, both and the head, and modules trained in full."""

import re

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from hf_captionrl.captioners import mean_cross_entropy
from hf_captionrl.captioners.head_tap import is_tappable
from tests.captioners.test_head_tap import assert_same_gradients, gradients, smile
from tests.tiny import FAMILIES, tiny_captioner, tiny_captions, tiny_images
from tests.tolerances import assert_close, resolution

HEADS = {
    "blip": "text_decoder.cls.predictions.decoder",
    "git": "output",
    "vit-gpt2": "decoder.lm_head",
    "vit-bert": "decoder.cls.predictions.decoder",
    "clipcap": "language_model.lm_head",
}


def adapted(family: str, add) -> tuple:
    """A captioner with a non-zero adapter, and a batch."""
    captioner = tiny_captioner(family, prompt="a ")
    batch = captioner.collate(tiny_images(3), tiny_captions(3))
    torch.manual_seed(3)
    add(captioner)
    with torch.no_grad():
        for name, parameter in captioner.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return captioner, batch


def assert_tap_equals_logits(captioner, batch, **how) -> None:
    """Loss and gradients through the tap equal those from full logits, with the same random numbers."""
    torch.manual_seed(5)
    tapped = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    tapped.backward()
    ours = gradients(captioner.model)
    captioner.model.zero_grad()
    captioner.use_full_logits = True
    torch.manual_seed(5)
    full = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    full.backward()
    captioner.use_full_logits = False
    assert_close(tapped, full, **how)
    assert_same_gradients(ours, gradients(captioner.model), **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_both_parts_trains_only_adapters(family):
    """On both parts; test_families.py covers each part alone."""
    captioner, batch = adapted(family, lambda c: c.add_lora("both", r=4, dropout=0.0))
    trained = {name for name, p in captioner.model.named_parameters() if p.requires_grad}
    tower = f"base_model.model.{captioner.vision_path}."
    assert any(name.startswith(tower) for name in trained)
    assert any(not name.startswith(tower) and "lora" in name for name in trained)
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert not any(f".{HEADS[family]}.lora_" in name for name in trained)
    assert captioner.self_check(batch) < resolution(10)
    assert_tap_equals_logits(captioner, batch)
    features = captioner.image_features(batch["pixel_values"])
    assert features.requires_grad
    assert captioner.generate(image_features=features.detach(), max_new_tokens=3).captions
    with pytest.raises(ValueError, match="'language', 'vision' or 'both'"):
        captioner.lora_targets("head")


@pytest.mark.parametrize("how", ["lora", "lora with dropout and bias", "modules_to_save", "dora", "both", "two"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_the_head_itself(family, how):
    head = HEADS[family]

    def add(captioner):
        settings = {"r": 4, "target_modules": re.escape(head)}
        if how == "lora with dropout and bias":
            settings |= {"lora_dropout": 0.3, "lora_bias": True}
        if how == "dora":
            settings |= {"use_dora": True}
        if how == "modules_to_save":
            settings |= {"target_modules": captioner.lora_targets(), "modules_to_save": [head]}
        if how == "both":
            settings |= {"target_modules": f"{captioner.lora_targets()}|{re.escape(head)}"}
        captioner.model = get_peft_model(captioner.model, LoraConfig(**settings))
        if how == "two":
            captioner.model.add_adapter("second", LoraConfig(**settings))
            captioner.model.base_model.set_adapter(["default", "second"])

    captioner, batch = adapted(family, add)
    captioner.model.train()
    assert is_tappable(captioner.output_head(captioner.base_model)) == (how != "dora")
    torch.manual_seed(5)
    tapped = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    tapped.backward()
    ours = gradients(captioner.model)
    assert ours
    captioner.model.zero_grad()
    torch.manual_seed(5)
    full = captioner.model(**batch).loss
    full.backward()
    assert_close(tapped, full)
    theirs = gradients(captioner.model)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], ulps=128)
    # SMILE equals the subset of the full logits.
    captioner.model.eval()
    fused = captioner.model(**batch, head_objective=smile).loss
    captioner.use_full_logits = True
    assert_close(fused, captioner.model(**batch, head_objective=smile).loss)


def test_disabled_and_merged_adapters():
    captioner, batch = adapted(
        "git", lambda c: setattr(c, "model", get_peft_model(c.model, LoraConfig(r=4, target_modules="output")))
    )
    on = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    with captioner.model.disable_adapter():
        off = captioner.model(**batch, head_objective=mean_cross_entropy).loss
        torch.testing.assert_close(off, captioner.model(**batch).loss)
    assert abs(on - off) > 1e-3
    captioner.model.merge_adapter()
    assert_close(captioner.model(**batch, head_objective=mean_cross_entropy).loss, on)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_with_activation_checkpointing(family, reentrant):
    captioner, batch = adapted(family, lambda c: c.add_lora("language", r=4))
    captioner.model.train()
    plain = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    plain.backward()
    expected = gradients(captioner.model)
    captioner.model.zero_grad()
    captioner.base_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    captioner.base_model.enable_input_require_grads()  # as PEFT and the Trainer do
    loss = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    loss.backward()
    assert_close(loss, plain)
    assert_same_gradients(gradients(captioner.model), expected)
    captioner.base_model.disable_input_require_grads()


def test_frozen_head_has_no_gradient_and_connectors_are_trained_in_full():
    captioner, batch = adapted("vit-gpt2", lambda c: c.add_lora(r=4))
    names = {n for n, p in captioner.model.named_parameters() if p.requires_grad}
    assert any("enc_to_dec_proj.modules_to_save" in name for name in names)
    captioner.model(**batch, head_objective=smile).loss.backward()
    assert captioner.base_model.decoder.lm_head.weight.grad is None
    captioner, _ = adapted("vit-bert", lambda c: c.add_lora(r=4))  # one width, no connector
    assert not any("modules_to_save" in name for name, _ in captioner.model.named_parameters())


def test_bf16_base_with_fp32_adapters():
    captioner = tiny_captioner("git")
    captioner.model.to(torch.bfloat16)
    captioner.model = get_peft_model(captioner.model, LoraConfig(r=4, target_modules=r"output|.*\.query"))
    batch = captioner.collate(tiny_images(3), tiny_captions(3))
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    loss = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    labels = batch["labels"]
    logits = captioner.model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, -labels.size(1) :][:, :-1]
    expected = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())
    assert_close(loss, expected, dtype="bfloat16", ulps=1)
    loss.backward()


def test_targets_without_a_match_raise():
    captioner = tiny_captioner("git")
    captioner.language_lora = r"gpt\..*"
    with pytest.raises(ValueError, match=r"No module of GitForCausalLM matches 'gpt"):
        captioner.lora_targets()
