"""Arguments that depend on the device: attention, quantization, static caches, compiled decoding."""

import importlib.metadata
import json
import multiprocessing
import shutil

import pytest
import torch
import transformers
from torch import nn

from hf_captionrl.apps.experiments.arguments import ModelArguments
from hf_captionrl.captioners import decoding as compiled_decoding
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners import loading as captioner_loading
from hf_captionrl.captioners.decoding import DecodingLoop, UndecodableError
from hf_captionrl.captioners.head_tap import floating_dtype
from hf_captionrl.cli import main
from hf_captionrl.utils import model_files as device_arguments
from hf_captionrl.utils.model_files import check_kwargs
from recipes import self_retrieval_blip
from scripts.benchmarks.models import TINY, build_world
from tests.captioners.test_decoding import ALL, B, G, T, captioner_and_images, many_ends
from tests.tiny import tiny_captioner, tiny_images
from tests.tolerances import assert_close

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
    message = r"attn_implementation is 'sdpa', which (Blip|Git)\w+ does not support\. Use 'eager', or leave it out"
    with pytest.raises(ValueError, match=message):
        load_captioner(tmp_path, attn_implementation="sdpa")
    model = load_captioner(tmp_path, attn_implementation="eager").base_model
    assert model.config._attn_implementation == "eager"


def test_unknown_attention_is_refused_with_the_list(saved, tmp_path, capsys):
    message = "attn_implementation is 'spda'. Use one of 'eager', .*'sdpa'"
    with pytest.raises(ValueError, match=message):
        load_captioner(saved, attn_implementation="spda")
    with pytest.raises(ValueError, match=message):
        load_captioner(saved, attn_implementation={"text_config": "spda"})
    with pytest.raises(ValueError, match=message):
        ModelArguments(str(saved), attn_implementation="spda").load()
    line = ["caption", str(saved), "--output", str(tmp_path / "a.jsonl"), "--max_images", "1"]
    assert main([*line, "--attn_implementation", "spda"]) == 2
    assert "Use one of 'eager'" in capsys.readouterr().err


def test_flash_attention_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"'flash_attention_2', which needs a GPU.*Use 'sdpa'"):
        device_arguments.check_attention("flash_attention_2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device_arguments.check_attention("flash_attention_2")
    device_arguments.check_attention("someone/kernel")


# Quantization


@pytest.fixture
def on_a_gpu_with_bitsandbytes(monkeypatch):
    find, version = device_arguments.find_spec, importlib.metadata.version
    monkeypatch.setattr(device_arguments, "find_spec", lambda name: name == "bitsandbytes" or find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0" if name == "bitsandbytes" else version(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    "given", [{"load_in_4bit": True}, {"load_in_8bit": True}, {"quantization_config": {"load_in_4bit": True}}]
)
def test_quantization_without_a_gpu_names_what_is_missing(given, saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_arguments, "find_spec", lambda name: None)
    message = "is set, but needs bitsandbytes, which is not installed and a GPU, which torch does not see. Use dtype="
    with pytest.raises(ValueError, match=message):
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


# Static caches


@pytest.mark.parametrize("family", ALL)
def test_static_cache_gives_the_captions_of_a_dynamic_one_or_is_refused(family):
    captioner, images = captioner_and_images(family)
    settings = {"max_new_tokens": 6, **many_ends(captioner)}
    expected = captioner.generate(**images, **settings).ids
    assert captioner.generate(**images, **settings, cache_implementation="dynamic").ids.tolist() == expected.tolist()
    if family in WITHOUT_STATIC_CACHE:
        with pytest.raises(ValueError, match="cannot decode with a static cache"):
            captioner.generate(**images, **settings, cache_implementation="static")
        return
    assert captioner.generate(**images, **settings, cache_implementation="static").ids.tolist() == expected.tolist()
    many = captioner.generate(
        **images, **settings, cache_implementation="static", do_sample=True, num_return_sequences=2
    )
    assert len(many.captions) == 2 * B


# Compiled decoding


@pytest.fixture
def compiled_by(monkeypatch):
    """Replace the backend of torch.compile; "eager" traces the same graphs and runs them without a compiler."""

    def use(backend):
        torch.compiler.reset()
        calls, compile_ = [], torch.compile

        def compiled(function, **kwargs):
            calls.append(kwargs)
            return compile_(function, **{**kwargs, "backend": backend, "mode": None})

        monkeypatch.setattr(torch, "compile", compiled)
        return calls

    yield use
    torch.compiler.reset()


def sampled(captioner, images, **settings):
    torch.manual_seed(5)
    settings = {"do_sample": True, "num_return_sequences": G, "max_new_tokens": T, **settings}
    return captioner.generate(**images, **settings, **many_ends(captioner)).ids.tolist()


def test_compiled_decoding_gives_the_same_captions(compiled_by):
    captioner, images = captioner_and_images("clipcap")
    calls = compiled_by("eager")
    expected = sampled(captioner, images)
    assert calls == []
    assert sampled(captioner, images, compile_decoding=True) == expected
    assert sampled(captioner, images, compile_decoding=True) == expected
    (settings,) = calls  # compiled once
    assert settings["dynamic"] is True
    assert settings["backend"] == "inductor"
    greedy = captioner.generate(**images, max_new_tokens=T).ids
    assert captioner.generate(**images, max_new_tokens=T, compile_decoding=True).ids.tolist() == greedy.tolist()


@pytest.mark.slow  # runs a C++ compiler for minutes
@pytest.mark.timeout(1800)
def test_inductor_gives_the_same_captions():
    # In its own process: after the compiler's threads, autograd refuses to run in processes that are forked.
    process = multiprocessing.get_context("fork").Process(target=_compare_with_inductor)
    process.start()
    process.join()
    assert process.exitcode == 0


def _compare_with_inductor():
    captioner, images = captioner_and_images("clipcap")
    if shutil.which("g++") is None:
        with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
            sampled(captioner, images, compile_decoding=True)
        return
    expected = sampled(captioner, images)
    assert sampled(captioner, images, compile_decoding=True) == expected


def test_the_missing_compiler_is_named(monkeypatch):
    captioner, images = captioner_and_images("blip")
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = r"torch\.compile needs a C\+\+ compiler \(no-such-compiler\).*leave compile_decoding out"
    with pytest.raises(ValueError, match=message):
        captioner.generate(**images, compile_decoding=True)
    monkeypatch.setattr(compiled_decoding, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Triton, which is not installed"):
        compiled_decoding.check_compiler(torch.device("cuda"))


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_compiled_decoding_refuses_what_the_loop_does_not_decode(settings, monkeypatch):
    captioner, images = captioner_and_images("vit-gpt2")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.raises(ValueError, match="compile_decoding is True, but these settings need the decoding loop"):
        captioner.generate(**images, max_new_tokens=3, compile_decoding=True, **settings)


def test_the_command_passes_the_settings_of_decoding(tmp_path, monkeypatch, capsys):
    seen, decode = [], DecodingLoop.__call__

    def spy(self, model, *args, **kwargs):
        seen.append(self.compiled)
        assert model.config._attn_implementation == "eager"
        return decode(DecodingLoop(self.num_sampled, self.greedy, self.folded), model, *args, **kwargs)

    monkeypatch.setattr(DecodingLoop, "__call__", spy)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    line = ["caption", "scenes:blip-mle", "--max_images", "2", "--max_new_tokens", "4", "--output"]
    more = ["--num_beams", "1", "--compile_decoding", "--attn_implementation", "eager"]
    assert main([*line, str(tmp_path / "a.jsonl"), *more]) == 0
    assert seen == [True]
    settings = json.loads((tmp_path / "a.run.json").read_text())["settings"]
    assert settings["compile_decoding"] is True
    assert settings["attn_implementation"] == "eager"
    assert "load_in_4bit" not in settings
    assert main([*line, str(tmp_path / "b.jsonl"), "--compile_decoding"]) == 2
    assert "--num_beams is 3. Use --num_beams 1" in capsys.readouterr().err
    assert main([*line, str(tmp_path / "c.jsonl"), "--cache_implementation", "static"]) == 2
    assert "cannot decode with a static cache" in capsys.readouterr().err


def test_recipes_pass_the_settings_of_decoding(monkeypatch):
    given = {"compile_decoding": True}
    *_, config = self_retrieval_blip.parse_args(["--use_cpu", "--generation_kwargs", json.dumps(given)])
    assert config.generation_kwargs == given
    trainer = build_world(TINY, 0).trainer
    trainer.args.generation_kwargs |= config.generation_kwargs
    seen = []

    def spy(self, *args, **kwargs):
        seen.append(self.compiled)
        raise UndecodableError

    monkeypatch.setattr(DecodingLoop, "__call__", spy)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    with pytest.raises(ValueError, match="compile_decoding is True, but these settings"):
        trainer.rollouts.roll_out([batch])
    assert seen == [True]
