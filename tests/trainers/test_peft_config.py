"""peft_config as in TRL, and the presets for the papers' adapters."""

import copy
import re

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from hf_captionrl.captioners import both_lora, language_lora, load_captioner, vision_lora
from tests.tiny import tiny_blip, tiny_captioner, tiny_captions, tiny_images
from tests.tolerances import resolution
from tests.trainers.one_step import tiny_trainer

LARGE_STEPS = {"learning_rate": 1.0, "freeze_vision_tower": False}
QUERIES = r"text_decoder\.bert\..*\.query"
PRESETS = {"language": language_lora, "vision": vision_lora, "both": both_lora}


def adapted(model):
    """Names of the modules that have a LoRA."""
    return {
        name.split(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in model.named_modules()
        if name.endswith("lora_A")
    }


def make(folder, scenes, peft_config, *, model=None, **settings):
    given = {"model": model, "peft_config": peft_config}
    return tiny_trainer(folder, scenes, trainer_arguments=given, **{**LARGE_STEPS, **settings})


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_lora_trains_the_target_modules(task_type, tmp_path, scenes):
    config = LoraConfig(r=3, lora_alpha=6, target_modules=QUERIES, task_type=task_type)
    given = copy.deepcopy(config.to_dict())
    trainer = make(tmp_path, scenes, config)
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


def test_an_adapter_added_before_with_a_task_type_trains(tmp_path, scenes):
    model, processor = tiny_blip()
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=QUERIES, task_type="CAUSAL_LM"))
    trainer = make(tmp_path, scenes, None, model=load_captioner(wrapped, processor=processor))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_B" in n}
    trainer.train()
    assert any(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    assert not trainer.captioner.use_full_logits


def test_without_targets_the_language_model_is_adapted(tmp_path, scenes):
    trainer = make(tmp_path, scenes, LoraConfig(r=2))  # PEFT knows no targets for BLIP
    language = {
        n for n, _ in tiny_blip()[0].named_modules() if re.fullmatch(language_lora(tiny_captioner()).target_modules, n)
    }
    assert adapted(trainer.model) == language


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=QUERIES, modules_to_save=["vision_model.post_layernorm"]),
        {"tune": "both"},
    ],
    ids=["modules_to_save", "dict"],
)
def test_an_adapter_in_a_frozen_tower_is_refused(config, tmp_path, scenes):
    with pytest.raises(ValueError, match=r"vision_model.*freeze_vision_tower"):
        make(tmp_path, scenes, config, freeze_vision_tower=True)


def test_a_second_adapter_and_prompts_are_refused(tmp_path, scenes):
    model, processor = tiny_blip()
    wrapped = load_captioner(get_peft_model(model, LoraConfig(target_modules=QUERIES)), processor=processor)
    with pytest.raises(ValueError, match="merge_and_unload"):
        make(tmp_path, scenes, LoraConfig(target_modules=QUERIES), model=wrapped)
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        make(tmp_path, scenes, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="nowhere"):
        make(tmp_path, scenes, LoraConfig(target_modules=["nowhere"]))


# Presets


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


def test_presets_of_an_unknown_model_name_the_remedy(parts):
    with pytest.raises(ValueError, match=r"'llama'.*peft\.LoraConfig"):
        language_lora(parts[0])
