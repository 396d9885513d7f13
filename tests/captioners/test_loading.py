"""Loading, saving, and errors of loading."""

import copy
import functools
import importlib.metadata
import json
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, GitModel

from hf_captionrl.apps.convert.convert import convert
from hf_captionrl.apps.experiments.arguments import ModelArguments
from hf_captionrl.captioners import ProcessorPair, load_captioner
from hf_captionrl.captioners import loading as captioner_loading
from hf_captionrl.utils.model_files import check_kwargs
from tests.captioners.models import build
from tests.tiny import tiny_blip, tiny_captioner, tiny_git, tiny_images, tiny_vit_bert, tiny_vit_gpt2
from tests.tiny.chat import tiny_chat

IMAGES = tiny_images(3, size=24)


def write(captioner) -> list[str]:
    return captioner.generate(
        **captioner.encode_images(IMAGES), max_new_tokens=6, do_sample=False, num_beams=1
    ).captions


def test_loaded_captioner_generates_the_same_captions(tmp_path):
    captioner = tiny_captioner("blip", prompt="a picture of ")
    captioner.save_pretrained(tmp_path)
    again = load_captioner(tmp_path)
    assert not again.model.training
    assert write(again) == write(captioner)
    # config.json has the name of the original class, so that transformers alone can load the folder.
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(captioner.model).__name__]
    assert load_captioner(str(tmp_path), prompt="").prompt == ""
    half = load_captioner(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert next(half.model.parameters()).dtype == torch.bfloat16


def test_loaded_adapter_generates_the_same_captions(tmp_path):
    base = tiny_captioner("vit-gpt2", prompt="a ")
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
    left, right = (sum(p.requires_grad for p in c.model.parameters()) for c in (again, captioner))
    assert left == right > 0
    elsewhere = tmp_path / "moved"
    (tmp_path / "base").rename(elsewhere)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_captioner(tmp_path / "adapter")
    assert write(load_captioner(tmp_path / "adapter", base_model=elsewhere)) == write(captioner)


@pytest.mark.parametrize("other", [{"hidden_size": 48}, {"num_hidden_layers": 1}, {"num_hidden_layers": 4}], ids=str)
def test_adapter_of_another_base_model_raises(other, tmp_path):
    captioner = tiny_captioner("blip")
    captioner.add_lora(r=4)
    captioner.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="does not name its base model"):
        load_captioner(tmp_path / "adapter")
    model, processor = tiny_blip(**other)
    load_captioner(model, processor=processor).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"adapter' does not fit '\S+other': .* Pass base_model="):
        load_captioner(tmp_path / "adapter", base_model=tmp_path / "other")


@pytest.mark.parametrize("builder", [tiny_vit_gpt2, tiny_vit_bert])
def test_missing_special_tokens_come_from_the_tokenizer(builder, caplog):
    model, processor = builder()
    expected = load_captioner(model, processor=processor)
    model, processor = builder(decoder_start_token_id=None)
    for config in (model.config, model.generation_config, model.config.decoder):
        config.decoder_start_token_id = config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    captioner = load_captioner(model, processor=processor)
    assert "lacks decoder_start_token_id" in caplog.text
    assert captioner.special_token_ids() == expected.special_token_ids()
    assert write(captioner) == write(expected)


@pytest.mark.parametrize("name", ["t5", "vit", "clip"])
def test_models_and_configurations_of_other_kinds_raise(name, tmp_path):
    config = AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    for source in (types.SimpleNamespace(config=config), tmp_path):
        with pytest.raises(ValueError, match=rf"model type '{name}'\) is not a captioner of a supported family.*blip"):
            load_captioner(source)


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
    model, processor = tiny_blip()
    model.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer or no image processor"):
        load_captioner(tmp_path)
    assert write(load_captioner(tmp_path, processor=processor))
    (tmp_path / "model.safetensors").unlink()
    processor.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights in safetensors"):
        load_captioner(tmp_path)


def test_parts_that_do_not_match_raise():
    model, processor = tiny_blip()
    _, gpt2_processor = tiny_vit_gpt2()
    with pytest.raises(ValueError, match=r"has 270 tokens, but the model's output head has 51"):
        load_captioner(model, processor=ProcessorPair(processor.image_processor, gpt2_processor.tokenizer))


def test_known_prompts_and_captioners_pass_through():
    for place, prompt in (("Salesforce/blip2-opt-2.7b-coco", "a photo of"), ("Salesforce/blip2-opt-2.7b", "")):
        model, processor = build("blip2-opt")
        model.name_or_path = place
        captioner = load_captioner(model, processor=processor)
        assert captioner.prompt == prompt
    assert load_captioner(captioner) is captioner
    assert load_captioner(captioner, prompt="the ").prompt == "the "


_build = functools.cache(build)


def load(name, processor):
    """A captioner of a tiny model with a processor."""
    return load_captioner(copy.deepcopy(_build(name)[0]), processor=processor)


def test_a_chat_template_without_the_image_raises():
    processor = copy.deepcopy(_build("qwen2_vl")[1])
    processor.chat_template = processor.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(ValueError, match=r"Qwen2VLProcessor has no image token \(<\|image_pad\|>\)"):
        load("qwen2_vl", processor)


def test_ordinary_word_after_the_answer_in_the_template_is_not_an_end_token():
    own = _build("llava")[1]
    expected = load("llava", own).end_token_ids
    for end, first in ((" dog.\n", ()), ("<s>", (own.tokenizer.bos_token_id,))):
        other = copy.copy(own)
        other.chat_template = own.chat_template.replace(" {% endfor %}", end + "{% endfor %}")
        assert load("llava", other).end_token_ids == (*first, *expected)


@pytest.fixture
def saved(tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    return tmp_path


# Quantization


@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_reaches_from_pretrained(bits, saved, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0" if name == "bitsandbytes" else version(name))
    seen = {}

    def spy(loader, name, **kwargs):
        seen.update(kwargs)
        return loader.from_pretrained(name), set()

    monkeypatch.setattr(captioner_loading, "load_pretrained", spy)
    settings = ModelArguments(str(saved), dtype="bfloat16", tune="language", **{f"load_in_{bits}bit": True})
    settings.load()
    config = seen["quantization_config"]
    assert isinstance(config, transformers.BitsAndBytesConfig)
    assert (config.load_in_4bit, config.load_in_8bit) == (bits == 4, bits == 8)
    if bits == 4:
        assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert not {"load_in_4bit", "load_in_8bit"} & seen.keys()
    assert check_kwargs({"quantization_config": config}) == {"quantization_config": config}


def stored(folder, model, processor):
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def edit(folder, file, **changes):
    """Change a JSON file; None removes a key."""
    path = folder / file
    content = {**json.loads(path.read_text()), **changes} if path.is_file() else changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return content


def in_files_of_their_own(folder):
    """Save the image processor separately from processor_config.json, as transformers 4 did."""
    content = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(content.pop("image_processor")))
    (folder / "processor_config.json").unlink()


@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type"])
def test_vit_feature_extractor(key, tmp_path):
    """For the first AutoProcessor silently returns a tokenizer."""
    captioner = tiny_captioner("vit-gpt2")
    captioner.save_pretrained(tmp_path)
    edit(tmp_path, "preprocessor_config.json", image_processor_type=None)
    edit(tmp_path, "preprocessor_config.json", **{key: "ViTFeatureExtractor"})
    again = load_captioner(tmp_path)
    expected = captioner.encode_images(IMAGES)["pixel_values"]
    assert torch.equal(again.encode_images(IMAGES)["pixel_values"], expected)
    assert write(again) == write(captioner)


@pytest.mark.parametrize("kept", ["text_config", "top", "nowhere"])
def test_dtype_in_the_text_configuration_alone(kept, tmp_path):
    """Like Qwen3-VL: `config.dtype` is None, and the weights are bf16."""
    model, processor = tiny_chat("qwen3_vl")
    stored(tmp_path, model.to(torch.bfloat16), processor)
    config = edit(tmp_path, "config.json", dtype="bfloat16" if kept == "top" else None)
    dtype = "bfloat16" if kept == "text_config" else None
    parts = {part: {**config[part], "dtype": dtype} for part in ("text_config", "vision_config")}
    edit(tmp_path, "config.json", **parts)
    captioner = load_captioner(tmp_path)
    assert {p.dtype for p in captioner.model.parameters()} == {torch.bfloat16}
    assert len(write(captioner)) == 3
    found = load_captioner(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}


def test_no_safetensors_and_no_generation_config(tmp_path):
    captioner = tiny_captioner("blip")
    old = tmp_path / "old"
    captioner.save_pretrained(old)
    torch.save(load_file(old / "model.safetensors"), old / "pytorch_model.bin")
    (old / "tf_model.h5").write_bytes(b"of TensorFlow")
    for name in ("model.safetensors", "generation_config.json", "captioner.json"):
        (old / name).unlink()
    in_files_of_their_own(old)
    with pytest.raises(FileNotFoundError, match=r"it has pytorch_model\.bin.*Use `captionrl convert \S+old OUT`"):
        load_captioner(old)
    convert(old, tmp_path / "new")
    assert write(load_captioner(tmp_path / "new")) == write(captioner)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"auto_map": {"AutoImageProcessor": "code.Images"}},
            r"needs custom code \(auto_map\), which is never executed",
        ),
        ({}, r"cannot be loaded from preprocessor_config\.json, processor_config\.json, tokenizer_config\.json"),
    ],
)
def test_processors_of_an_unknown_class_raise(changes, message, tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    edit(tmp_path, "processor_config.json", image_processor=None, processor_class=None)
    edit(tmp_path, "preprocessor_config.json", image_processor_type="Unknown", **changes)
    with pytest.raises(ValueError, match=message):
        load_captioner(tmp_path)
