"""`captionrl assemble`: the parts of the captioner are those of the checkpoints, and what cannot be assembled is said at once."""

import json

import pytest
import torch
from transformers import AutoModel

from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli.main import main
from hf_captionrl.utils.model_files import load_language_model, model_path
from tests.tiny import tiny_images, tiny_tower

LANGUAGE = "scenes:gpt2-perplexity"


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return tiny_tower(tmp_path_factory.mktemp("tower"))


def test_assembles_the_parts(tower, tmp_path, capsys):
    out = tmp_path / "clipcap"
    assert main(["assemble", str(tower), LANGUAGE, str(out), "--prefix_length", "3", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["parameters"]
    captioner = load_captioner(str(out))
    assert sum(sizes.values()) == sum(p.numel() for p in captioner.base_model.parameters())
    parts = captioner.base_model.state_dict()
    for prefix, expected in (
        ("vision_tower.encoder.", AutoModel.from_pretrained(tower).state_dict()),
        ("language_model.", load_language_model(model_path(LANGUAGE)).state_dict()),
    ):
        for name, value in expected.items():
            assert torch.equal(parts[prefix + name].float(), value.float()), name
    assert captioner.base_model.config.prefix_length == 3
    assert captioner.generate(**captioner.encode_images(tiny_images(2)), max_new_tokens=3).captions
    again = tmp_path / "again"
    assert main(["assemble", str(tower), LANGUAGE, str(again), "--prefix_length", "3"]) == 0
    other = tmp_path / "other"
    assert main(["assemble", str(tower), LANGUAGE, str(other), "--prefix_length", "3", "--seed", "1"]) == 0
    files = [(folder / "model.safetensors").read_bytes() for folder in (out, again, other)]
    assert files[0] == files[1]
    assert files[0] != files[2]  # the mapper


def folder_with(tmp_path, name, content):
    folder = tmp_path / "language"
    folder.mkdir()
    (folder / name).write_bytes(content)
    return str(folder)


def test_bad_parts_are_one_line(tower, tmp_path, capsys):
    out = tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    broken = folder_with(tmp_path, "model.gguf", b"GGUF, but nothing more")
    for vision, language, output, named in (
        (str(tower), LANGUAGE, str(full), "not empty"),
        (str(tower), broken, str(out), "gguf"),
        (str(tmp_path / "missing"), LANGUAGE, str(out), "missing"),
    ):
        assert main(["assemble", vision, language, output]) == 2, named
        error = capsys.readouterr().err.splitlines()[-1]  # the progress bars of transformers precede it
        assert error.startswith("captionrl assemble: error:")
        assert named in error
    assert not out.exists()
    (tmp_path / "language" / "second.gguf").touch()
    assert main(["assemble", str(tower), broken, str(out)]) == 2
    assert "second.gguf" in capsys.readouterr().err
