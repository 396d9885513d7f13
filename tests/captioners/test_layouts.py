"""Unusual layouts of published checkpoints: each small one loads like the same model in the current layout, or raises."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from hf_captionrl.apps.convert.convert import convert
from hf_captionrl.captioners import load_captioner
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path
from tests.tiny import tiny_captioner, tiny_images
from tests.tiny.chat import tiny_chat
from tests.tiny.families import tiny_family

IMAGES = tiny_images(2, size=24)


def saved(folder, model, processor):
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def edit(folder, file, **changes):
    """Change a JSON file; None removes a key."""
    path = folder / file
    content = {**json.loads(path.read_text()), **changes} if path.is_file() else changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return content


def captions(captioner):
    batch = captioner.encode_images(IMAGES)
    return captioner.generate(**batch, max_new_tokens=5, do_sample=False, num_beams=1).captions


def in_files_of_their_own(folder):
    """Save the image processor separately from processor_config.json, as transformers 4 did."""
    content = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(content.pop("image_processor")))
    (folder / "processor_config.json").unlink()


def test_image_processor_inside_and_outside_of_the_processor(tmp_path):
    inside = tmp_path / "inside"
    tiny_captioner("blip").save_pretrained(inside)
    assert "image_processor" in json.loads((inside / "processor_config.json").read_text())
    assert not (inside / "preprocessor_config.json").exists()
    outside = shutil.copytree(inside, tmp_path / "outside")
    in_files_of_their_own(outside)
    left, right = load_captioner(inside), load_captioner(outside)
    assert torch.equal(left.encode_images(IMAGES)["pixel_values"], right.encode_images(IMAGES)["pixel_values"])
    assert captions(left) == captions(right)


@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type"])
def test_vit_feature_extractor(key, tmp_path):
    """For `image_processor_type: ViTFeatureExtractor` AutoProcessor silently returns a tokenizer."""
    captioner = tiny_captioner("vit-gpt2")
    captioner.save_pretrained(tmp_path)
    edit(tmp_path, "preprocessor_config.json", image_processor_type=None)
    edit(tmp_path, "preprocessor_config.json", **{key: "ViTFeatureExtractor"})
    if key == "image_processor_type":
        assert not hasattr(AutoProcessor.from_pretrained(tmp_path), "image_processor")
    again = load_captioner(tmp_path)
    expected = captioner.encode_images(IMAGES)["pixel_values"]
    assert torch.equal(again.encode_images(IMAGES)["pixel_values"], expected)
    assert captions(again) == captions(captioner)


def test_florence_2_with_a_custom_code_processor_raises(tmp_path):
    """Like microsoft/Florence-2-base: `RobertaTokenizer has no attribute image_token`."""
    model, processor = tiny_family("florence2")
    saved(tmp_path, model, processor)
    in_files_of_their_own(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name in [name for name in tokenizer if "image_token" in name or name == "extra_special_tokens"]:
        tokenizer.pop(name)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    code = {"AutoProcessor": "processing_florence2.Florence2Processor"}
    edit(tmp_path, "preprocessor_config.json", auto_map=code, processor_class="Florence2Processor")
    with pytest.raises(
        ValueError, match=r"needs custom code \(auto_map\), which is never executed here.*florence-community"
    ):
        load_captioner(tmp_path)


@pytest.mark.parametrize("kept", ["text_config", "top", "nowhere"])
def test_dtype_in_the_text_configuration_alone(kept, tmp_path):
    """Like Qwen3-VL: `config.dtype` is None, and the weights are bf16."""
    model, processor = tiny_chat("qwen3_vl")
    saved(tmp_path, model.to(torch.bfloat16), processor)
    config = edit(tmp_path, "config.json", dtype="bfloat16" if kept == "top" else None)
    dtype = "bfloat16" if kept == "text_config" else None
    parts = {part: {**config[part], "dtype": dtype} for part in ("text_config", "vision_config")}
    edit(tmp_path, "config.json", **parts)
    captioner = load_captioner(tmp_path)
    assert {p.dtype for p in captioner.model.parameters()} == {torch.bfloat16}
    assert len(captions(captioner)) == 2
    found = load_captioner(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}


def test_no_architectures(tmp_path):
    captioner = tiny_captioner("blip")
    captioner.save_pretrained(tmp_path / "blip")
    edit(tmp_path / "blip", "config.json", architectures=None)
    assert captions(load_captioner(tmp_path / "blip")) == captions(captioner)
    clip = shutil.copytree(model_path("scenes:clip-reward"), tmp_path / "clip")
    expected = load_scorer(clip).text_features(["a pig"])
    edit(clip, "config.json", architectures=None)
    assert torch.equal(load_scorer(clip).text_features(["a pig"]), expected)


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
    assert captions(load_captioner(tmp_path / "new")) == captions(captioner)


@pytest.mark.parametrize("language", ["t5", "opt"])
def test_blip_2_without_an_image_token(language, tmp_path):
    """A checkpoint saved before transformers 4.47 gives the same captions as a current one."""
    model, processor = tiny_family(f"blip2-{language}")
    expected = captions(load_captioner(model, processor=processor, prompt=""))
    old = tmp_path / "old"
    saved(old, model, processor)
    in_files_of_their_own(old)
    edit(old, "config.json", image_token_index=None, image_token_id=None)
    # The vocabulary is full, so that the new token needs a new row; its embedding is not used.
    path = old / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<image>"]
    vocabulary = content["model"]["vocab"]
    if "<image>" in vocabulary:
        vocabulary["<unused>"] = vocabulary.pop("<image>")
    path.write_text(json.dumps(content))
    settings = json.loads((old / "tokenizer_config.json").read_text())
    for name in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "image_token"):
        settings.pop(name, None)
    (old / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (old / name).unlink(missing_ok=True)
    captioner = load_captioner(old, prompt="")
    token = captioner.tokenizer.convert_tokens_to_ids("<image>")
    assert captioner.base_model.config.image_token_id == token >= len(captioner.tokenizer) - 1
    assert captions(captioner) == expected
    captioner.save_pretrained(tmp_path / "again")
    assert captions(load_captioner(tmp_path / "again")) == expected


def test_quantization_that_is_not_installed_raises(tmp_path):
    model, processor = tiny_chat("qwen2_vl")
    saved(tmp_path, model, processor)
    awq = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
    edit(tmp_path, "config.json", quantization_config=awq)
    with pytest.raises(ValueError, match=r"needs a library that is not installed|is quantized with 'awq'"):
        load_captioner(tmp_path)


def test_missing_image_processor_raises(tmp_path):
    """Like florence-community's Florence-2 without preprocessor_config.json."""
    model, processor = tiny_family("florence2")
    saved(tmp_path, model, processor)
    in_files_of_their_own(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer or no image processor"):
        load_captioner(tmp_path)
    edit(tmp_path, "processor_config.json", processor_class="Florence2Processor")
    with pytest.raises(ValueError, match=r"cannot be loaded from processor_config\.json, tokenizer_config\.json"):
        load_captioner(tmp_path)


def test_scorer_without_a_tokenizer_raises(tmp_path):
    clip = shutil.copytree(model_path("scenes:clip-reward"), tmp_path / "clip")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"):
        (clip / name).unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=r"^The scorer '\S+' has no tokenizer.*processor\.save_pretrained"):
        load_scorer(clip)


def test_half_precision_weights_keep_their_dtype(tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    state = {name: value.half() for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, "config.json", dtype=None, torch_dtype="float16")
    assert {p.dtype for p in load_captioner(tmp_path).model.parameters()} == {torch.float16}
