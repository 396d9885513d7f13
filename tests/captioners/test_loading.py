"""Loading, saving, and errors of loading."""

import copy
import functools
import importlib.metadata
import json
import logging

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Blip2QFormerConfig,
    BloomConfig,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    GitModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    SiglipConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_captionrl.apps.experiments.arguments import ModelArguments
from hf_captionrl.captioners import BlipCaptioner, GitCaptioner, ProcessorPair, load_captioner, register
from hf_captionrl.captioners import loading as captioner_loading
from hf_captionrl.captioners.head_tap import floating_dtype
from hf_captionrl.captioners.loading import FAMILIES as REGISTERED
from hf_captionrl.cli import main
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils import model_files as device_arguments
from hf_captionrl.utils.model_files import check_kwargs
from tests.captioners.test_families import build
from tests.tiny import FAMILIES, tiny_blip, tiny_captioner, tiny_git, tiny_images, tiny_vit_bert, tiny_vit_gpt2
from tests.tiny.chat import tiny_chat
from tests.tolerances import assert_close


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


@pytest.mark.parametrize(
    "other", [{"hidden_size": 48}, {"num_hidden_layers": 1}, {"num_hidden_layers": 4}, "git"], ids=str
)
def test_adapter_of_another_base_model_raises(other, tmp_path):
    captioner = tiny_captioner("blip")
    captioner.add_lora(r=4)
    captioner.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="does not name its base model"):
        load_captioner(tmp_path / "adapter")
    model, processor = tiny_git() if other == "git" else tiny_blip(**other)
    load_captioner(model, processor=processor).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"adapter' does not fit '\S+other': .* Pass base_model="):
        load_captioner(tmp_path / "adapter", base_model=tmp_path / "other")
    with pytest.raises(ValueError, match=r"does not fit '(Blip|Git)For"):
        load_captioner(tmp_path / "adapter", base_model=model, processor=processor)
    captioner.model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    with pytest.raises(FileNotFoundError, match=r"'\S+pickled' has no adapter_model.safetensors"):
        load_captioner(tmp_path / "pickled", base_model=tmp_path / "other")


def test_custom_code_is_never_executed(tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match=r"^trust_remote_code is True"):
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
        ({}, r"^'.*' has a model type that transformers \S+ does not support\. Update"),
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


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
T5 = {
    "d_model": 8,
    "d_kv": 8,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 1,
    "vocab_size": 20,
    "decoder_start_token_id": 0,
}
OTHERS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=20)), "reads only text"),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**T5)), "reads only text"),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1)), "reads only text"),
    "bert": (lambda: BertForMaskedLM(BertConfig(**SMALL, vocab_size=20)), "vision-to-text"),
    "vit": (lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=8)), "classifies images"),
    "clip": (lambda: CLIPModel(CLIPConfig(text_config=SMALL, vision_config=SMALL)), "load_scorer"),
    "bloom": (BloomConfig, "reads only text"),
    "resnet": (ResNetConfig, "classifies images"),
    "siglip": (SiglipConfig, "load_scorer"),
    "clip_vision_model": (CLIPVisionConfig, "load_scorer"),
    "blip_2_qformer": (Blip2QFormerConfig, "vision-to-text"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_and_configurations_of_other_kinds_raise(name, tmp_path):
    make, reason = OTHERS[name]
    model = make()
    message = rf"model type '{name}'\) is not a captioner of a supported family.*{reason}.*blip"
    if hasattr(model, "config"):
        with pytest.raises(ValueError, match=message):
            load_captioner(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_captioner(tmp_path)


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


_build = functools.cache(build)
OWN = ("blip", "git", "vit-gpt2", "vit-bert", "clipcap", "blip2-t5", "llava", "qwen2_vl", "internvl", "paligemma")


def load(name, processor):
    """A captioner of a tiny model with a processor."""
    return load_captioner(copy.deepcopy(_build(name)[0]), processor=processor)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("blip", "git", r"start token of BlipFor\w+ \(id 5\) is the word 'a'"),
        ("git", "blip2-t5", r"end token of Git\w+ \(id 3\) is the word '▁a'"),
        ("vit-gpt2", "blip", "end token of Vision.* has the id 269, but the tokenizer has only 51 tokens"),
        ("clipcap", "git", "has the id 269, but the tokenizer has only 49 tokens"),
        ("paligemma", "llava", "needs a PaliGemmaProcessor, not a LlavaProcessor"),
        ("qwen2_vl", "llava", "image token of the LlavaProcessor is <image> with the id 6, but .* id 8"),
        ("llava", "pair", "image token of the ProcessorPair is None"),
        ("qwen2_vl", "template", r"chat template of the Qwen2VLProcessor has no image token \(<\|image_pad\|>\)"),
    ],
)
def test_processor_of_another_model_raises(name, other, message):
    processor = copy.deepcopy(_build(name if other in ("pair", "template") else other)[1])
    if other == "pair":
        processor = ProcessorPair(processor.image_processor, processor.tokenizer)
    elif other == "template":
        processor.chat_template = processor.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(ValueError, match=message):
        load(name, processor)


@pytest.mark.parametrize(
    ("name", "other"),
    [("vit-bert", "pix2struct"), ("internvl", "qwen2_vl"), ("qwen2_vl", "internvl"), ("idefics3", "llava")]
    + [(name, "another size") for name in ("blip", "git", "vit-gpt2", "clipcap", "llava", "blip2-opt")],
)
def test_pixels_of_another_model_raise_in_the_first_forward(name, other):
    """Such a processor loads, but nothing is computed from it."""
    processor = copy.deepcopy(_build(name if other == "another size" else other)[1])
    images = processor.image_processor
    if other == "another size":
        edge = {"height": 48, "width": 48}
        images.size = {"shortest_edge": 48} if "shortest_edge" in dict(images.size) else edge
        if getattr(images, "crop_size", None):
            images.crop_size = edge
    captioner = load(name, processor)
    with pytest.raises((ValueError, RuntimeError, KeyError, AttributeError)):
        captioner.log_probs(captioner.collate(tiny_images(1, size=40), ["a red cat"]))


def test_ordinary_word_after_the_answer_in_the_template_is_not_an_end_token():
    own = _build("llava")[1]
    expected = load("llava", own).end_token_ids
    for end, first in ((" dog.\n", ()), ("<s>", (own.tokenizer.bos_token_id,))):
        other = copy.copy(own)
        other.chat_template = own.chat_template.replace(" {% endfor %}", end + "{% endfor %}")
        assert load("llava", other).end_token_ids == (*first, *expected)


def test_mismatch_that_may_be_harmless_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        for name in OWN:
            load(name, _build(name)[1])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load("vit-bert", _build("blip2-t5")[1])
    assert "The end token of VisionEncoderDecoderModel (id 3) is the word '▁a'" in caplog.text


WITHOUT_STATIC_CACHE = {"blip", "git", "kosmos2", "paligemma"}


@pytest.fixture
def saved(tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    return tmp_path


# Attention


@pytest.mark.parametrize("family", ["vit-gpt2", "vit-bert", "clipcap"])
def test_eager_attention_and_sdpa_give_equal_log_probabilities(family, tmp_path):
    tiny_captioner(family).save_pretrained(tmp_path)
    found = {}
    for name in ("eager", "sdpa"):
        captioner = load_captioner(tmp_path, attn_implementation=name)
        used = {m.config._attn_implementation for m in captioner.base_model.modules() if hasattr(m, "config")}
        assert used == {name}
        with torch.no_grad():
            found[name] = captioner.log_probs(captioner.collate(tiny_images(2), ["a red cat", "a dog"]))
    assert_close(found["eager"], found["sdpa"], ulps=64, magnitude=10)


@pytest.mark.parametrize("family", ["blip", "git"])
def test_attention_that_a_model_lacks_is_refused(family, tmp_path):
    tiny_captioner(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not support .*attn_implementation"):
        load_captioner(tmp_path, attn_implementation="sdpa")
    model = load_captioner(tmp_path, attn_implementation="eager").base_model
    assert model.config._attn_implementation == "eager"


def test_unknown_attention_is_refused_with_the_list(saved, tmp_path, capsys):
    message = "attn_implementation.*spda.*eager"
    with pytest.raises(ValueError, match=message):
        load_captioner(saved, attn_implementation="spda")
    with pytest.raises(ValueError, match=message):
        ModelArguments(str(saved), attn_implementation="spda").load()
    line = ["caption", str(saved), "--output", str(tmp_path / "a.jsonl"), "--max_images", "1"]
    assert main([*line, "--attn_implementation", "spda"]) == 2
    assert "spda" in capsys.readouterr().err


# Quantization


@pytest.fixture
def on_a_gpu_with_bitsandbytes(monkeypatch):
    find, version = device_arguments.find_spec, importlib.metadata.version
    monkeypatch.setattr(device_arguments, "find_spec", lambda name: name == "bitsandbytes" or find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0" if name == "bitsandbytes" else version(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("given", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_quantization_without_a_gpu_names_what_is_missing(given, saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_arguments, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"is set, but needs bitsandbytes, .* and a GPU, .* Use dtype="):
        load_captioner(saved, **given)


@pytest.mark.usefixtures("on_a_gpu_with_bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_reaches_from_pretrained(bits, saved, monkeypatch):
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


@pytest.mark.usefixtures("on_a_gpu_with_bitsandbytes")
def test_contradicting_quantization_is_refused(saved):
    with pytest.raises(ValueError, match="load_in_4bit and load_in_8bit are given together"):
        load_captioner(saved, load_in_4bit=True, load_in_8bit=True)
    with pytest.raises(ValueError, match="load_in_8bit and quantization_config are given together"):
        load_captioner(saved, load_in_8bit=True, quantization_config={"load_in_4bit": True})
    with pytest.raises(ValueError, match="load_in_4bit is set, but tune is not"):
        ModelArguments(load_in_4bit=True)


def test_quantized_head_is_refused(saved):
    model = load_captioner(saved).base_model
    head = captioner_loading.FAMILIES["blip"].output_head(model)
    head.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"head of BlipForConditionalGeneration was quantized.*predictions\.decoder"):
        captioner_loading._check_head("name", captioner_loading.FAMILIES["blip"], model, set())


def test_features_keep_the_dtype_of_weights_that_are_not_quantized():
    tower = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    tower[0].weight = nn.Parameter(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    assert floating_dtype(tower, torch.float32) == torch.bfloat16  # that of the bias
    assert floating_dtype(nn.Identity(), torch.float16) == torch.float16


def test_quantization_of_the_command_names_what_is_missing(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = ["caption", str(saved), "--output", str(tmp_path / "a.jsonl"), "--max_images", "1", "--load_in_4bit"]
    assert main(line) == 2
    assert "a GPU, which torch does not see" in capsys.readouterr().err
