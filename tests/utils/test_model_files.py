"""Checkpoint files: damaged and malicious files give one line with the file name."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli.main import main
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import read_config
from tests.tiny import tiny_captioner


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a small captioner; image processor and tokenizer are in separate files, as on the Hub."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_captioner("blip").save_pretrained(folder)
    processor = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(processor["image_processor"]))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def edit(path, changes):
    """Change values of a JSON file; of an object those that are named."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) and name in content else value
    path.write_text(json.dumps(content))


def refused(folder, capsys, **kwargs):
    """The error message of `load_captioner`; that of `captionrl caption` is the same."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_captioner(folder, **kwargs)
    said = str(caught.value)
    capsys.readouterr()
    assert main(["caption", str(folder), "--max_images", "1", "--output", str(folder.parent / "c.jsonl")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"captionrl caption: error: {' '.join(said.split())}"
    return said


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"vision_config": []}),
        ("config.json", {"text_config": {"hidden_size": "wide"}}),
        ("processor_config.json", {"image_processor": 3}),
    ],
    ids=str,
)
def test_values_of_a_wrong_type(file, change, copy, capsys):
    edit(copy / file, change)
    assert file in refused(copy, capsys)
    (copy / file).write_text("[1]")
    assert file in refused(copy, capsys)


@pytest.mark.parametrize("kept", [slice(0), slice(-1)], ids=["empty", "truncated"])
def test_damaged_weights(kept, copy, capsys):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[kept])
    assert "cannot be loaded as " in refused(copy, capsys)


@pytest.mark.parametrize(
    "arguments",
    [{"use_safetensors": False}, {"output_loading_info": True}, {"nonsense": 1}]
    + [{name: "sub"} for name in ("variant", "subfolder", "gguf_file", "weights_only")],
    ids=str,
)
def test_arguments_that_select_other_files_or_folders_raise(arguments, copy):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}"):
        load_captioner(copy, **arguments)


def test_weights_that_do_not_match_the_configuration_raise(copy, capsys):
    edit(copy / "config.json", {"text_config": {"intermediate_size": 48}})
    assert "cannot be loaded as " in refused(copy, capsys)


def sharded(folder, change=None):
    """Two shards and an index with one changed entry."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for number, file in enumerate(files):
        save_file({n: state[n] for n in names[number::2]}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[number::2], file)
    torch.save({names[0]: state[names[0]]}, folder / "weights.bin")
    save_file({names[0]: state[names[0]]}, folder.parent / "outside.safetensors", {"format": "pt"})
    if change is not None:
        weight_map[names[0]] = change
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


HOSTILE = ["weights.bin", "../outside.safetensors", "..\\outside.safetensors", 3]


@pytest.mark.parametrize("entry", HOSTILE, ids=str)
def test_index_entries_must_be_plain_names_of_safetensors(entry, copy):
    sharded(copy, entry)
    with pytest.raises(ValueError, match=r"index\.json maps.*plain name of a \*\.safetensors file"):
        load_captioner(copy)


def test_shards_load_unless_one_is_truncated_or_missing(copy, saved):
    sharded(copy)
    expected = load_captioner(saved).model.state_dict()
    for name, value in load_captioner(copy).model.state_dict().items():
        assert torch.equal(value, expected[name])
    shard = copy / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cannot be loaded as "):
        load_captioner(copy)
    shard.unlink()
    with pytest.raises(OSError, match=r"model-00002-of-00002\.safetensors"):
        load_captioner(copy)
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json has no weight_map"):
        load_captioner(copy)


def test_configuration_cannot_select_a_pickle(copy):
    """`transformers_weights` in a configuration selects the file to load."""
    state = load_file(copy / "model.safetensors")
    torch.save({name: value * 0 for name, value in state.items()}, copy / "adapter_model.bin")
    edit(copy / "config.json", {"transformers_weights": "adapter_model.bin"})
    name, value = next(iter(state.items()))
    assert torch.equal(load_captioner(copy).model.state_dict()[name], value)


@pytest.mark.parametrize(
    "setting",
    [
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "flash_attention_2"},
        {"text_config": {"attn_implementation": "someone/kernel@main:attend"}},
        {"experts_implementation": "someone/kernel"},
    ],
    ids=str,
)
def test_configuration_cannot_download_a_kernel(setting, copy, monkeypatch):
    from transformers.integrations import hub_kernels

    edit(copy / "config.json", setting)
    asked = []
    functions = ("load_and_register_attn_kernel", "get_kernel", "lazy_import_flash_attention", "lazy_load_kernel")
    for module in (hub_kernels, transformers.modeling_utils, transformers.modeling_flash_attention_utils):
        for function in functions:
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda *args, _f=function, **kwargs: asked.append((_f, args)))
    loaded = load_captioner(copy).model
    assert asked == []
    used = {module.config._attn_implementation for module in loaded.modules() if hasattr(module, "config")}
    assert used <= {"sdpa", "eager"}
    # Passing it as an argument still works.
    assert load_captioner(copy, attn_implementation="eager").model.config._attn_implementation == "eager"
    plain = read_config(str(copy))
    assert plain._attn_implementation is None
    assert plain.text_config._attn_implementation is None


def test_captioner_cannot_be_loaded_as_scorer(saved):
    with pytest.raises(ValueError, match=r"lacks weights of BlipModel \(\d+\), such as \S+, which would be random"):
        load_scorer(saved)
    with pytest.raises(ValueError, match="cannot be loaded as AutoModel"):
        load_scorer("scenes:clipcap-mle")


def test_shipped_names_load_without_resolving_them():
    assert load_captioner("scenes:blip-mle").family == "blip"
    assert load_scorer("scenes:siglip-held-out").model_id == "siglip-held-out"
    for load in (load_captioner, load_scorer):
        with pytest.raises(ValueError, match="There is no shipped model 'scenes:nothing'"):
            load("scenes:nothing")


def test_captioner_with_missing_weights_raises(copy, capsys):
    weights = load_file(copy / "model.safetensors")
    lost = [weight for weight in weights if "crossattention" in weight]
    assert lost
    save_file({k: v for k, v in weights.items() if k not in lost}, copy / "model.safetensors", {"format": "pt"})
    assert f"({len(lost)}), such as" in refused(copy, capsys)
