"""Checkpoints that would fill the memory, never end, or divide by zero: one-line errors before they are used."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_captionrl.captioners import load_captioner
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import check_text_files, model_path
from tests.tiny import tiny_captioner


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "blip"
    tiny_captioner("blip").save_pretrained(folder)
    return folder


def changed(source, folder, file, change):
    """A copy of a checkpoint with another content of one JSON file."""
    shutil.copytree(source, folder)
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


def replaced(*contents):
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": content} for content in contents]
    return {"type": "Sequence", "normalizers": steps}


def test_normalizers_that_explode_raise(saved, tmp_path):
    """Twelve steps of ten characters make a terabyte of one letter."""
    bomb = lambda content: content.update(normalizer=replaced(*["a" * 10] * 12))  # noqa: E731
    with pytest.raises(ValueError, match=r"tokenizer\.json.*1e\+12"):
        load_captioner(changed(saved, tmp_path / "captioner", "tokenizer.json", bomb))
    source = model_path("scenes:clip-reward")
    with pytest.raises(ValueError, match=r"tokenizer\.json.*1e\+12"):
        load_scorer(str(changed(source, tmp_path / "scorer", "tokenizer.json", bomb)))
    nested = {}
    for _ in range(400):
        nested = {"type": "Sequence", "normalizers": [nested]}
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        check_text_files(
            str(changed(saved, tmp_path / "deep", "tokenizer.json", lambda c: c.update(normalizer=nested)))
        )
    folder = changed(saved, tmp_path / "usual", "tokenizer.json", lambda c: c.update(normalizer=replaced("b", "cc")))
    assert load_captioner(folder).tokenizer("a").input_ids


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("preprocessor_config.json", {"patch_size": 0}, "patch_size"),
        ("preprocessor_config.json", {"size": {"height": -1, "width": 8}}, "height"),
        ("processor_config.json", {"image_processor": {"merge_size": 0}}, "merge_size"),
        ("processor_config.json", {"image_processor": {"size": {"height": 8, "width": 10**6}}}, "width"),
        ("config.json", {"image_size": [8, 0]}, "image_size"),
        ("config.json", {"parts": [{"hidden_size": 10**12}]}, "hidden_size"),
        ("config.json", {"num_attention_heads": 0}, "num_attention_heads"),
        ("config.json", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_impossible_sizes_are_found_in_every_file(file, content, key, saved, tmp_path):
    folder = changed(saved, tmp_path / "model", file, lambda c: c.update(content))
    with pytest.raises(ValueError, match=f"{key} in .*{file}") as error:
        load_captioner(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("which", "shape"), [("one", (0, 4)), ("all", (0,)), ("one", ())])
def test_tensors_without_numbers_raise_in_one_line(which, shape, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    names = [max(state, key=lambda name: state[name].numel())] if which == "one" else list(state)
    save_file(
        {**state, **{name: torch.zeros(shape) for name in names}}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match="model") as error:
        load_captioner(folder)
    assert "\n" not in str(error.value)
