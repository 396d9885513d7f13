"""Loading, saving, and errors of loading."""

import json
import logging

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    GitModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_captionrl.captioners import BlipCaptioner, GitCaptioner, ProcessorPair, load_captioner, register
from hf_captionrl.captioners.loading import FAMILIES as REGISTERED
from hf_captionrl.retrieval import load_scorer
from tests.tiny import FAMILIES, tiny_blip, tiny_captioner, tiny_git, tiny_images, tiny_vit_bert, tiny_vit_gpt2
from tests.tiny_chat import tiny_chat


def write(captioner) -> list[str]:
    pixel_values = captioner.encode_images(tiny_images(3, size=24))["pixel_values"]
    return captioner.generate(pixel_values=pixel_values, max_new_tokens=6).captions


def test_loaded_captioner_generates_the_same_captions(tmp_path):
    """test_families.py covers the other families."""
    captioner = tiny_captioner("blip", prompt="a picture of ")
    captioner.save_pretrained(tmp_path)
    again = load_captioner(tmp_path)
    assert type(again) is BlipCaptioner
    assert again.prompt == "a picture of "
    assert not again.model.training
    assert write(again) == write(captioner)
    assert again.tokenizer.get_vocab() == captioner.tokenizer.get_vocab()
    # config.json has the name of the original class, so that transformers alone can load the folder.
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(captioner.model).__name__]
    assert load_captioner(str(tmp_path), prompt="").prompt == ""
    half = load_captioner(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert next(half.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_adapter_generates_the_same_captions(family, tmp_path):
    base = tiny_captioner(family, prompt="a ")
    base.save_pretrained(tmp_path / "base")
    captioner = load_captioner(tmp_path / "base")
    captioner.add_lora("both", r=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in captioner.model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
    assert write(captioner) != write(base)
    captioner.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again = load_captioner(tmp_path / "adapter")
    assert write(again) == write(captioner)
    assert again.prompt == "a "
    assert sum(p.requires_grad for p in again.model.parameters()) == sum(
        p.requires_grad for p in captioner.model.parameters()
    )
    if family != "blip":
        return
    elsewhere = tmp_path / "moved"
    (tmp_path / "base").rename(elsewhere)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_captioner(tmp_path / "adapter")
    assert write(load_captioner(tmp_path / "adapter", base_model=elsewhere)) == write(captioner)


def test_adapter_of_another_base_model_raises(tmp_path):
    captioner = tiny_captioner("blip")
    captioner.add_lora(r=4)
    captioner.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="does not name its base model"):
        load_captioner(tmp_path / "adapter")
    tiny_captioner("git").save_pretrained(tmp_path / "git")
    others = {"git": "the model has none of the modules that it adapts"}
    layer = r"base_model\.model\.text_decoder\.bert\.encoder\.layer"
    for name, changes, wrong in [
        ("wide", {"hidden_size": 48}, rf"{layer}\.0\.\S+ is \[4, 32\] in the adapter and \[4, 48\] in the model"),
        ("shallow", {"num_hidden_layers": 1}, rf"it has {layer}\.1\.\S+, which the model does not have"),
        ("deep", {"num_hidden_layers": 4}, rf"it lacks {layer}\.2\.\S+"),
    ]:
        model, processor = tiny_blip(**changes)
        load_captioner(model, processor=processor).save_pretrained(tmp_path / name)
        others[name] = wrong
    for name, wrong in others.items():
        sentence = rf"^The adapter '\S+adapter' does not fit '\S+{name}': {wrong}\. Pass base_model=\.\.\., the model"
        with pytest.raises(ValueError, match=sentence):
            load_captioner(tmp_path / "adapter", base_model=tmp_path / name)
    model, processor = tiny_blip(num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"does not fit 'BlipForConditionalGeneration': it has"):
        load_captioner(tmp_path / "adapter", base_model=model, processor=processor)
    captioner.model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    with pytest.raises(FileNotFoundError, match=r"'\S+pickled' has no adapter_model.safetensors"):
        load_captioner(tmp_path / "pickled", base_model=tmp_path / "wide")


def test_custom_code_is_never_executed(tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match=r"^trust_remote_code is not supported"):
        load_captioner(tmp_path, trust_remote_code=True)
    mine = {"auto_map": {"AutoImageProcessor": "code.P", "AutoProcessor": "code.P"}, "image_processor_type": "Mine"}
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({**settings, **mine, "image_processor": mine}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(mine))
    with pytest.raises(ValueError, match=r"^The image processor or tokenizer of '.*' needs custom code .* Pass proc"):
        load_captioner(tmp_path)
    for config, message in [
        (
            {"auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}},
            r"^'.*' needs custom code \(auto_map .* -hf",
        ),
        ({}, r"^'.*' has a model type that the installed transformers \(\d.*\) does not support\. Update"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-my-own", **config}))
        with pytest.raises(ValueError, match=message):
            load_captioner(tmp_path, trust_remote_code=False)
    bringing = {"AutoConfig": "code.C", "AutoModel": "code.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-my-own", "auto_map": bringing}))
    with pytest.raises(ValueError, match=r"^'.*' needs custom code .*, which is never executed here"):
        load_scorer(str(tmp_path))


@pytest.mark.parametrize("builder", [tiny_vit_gpt2, tiny_vit_bert])
def test_missing_special_tokens_come_from_the_tokenizer(builder, caplog):
    model, processor = builder()
    expected = load_captioner(model, processor=processor)
    model, processor = builder(decoder_start_token_id=None)
    for config in (model.config, model.generation_config, model.config.decoder):
        config.decoder_start_token_id = config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with caplog.at_level(logging.WARNING):
        captioner = load_captioner(model, processor=processor)
    assert "lacks decoder_start_token_id" in caplog.text
    assert captioner.special_token_ids() == expected.special_token_ids()
    assert write(captioner) == write(expected)
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    tokenizer = processor.tokenizer
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="defines the padding token"):
        load_captioner(model, processor=processor)


def test_models_that_are_not_captioners_raise(tmp_path):
    clip = CLIPModel(
        CLIPConfig(
            text_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
            vision_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        )
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1))
    bert = BertForMaskedLM(
        BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    for name, model, remedy in [
        ("clip", clip, "load_scorer"),
        ("gpt2", gpt2, "vision-to-text"),
        ("bert", bert, "blip"),
    ]:
        with pytest.raises(ValueError, match=rf"'{name}'.*not a captioner.*{remedy}|not a captioner of.*{remedy}"):
            load_captioner(model)
        model.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"not a captioner of a supported family.*{remedy}"):
            load_captioner(tmp_path / name)


def test_model_without_an_output_head_raises(tmp_path):
    model, processor = tiny_git()
    headless = GitModel(model.config)
    with pytest.raises(ValueError, match="GitModel has no output head"):
        load_captioner(headless, processor=processor)
    headless.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no weights for the output head"):
        load_captioner(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nowhere'"):
        load_captioner(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_captioner(tmp_path)
    model, processor = tiny_blip()
    model.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer or no image processor"):
        load_captioner(tmp_path)
    assert write(load_captioner(tmp_path, processor=processor))
    processor.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer or no image processor"):
        load_captioner(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    processor.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights in safetensors"):
        load_captioner(tmp_path)


def test_parts_that_do_not_match_raise():
    model, processor = tiny_blip()
    with pytest.raises(ValueError, match="has no processor"):
        load_captioner(model)
    with pytest.raises(ValueError, match="lacks a tokenizer or an image_processor"):
        load_captioner(model, processor=processor.tokenizer)
    _, gpt2_processor = tiny_vit_gpt2()
    with pytest.raises(ValueError, match=r"has 270 tokens, but the model's output head has 51"):
        load_captioner(model, processor=ProcessorPair(processor.image_processor, gpt2_processor.tokenizer))


def test_known_prompts_and_captioners_pass_through():
    model, processor = tiny_blip()
    model.name_or_path = "Salesforce/blip-image-captioning-base"
    captioner = load_captioner(model, processor=processor)
    assert captioner.prompt == "a picture of "
    assert load_captioner(captioner) is captioner
    assert load_captioner(captioner, prompt="the ").prompt == "the "


def test_arguments_of_loading_raise_for_loaded_models(tmp_path):
    captioner = tiny_captioner("blip")
    captioner.add_lora(r=4)
    captioner.save_pretrained(tmp_path)
    model, processor = tiny_blip()
    for given, settings in [
        (captioner, {"dtype": torch.bfloat16}),
        (model, {"processor": processor, "attn_implementation": "eager"}),
        (tmp_path, {"base_model": model, "processor": processor, "dtype": torch.bfloat16}),
    ]:
        with pytest.raises(
            ValueError,
            match=r"^(dtype|attn_implementation) cannot be set on a Blip\w+ object, which is already loaded",
        ):
            load_captioner(given, **settings)
    assert load_captioner(tmp_path, base_model=model, processor=processor).model.dtype == torch.float32


def test_chat_model_has_a_default_prompt(tmp_path):
    model, processor = tiny_chat("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    asked = load_captioner(tmp_path)
    assert asked.prompt == "Briefly describe the content of the image."
    assert load_captioner(model, processor=processor).prompt == asked.prompt
    assert load_captioner(tmp_path, prompt="").prompt == ""


def test_register_adds_a_family():
    @register
    class Other(GitCaptioner):
        model_types = ("git-of-tomorrow",)

    try:
        model, processor = tiny_git()
        model.config.model_type = "git-of-tomorrow"
        assert type(load_captioner(model, processor=processor)) is Other
    finally:
        del REGISTERED["git-of-tomorrow"]
