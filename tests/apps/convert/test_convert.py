"""`captionrl convert`: pickles of transformers, PEFT and open_clip become safetensors, and load."""

import hashlib
import json
import zipfile

import open_clip
import pytest
import torch
from safetensors.torch import load_file

from hf_captionrl.apps.convert.convert import convert
from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli.main import main
from hf_captionrl.retrieval import load_scorer
from tests.tiny import tiny_captioner, tiny_images


def captions(captioner):
    batch = captioner.encode_images(tiny_images(3, size=24))
    return captioner.generate(**batch, max_new_tokens=6, do_sample=False).captions


def pickled(folder, captioner, shards=1):
    """The folder of a captioner whose weights are pickles; returns its tensors."""
    captioner.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return state
    names, weight_map = sorted(state), {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = names[number::shards]
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return state


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_command_prints_sizes_and_hashes_and_the_result_loads(tmp_path, capsys):
    captioner = tiny_captioner("blip", prompt="a ")
    state = pickled(tmp_path / "old", captioner)
    (tmp_path / "old" / "modeling.py").write_text("raise SystemExit")
    torch.save({"lr": 1.0}, tmp_path / "old" / "training_args.bin")
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    source, target = tmp_path / "old" / "pytorch_model.bin", tmp_path / "new" / "model.safetensors"
    for key, path in (("read", source), ("written", target)):
        assert report[key] == [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}]
    assert {"config.json", "captioner.json", "tokenizer.json"} <= set(report["copied"])
    assert not {"modeling.py", "training_args.bin"} & {path.name for path in (tmp_path / "new").iterdir()}
    found = load_file(target)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    again = load_captioner(tmp_path / "new")
    assert captions(again) == captions(captioner)
    assert again.prompt == "a "
    # As text; an existing folder is not written again.
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "text")]) == 0
    said = capsys.readouterr().out
    assert f"read   pytorch_model.bin  {source.stat().st_size:,} bytes  sha256 {sha256(source)}" in said
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert f"'{tmp_path / 'new'}' exists" in capsys.readouterr().err


def test_shards_become_one_file(tmp_path):
    captioner = tiny_captioner("blip")
    state = pickled(tmp_path / "old", captioner, shards=3)
    report = convert(tmp_path / "old", tmp_path / "new")
    assert [f["name"] for f in report.written] == ["model.safetensors"]
    assert len(report.read) == 3
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], value) for name, value in state.items())
    assert captions(load_captioner(tmp_path / "new")) == captions(captioner)


@pytest.mark.parametrize("entry", ["../pytorch_model.bin", "weights.safetensors", 3])
def test_shards_in_other_folders_raise(entry, tmp_path):
    pickled(tmp_path / "old", tiny_captioner("blip"), shards=2)
    path = tmp_path / "old" / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][min(index["weight_map"])] = entry
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"plain name of a \*\.bin file"):
        convert(tmp_path / "old", tmp_path / "new")
    index["weight_map"][min(index["weight_map"])] = "lost.bin"
    path.write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"lost\.bin"):
        convert(tmp_path / "old", tmp_path / "new")


def test_adapter_is_converted(tmp_path):
    base = tiny_captioner("blip")
    base.save_pretrained(tmp_path / "base")
    captioner = load_captioner(tmp_path / "base")
    captioner.add_lora("both", r=2)
    with torch.no_grad():
        for name, parameter in captioner.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    captioner.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(file), tmp_path / "adapter" / "adapter_model.bin")
    file.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no adapter_model\.safetensors.*Use `captionrl convert \S+adapter OUT`"
    ):
        load_captioner(tmp_path / "adapter")
    assert convert(tmp_path / "adapter", tmp_path / "new").kind == "adapter"
    found = captions(load_captioner(tmp_path / "new"))
    assert found == captions(captioner)
    assert found != captions(base)


def test_open_clip_folder_and_single_file(tmp_path):
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1},
    }
    (tmp_path / "old").mkdir()
    settings = {"mean": [0.5] * 3, "std": [0.5] * 3}
    content = {"model_cfg": config, "preprocess_cfg": settings}
    (tmp_path / "old" / "open_clip_config.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    model = open_clip.CLIP(**config)
    torch.save(model.state_dict(), tmp_path / "old" / "open_clip_pytorch_model.bin")
    with pytest.raises(ValueError, match=r"Use `captionrl convert \S+old OUT` and load OUT"):
        load_scorer(tmp_path / "old")
    assert convert(tmp_path / "old", tmp_path / "new").kind == "open_clip model"
    texts = ["a cat", "a dog"]
    expected = load_scorer(model.eval()).text_features(texts)
    torch.testing.assert_close(load_scorer(tmp_path / "new").text_features(texts), expected)
    convert(tmp_path / "old" / "open_clip_pytorch_model.bin", tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_tied_weights_are_all_written(tmp_path):
    shared = torch.randn(4, 3)
    torch.save({"a": shared, "b": shared, "c": shared.T, "d": shared[:2]}, tmp_path / "w.bin")
    convert(tmp_path / "w.bin", tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    for name, value in {"a": shared, "b": shared, "c": shared.T, "d": shared[:2]}.items():
        assert torch.equal(found[name], value)


STATE = {"a": torch.arange(35.0).view(5, 7), "b": torch.ones(9, dtype=torch.float16), "ids": torch.arange(9)}


def test_flipped_bits_never_change_weights_silently(tmp_path):
    """One bit of each 23rd byte; bits that hold no weights may be accepted."""
    torch.save(STATE, tmp_path / "w.bin")
    intact, refused = (tmp_path / "w.bin").read_bytes(), 0
    places = range(0, len(intact), 23)
    for place in places:
        damaged = bytearray(intact)
        damaged[place] ^= 1 << place % 8
        (tmp_path / "w.bin").write_bytes(damaged)
        (tmp_path / "w.safetensors").unlink(missing_ok=True)
        try:
            convert(tmp_path / "w.bin", tmp_path / "w.safetensors")
        except ValueError:
            refused += 1
            continue
        found = load_file(tmp_path / "w.safetensors")
        assert found.keys() == STATE.keys()
        assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    assert len(places) / 2 < refused < len(places)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.tensor([1.0, float("nan")]), "infinite numbers in a"),
        (torch.tensor([float("nan")]).to(torch.float8_e4m3fn), "infinite numbers in a"),
        (torch.zeros(1).expand(10**10), "40,000,000,000"),
        (torch.empty(3, device="meta"), "no state dict"),
    ],
    ids=["NaN", "fp8", "expanded", "meta"],
)
def test_unusable_tensors_raise(value, said, tmp_path, capsys):
    torch.save({"a": value}, tmp_path / "w.bin")
    assert main(["convert", str(tmp_path / "w.bin"), str(tmp_path / "w.safetensors")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["w.bin"]


def test_compressed_archives_raise(tmp_path):
    """A megabyte of such a file may decode to a gigabyte."""
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "w.bin")
    old, new = zipfile.ZipFile(tmp_path / "w.bin"), zipfile.ZipFile(tmp_path / "v.bin", "w", zipfile.ZIP_DEFLATED)
    with old, new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ValueError, match=r"v\.bin is not .*compressed"):
        convert(tmp_path / "v.bin", tmp_path / "v.safetensors")


def test_links_out_of_the_folder_are_not_copied(tmp_path):
    pickled(tmp_path / "old", tiny_captioner("blip"))
    (tmp_path / "private").write_text("secret")
    (tmp_path / "old" / "README.md").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=r"README\.md .* is a link"):
        convert(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()
