"""Small models in the layouts of published checkpoints: original configuration, tokenizer, processor; random weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from hf_captionrl.apps.convert.convert import convert
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model as language_model_of_metrics
from hf_captionrl.metrics.perplexity import caption_perplexity
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import load_language_model
from tests.tiny import tiny_images
from tests.trainers import one_step, rl_step

PLACE = Path(os.environ.get("CAPTIONRL_PUBLISHED_CHECKPOINTS") or "not given")
"""Folders named `OWNER__NAME`; they are not part of this repository."""

_NOT_OF_THE_CHECKPOINT = ("README*", "weights.txt", "*.index.json")

_TEXT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
_ROPE = {"mrope_section": [2, 3, 3]}

SIZES: dict[str, dict[str, Any]] = {
    "blip": {"text_config": {**_TEXT, "encoder_hidden_size": 32}, "vision_config": _TEXT},
    "blip-2": {
        "text_config": _T5,
        "vision_config": _TEXT,
        "qformer_config": {**_TEXT, "encoder_hidden_size": 32},
    },
    "idefics3": {"text_config": _GROUPED, "vision_config": _TEXT},
    "qwen2_vl": {
        **{k: v for k, v in _GROUPED.items() if k != "head_dim"},
        "rope_scaling": _ROPE,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **{k: v for k, v in _GROUPED.items() if k != "head_dim"},
        "rope_scaling": _ROPE,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": {**_GROUPED, "rope_scaling": _ROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    },
    "siglip": {"text_config": _TEXT, "vision_config": _TEXT},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},
}
"""Sizes by model type; vocabularies, images and patches stay as published."""


def _merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply nested changes; other values, and missing ones, are kept."""
    found = dict(content)
    for name, value in changes.items():
        found[name] = _merged(found.get(name) or {}, value) if isinstance(value, dict) else value
    return found


def shrunken(name: str, folder: Path, *, dtype: torch.dtype, formats: str, drop: tuple[str, ...] = ()) -> Path:
    """Copy a published layout with a tiny random model in it.

    Args:
        name: Folder below `PLACE`.
        folder: Where to.
        dtype: Of the weights.
        formats: `"safetensors"`, `"bin"`, or `"sharded ..."` in two files.
        drop: Keys of the configuration to leave out.
    """
    shutil.copytree(PLACE / name, folder, ignore=shutil.ignore_patterns(*_NOT_OF_THE_CHECKPOINT))
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content = _merged({k: v for k, v in content.items() if k not in drop}, SIZES[content["model_type"]])
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    config.quantization_config = None
    loader = getattr(transformers, (config.architectures or ["SiglipModel"])[0])
    model = loader(config)
    if hasattr(model, "query_tokens"):  # zero initially, where the gradient of the layer norm after them overflows
        torch.nn.init.normal_(model.query_tokens, std=0.02)
    model = model.to(dtype)
    scratch = folder / "scratch"
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(scratch, max_shard_size=size * 2 // 3 if formats.startswith("sharded") else size * 2)
    for path in sorted(scratch.glob("model*")):
        _place(path, folder, formats)
    shutil.rmtree(scratch)
    return folder


def _place(path: Path, folder: Path, formats: str) -> None:
    if not formats.endswith("bin"):
        shutil.copyfile(path, folder / path.name)
        return
    target = folder / path.name.replace("model", "pytorch_model", 1).replace("safetensors", "bin")
    if path.suffix == ".safetensors":
        torch.save(load_file(path), target)
    else:
        text = path.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        target.write_text(text)


pytestmark = [
    pytest.mark.slow,  # test_layouts.py has each of their peculiarities in a fixture
    pytest.mark.skipif(not PLACE.is_dir(), reason="no published configurations on this machine"),
]

IMAGES = tiny_images(2, size=24)
CAPTIONERS = {
    "Salesforce__blip-image-captioning-base": (torch.float32, "bin"),
    "Salesforce__blip-image-captioning-large--resaved-tf5.5.4": (torch.float32, "safetensors"),
    "Salesforce__blip2-flan-t5-xl": (torch.float32, "sharded safetensors"),
    "Salesforce__blip2-flan-t5-xl--pre4.47": (torch.float32, "sharded bin"),
    "HuggingFaceTB__SmolVLM-256M-Instruct": (torch.bfloat16, "safetensors"),
    "Qwen__Qwen2-VL-2B-Instruct-AWQ": (torch.float16, "safetensors"),
    "Qwen__Qwen2.5-VL-7B-Instruct": (torch.bfloat16, "sharded safetensors"),
    "Qwen__Qwen3-VL-4B-Instruct": (torch.bfloat16, "safetensors"),
    "Qwen__Qwen3-VL-8B-Instruct": (torch.bfloat16, "sharded safetensors"),
}
SLOW = ("SmolVLM-256M", "Qwen3-VL-4B", "blip2-flan-t5-xl--pre")
"""Long sequences, and layouts that are equivalent to another one."""

INCOMPLETE = {
    "HuggingFaceTB__SmolVLM2-256M-Video-Instruct--partial": (FileNotFoundError, "no tokenizer or no image processor"),
    "microsoft__Florence-2-base": (ValueError, r"needs custom code \(auto_map\).*florence-community"),
    "florence-community__Florence-2-large": (ValueError, r"cannot be loaded from processor_config\.json"),
    "google__pix2struct-textcaps-base": (FileNotFoundError, "no tokenizer or no image processor"),
}


def test_every_published_layout_is_tested():
    tested = {*CAPTIONERS, *INCOMPLETE, "openai-community__gpt2", *SCORERS}
    assert {path.name for path in PLACE.iterdir() if path.is_dir()} == tested


def captions(captioner):
    batch = captioner.encode_images(IMAGES)
    settings = {"max_new_tokens": 4, "min_new_tokens": 2, "do_sample": False, "num_beams": 1}
    return captioner.generate(**batch, **settings).captions


def published(name, folder):
    """A layout with weights. Pickles are rejected, and converted as the error recommends."""
    dtype, formats = CAPTIONERS[name]
    drop = ("quantization_config",) if "AWQ" in name else ()
    shrunken(name, folder, dtype=dtype, formats=formats, drop=drop)
    if not formats.endswith("bin"):
        return folder
    with pytest.raises(FileNotFoundError, match=r"it has pytorch_model\S*\.bin.*Use `captionrl convert \S+ OUT`"):
        load_captioner(folder)
    convert(folder, folder.parent / "converted")
    return folder.parent / "converted"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if any(s in n for s in SLOW) else n for n in CAPTIONERS]
)
def test_published_captioner_layouts_load_train_and_save(name, tmp_path):
    folder = published(name, tmp_path / "published")
    captioner = load_captioner(folder)
    assert {p.dtype for p in captioner.model.parameters()} == {CAPTIONERS[name][0]}
    assert len(captions(captioner)) == len(IMAGES)
    del captioner
    rows = load_scenes(num_train=2, num_validation=0, num_test=0)["train"]
    step = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_grad_norm": 1.0}
    captioner = load_captioner(folder, dtype=torch.float32)
    before = parameters(captioner)
    one_step.train(tmp_path / "smile", rows, captioner=captioner, **step)
    after = parameters(captioner)
    assert changed(before, after)
    rl = {**step, "max_completion_length": 4}
    rl_step.train(tmp_path / "rl", rows, captioner=captioner, **rl)
    assert all(torch.isfinite(p).all() for p in captioner.model.parameters())
    captioner.model.eval()
    written = captions(captioner)
    captioner.save_pretrained(tmp_path / "saved")
    again = load_captioner(tmp_path / "saved")
    assert captions(again) == written
    assert {p.dtype for p in again.model.parameters()} == {torch.float32}
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def parameters(captioner):
    return {name: value.detach().clone() for name, value in captioner.model.named_parameters()}


def changed(before, after):
    return any(not torch.equal(value, after[name]) for name, value in before.items())


def test_missing_quantization_library_raises(tmp_path):
    folder = shrunken("Qwen__Qwen2-VL-2B-Instruct-AWQ", tmp_path / "m", dtype=torch.float16, formats="safetensors")
    with pytest.raises(ValueError, match=r"needs a library that is not installed|is quantized with 'awq'"):
        load_captioner(folder)


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_folders_say_what_is_missing(name):
    kind, message = INCOMPLETE[name]
    with pytest.raises(kind, match=message):
        load_captioner(PLACE / name)


SCORERS = {"google__siglip-base-patch16-256": "float32", "google__siglip2-base-patch16-224": "float32"}


@pytest.mark.parametrize("name", SCORERS)
def test_published_scorer_layouts_need_a_tokenizer(name, tmp_path):
    """These layouts have no tokenizer: loading raises; with another tokenizer, features can be computed."""
    from tests.retrieval.tiny_scorers import make_tokenizer

    folder = shrunken(name, tmp_path / "m", dtype=torch.float32, formats="safetensors")
    with pytest.raises(FileNotFoundError, match=r"^The scorer '\S+' has no tokenizer"):
        load_scorer(folder)
    from transformers import AutoImageProcessor, SiglipProcessor

    processor = SiglipProcessor(AutoImageProcessor.from_pretrained(folder), make_tokenizer())
    scorer = load_scorer(folder, processor=processor)
    texts, images = ["a cat", "a red dog"], IMAGES
    for features in (scorer.text_features(texts), scorer.image_features(images)):
        torch.testing.assert_close(features.norm(dim=-1), torch.ones(2))
    scorer.model.save_pretrained(tmp_path / "saved")
    again = load_scorer(tmp_path / "saved", processor=processor)
    assert torch.equal(again.text_features(texts), scorer.text_features(texts))


def test_published_language_model_layouts_load(tmp_path):
    """GPT-2 as the language model of ClipCap and of the fluency metric."""
    folder = shrunken("openai-community__gpt2", tmp_path / "m", dtype=torch.float32, formats="safetensors")
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")  # beside the safetensors, as published
    model, tokenizer = language_model_of_metrics(str(folder))
    found = caption_perplexity(["a red cat", "two dogs"], model, tokenizer)
    assert all(value > 1 for value in found.values() if isinstance(value, float))
    clipcap, processor = assemble("scenes:clip-reward", folder, prefix_length=2)
    captioner = load_captioner(clipcap, processor=processor)
    written = captions(captioner)
    captioner.save_pretrained(tmp_path / "saved")
    assert captions(load_captioner(Path(tmp_path / "saved"))) == written
    assert load_language_model(str(folder)).dtype == torch.float32
