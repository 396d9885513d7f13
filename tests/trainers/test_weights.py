"""Trainable weights: fp32 whatever the checkpoint, 16-bit ones refused, and adapters over a frozen base."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from hf_captionrl.captioners import Captioner, both_lora, language_lora, load_captioner, vision_lora
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.trainers.policy import require_fp32
from hf_captionrl.utils.model_files import model_path
from tests.tiny import tiny_blip, tiny_captioner, tiny_captions, tiny_clipcap, tiny_images, tiny_vit_gpt2
from tests.tiny.chat import tiny_chat
from tests.tolerances import resolution, within
from tests.trainers.grpo_worker import make_trainer as make_grpo
from tests.trainers.one_step import tiny_trainer
from tests.trainers.test_smile_sft_trainer import make as make_sft

QUERIES = r"text_decoder\.bert\..*\.query"
STEPS = {
    "max_steps": 3,
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "per_device_train_batch_size": 8,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """One captioner with weights rounded to bf16, stored in bf16 and in fp32."""
    folders = {}
    captioner = load_captioner(model_path("scenes:blip-mle"), dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path_factory.mktemp(str(dtype).removeprefix("torch."))
        captioner.model.to(dtype).save_pretrained(folder)
        captioner.processor.save_pretrained(folder)
        folders[dtype] = str(folder)
    assert json.loads((Path(folders[torch.bfloat16]) / "config.json").read_text())["dtype"] == "bfloat16"
    return folders


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def share_changed(trainer):
    before = values(trainer.model)
    trainer.train()
    after = values(trainer.accelerator.unwrap_model(trainer.model))
    assert before.keys() == after.keys()
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    return changed / sum(value.numel() for value in before.values())


def test_a_bf16_checkpoint_by_name_changes_as_many_weights_as_fp32(stored, tmp_path, scenes):
    low, full = (
        SmileTrainer(stored[dtype], SmileConfig(str(tmp_path), **STEPS), scenes["train"])
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert {p.dtype for p in low.model.parameters()} == {torch.float32}
    share = share_changed(low)
    assert share == within(share_changed(full), 1e-3)
    assert share > 0.5


def test_grpo_by_name_loads_fp32_and_refuses_a_16_bit_object(tmp_path):
    model, processor = tiny_chat("llava")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "chat")
    processor.save_pretrained(tmp_path / "chat")
    trainer = make_grpo(str(tmp_path / "a"), per_device_train_batch_size=16, model=str(tmp_path / "chat"))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="trainable weights are bfloat16"):
        make_grpo(str(tmp_path / "b"), per_device_train_batch_size=16, model=model)


def test_smile_sft_refuses_a_16_bit_object_and_upcasts_modules_to_save(parts, tmp_path):
    model, tokenizer = parts
    low = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match="trainable weights are bfloat16"):
        make_sft((low, tokenizer), tmp_path)
    low.save_pretrained(tmp_path / "low")  # by name it is loaded in fp32
    assert {p.dtype for p in make_sft((str(tmp_path / "low"), tokenizer), tmp_path).model.parameters()} == {
        torch.float32
    }
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    trainer = make_sft((low, tokenizer), tmp_path, peft=lora)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert any(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters() if "modules_to_save" in n)


BASES = {
    # The modules saved whole are a connector, a mapper, and an output head.
    "vit-gpt2": (tiny_vit_gpt2, ["enc_to_dec_proj"], r"decoder\..*c_attn", False),
    "clipcap": (tiny_clipcap, ["mapper"], r"language_model\..*c_attn", True),
    "blip": (tiny_blip, ["text_decoder.cls.predictions.decoder"], QUERIES, False),
}


@pytest.mark.parametrize("family", BASES)
def test_lora_over_a_16_bit_base_trains_adapters_and_saved_modules_in_fp32(family, tmp_path, scenes):
    build, whole, targets, mixed = BASES[family]
    model, processor = build()
    lora = LoraConfig(r=2, target_modules=targets, modules_to_save=whole, lora_alpha=4)
    config = SmileConfig(str(tmp_path), **STEPS, bf16=mixed, generation_max_new_tokens=4)
    captioner, data = load_captioner(model.to(torch.bfloat16), processor=processor), scenes["train"]
    trainer = SmileTrainer(captioner, config, data, scenes["validation"], peft_config=lora)
    trainable = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {"lora" in n for n in trainable} == {True, False}
    before = {n: p.detach().clone() for n, p in trainable.items()}
    trainer.train()
    changed = {n for n, p in trainable.items() if not torch.equal(before[n], p)}
    assert {"lora" in n for n in changed} == {True, False}
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))


def test_an_adapter_that_the_user_added_is_trained_in_fp32_too(tmp_path, scenes):
    model, processor = tiny_blip()
    model.to(torch.bfloat16)
    whole = ["text_decoder.cls.predictions.transform"]
    lora = LoraConfig(r=2, target_modules=QUERIES, modules_to_save=whole, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    before = {id(p): p.detach().clone() for p in adapted.parameters() if p.requires_grad}
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    trainer = SmileTrainer(adapted, SmileConfig(str(tmp_path), **STEPS), scenes["train"], processing_class=processor)
    found = [p for p in trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in found} == {torch.float32}
    assert len(found) == len(before)
    # The same parameters, of which an optimizer may know already.
    assert all(torch.equal(p, before[id(p)].float()) for p in found)
    trainer.train()
    assert any(p.any() for n, p in trainer.model.named_parameters() if "lora_B" in n)  # 0 before
    assert not trainer.captioner.use_full_logits


def test_master_copies_and_quantised_weights_are_not_refused(tmp_path, monkeypatch):
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
            self.scale = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
            self.adapter = nn.Parameter(torch.zeros(4))

    config = SmileConfig(str(tmp_path), use_cpu=True, bf16=True)
    require_fp32(Quantised(), config)
    low = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="2 of 2 trainable weights"):
        require_fp32(low, config)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    require_fp32(low, config)  # accelerate keeps the shards in fp32 in mixed precision
    with pytest.raises(ValueError, match="trainable weights"):
        require_fp32(low, SmileConfig(str(tmp_path), use_cpu=True))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    config.deepspeed_plugin = object()
    require_fp32(low, config)


@pytest.mark.parametrize(("bf16", "error"), [(False, 0.01), (True, 0.01), (True, 0.1)])
def test_the_self_check_of_a_run_allows_the_rounding_of_its_precision(
    bf16, error, tmp_path, scenes, monkeypatch, caplog
):
    own_loss = Captioner.own_loss
    monkeypatch.setattr(Captioner, "own_loss", lambda self, batch: own_loss(self, batch) + error)
    tiny_trainer(tmp_path, scenes, bf16=bf16, use_cpu=True, max_steps=1).train()
    assert ("SELF-CHECK" in caplog.text) == (not bf16 or error > 0.05)


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_model_init_kwargs_reach_from_pretrained(form, tmp_path, scenes, monkeypatch):
    seen = {}

    def spy(model, **settings):
        seen.update(settings, model=model)
        return tiny_captioner("blip")

    monkeypatch.setattr("hf_captionrl.trainers.policy.load_captioner", spy)
    quantised = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    given = {"attn_implementation": "eager", "revision": "abc", "quantization_config": quantised}
    config = SmileConfig(str(tmp_path), use_cpu=True, model_init_kwargs=form(given))
    SmileTrainer("owner/name", config, scenes["train"])
    assert seen == {"model": "owner/name", "processor": None, "prompt": None, "dtype": "float32", **given}


# Adapters: peft_config as in TRL, and the presets for the papers' adapters

LARGE_STEPS = {"learning_rate": 1.0, "freeze_vision_tower": False}
FROZEN = {"freeze_vision_tower": True}
PRESETS = {"language": language_lora, "vision": vision_lora, "both": both_lora}


def adapted(model):
    return {
        name.split(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in model.named_modules()
        if name.endswith("lora_A")
    }


def adapting(folder, scenes, peft_config, *, model=None, **settings):
    given = {"model": model, "peft_config": peft_config}
    return tiny_trainer(folder, scenes, trainer_arguments=given, **{**LARGE_STEPS, **settings})


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_lora_trains_the_target_modules(task_type, tmp_path, scenes):
    config = LoraConfig(r=3, lora_alpha=6, target_modules=QUERIES, task_type=task_type)
    given = copy.deepcopy(config.to_dict())
    trainer = adapting(tmp_path, scenes, config)
    expected = {n for n, _ in tiny_blip()[0].named_modules() if re.fullmatch(QUERIES, n)}
    assert adapted(trainer.model) == expected != set()
    assert config.to_dict() == given  # one configuration may serve several trainers
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all("lora" in name for name in changed)
    batch = trainer.captioner.collate(tiny_images(3), tiny_captions(3))
    assert trainer.captioner.self_check(batch) < resolution(8.0, ulps=1024)  # the tap sees the adapter
    assert not trainer.captioner.use_full_logits
    trainer.save_model()
    images = trainer.captioner.encode_images(tiny_images(3))
    written = trainer.captioner.generate(**images, max_new_tokens=6).captions
    assert len(written) == 3
    tiny_blip()[0].save_pretrained(tmp_path / "base")
    trainer.captioner.processor.save_pretrained(tmp_path / "base")
    again = load_captioner(str(tmp_path), base_model=str(tmp_path / "base"))
    assert again.generate(**images, max_new_tokens=6).captions == written


def blip(dtype=torch.float32, adapter=None):
    model, processor = tiny_blip()
    model.to(dtype)
    return load_captioner(model if adapter is None else get_peft_model(model, adapter), processor=processor)


TOWER = ["vision_model.post_layernorm"]


@pytest.mark.parametrize(
    ("model", "adapter", "settings", "message"),
    [
        (lambda: blip(torch.float16), None, {}, r"trainable weights are float16 .*dtype='float32'.*LoraConfig"),
        (None, None, {"model_init_kwargs": {"dtype": "bfloat16"}}, "trainable weights are bfloat16"),
        (blip, None, {"model_init_kwargs": {"revision": "main"}}, "model_init_kwargs"),
        # A trainable weight of the base beside an adapter.
        (lambda: blip(torch.bfloat16), LoraConfig(target_modules=QUERIES, bias="all"), {}, "bias='none'"),
        # A second adapter, prompts, and an adapter of nothing.
        (lambda: blip(adapter=LoraConfig(target_modules=QUERIES)), LoraConfig(), {}, "merge_and_unload"),
        (blip, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), {}, "PromptTuningConfig"),
        (blip, LoraConfig(target_modules=["nowhere"]), {}, "nowhere"),
        # Adapters in a frozen tower.
        (blip, LoraConfig(target_modules=QUERIES, modules_to_save=TOWER), FROZEN, r"vision_model.*freeze_vision"),
        (blip, {"tune": "both"}, FROZEN, r"vision_model.*freeze_vision_tower"),
    ],
)
def test_weights_and_adapters_that_are_refused(model, adapter, settings, message, stored, tmp_path, scenes):
    with pytest.raises(ValueError, match=message):
        adapting(tmp_path, scenes, adapter, model=model() if model else stored[torch.float32], **settings)


@pytest.mark.parametrize(("family", "tune"), [("blip", "language"), ("vit-gpt2", "vision"), ("clipcap", "both")])
def test_presets_equal_the_loras_of_the_captioner(family, tune, tmp_path):
    captioner = tiny_captioner(family)
    config = PRESETS[tune](captioner, r=4, alpha=8, dropout=0.1)
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (4, 8, 0.1, None)
    assert config.target_modules == captioner.lora_targets(tune)
    present = {name for name, _ in captioner.model.named_modules()}
    assert (config.modules_to_save or []) == [path for path in captioner.connector_paths if path in present]
    captioner.model.save_pretrained(tmp_path)
    assert PRESETS[tune](str(tmp_path), r=4, alpha=8, dropout=0.1).to_dict() == config.to_dict()
    assert PRESETS[tune](captioner.base_model, r=4, alpha=8, dropout=0.1).to_dict() == config.to_dict()
    by_dict = tiny_captioner(family)
    by_dict.add_lora(tune, r=4, alpha=8, dropout=0.1)
    captioner.add_adapter(config)
    assert adapted(by_dict.model) == adapted(captioner.model) != set()
