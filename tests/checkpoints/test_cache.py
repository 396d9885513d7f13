"""Loads the default scorer from a cache in the Hub's layout, without a connection."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from hf_captionrl.cli.main import main
from hf_captionrl.evaluation.options import optional_scorer
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path

NAME = "openai/clip-vit-base-patch32"
MAIN, PULL = "1" * 40, "2" * 40
SOURCE = Path(model_path("scenes:siglip-held-out"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty repository in a cache, without a connection."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--openai--clip-vit-base-patch32"
    for name in ("refs", "snapshots", "blobs"):
        (folder / name).mkdir(parents=True)
    return folder


def download(cache, revision, commit, *names):
    """Create the files of a download: blobs named by their hash, links to them in the snapshot, the commit of the revision."""
    path = cache / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit)
    for name in names:
        data = (SOURCE / name).read_bytes()
        blob = cache / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = cache / "snapshots" / commit / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path("../../blobs") / blob.name)


SMALL = tuple(path.name for path in SOURCE.iterdir() if path.suffix in (".json", ".txt"))
WEIGHTS = "model.safetensors"


def pickle_in(cache, commit):
    torch.save(load_file(SOURCE / WEIGHTS), cache / "snapshots" / commit / "pytorch_model.bin")


@pytest.mark.parametrize(
    "layout", ["weights in the pull request", "all in the pull request", "all in both", "on main"]
)
def test_default_scorer_from_a_cache(layout, cache):
    if layout == "weights in the pull request":  # as after loading with transformers
        download(cache, "main", MAIN, *SMALL)
        pickle_in(cache, MAIN)
        download(cache, "refs/pr/15", PULL, WEIGHTS)
    elif layout == "all in the pull request":  # `hf download NAME --revision refs/pr/15`
        download(cache, "refs/pr/15", PULL, *SMALL, WEIGHTS)
    elif layout == "all in both":
        download(cache, "main", MAIN, *SMALL)
        download(cache, "refs/pr/15", PULL, *SMALL, WEIGHTS)
        download(cache, "refs/pr/9", "3" * 40, *SMALL)  # another pull request, without weights
    else:
        download(cache, "main", MAIN, *SMALL, WEIGHTS)
    expected = load_scorer(SOURCE).text_features(["a red pig"])
    scorer = optional_scorer(NAME)
    assert torch.equal(scorer.text_features(["a red pig"]), expected)
    assert scorer.revision == (MAIN if layout == "on main" else PULL)[:12]


@pytest.mark.parametrize("layout", ["pickle", "configuration", "nothing"])
def test_cache_without_safetensors_raises_with_a_remedy(layout, cache):
    if layout != "nothing":
        download(cache, "main", MAIN, *SMALL)
    if layout == "pickle":
        pickle_in(cache, MAIN)
    with pytest.raises(FileNotFoundError) as caught:
        load_scorer(NAME)
    said = str(caught.value)
    if layout == "nothing":
        assert "Offline, only folders and downloaded models" in said
        return
    assert said.startswith(f"'{NAME}' has no weights in safetensors")
    assert ("it has pytorch_model.bin" in said) == (layout == "pickle")
    assert f"Use `captionrl convert {NAME} OUT` and load OUT." in said
    assert "use_safetensors" not in said


def test_command_in_the_error_message_works(cache, tmp_path, capsys):
    """Run with the name in the message and the same cache."""
    download(cache, "main", MAIN, *SMALL)
    pickle_in(cache, MAIN)
    assert main(["convert", NAME, str(tmp_path / "out")]) == 0
    assert "read   pytorch_model.bin" in capsys.readouterr().out
    expected = load_scorer(SOURCE).text_features(["a red pig"])
    assert torch.equal(load_scorer(tmp_path / "out").text_features(["a red pig"]), expected)


def test_folder_with_the_files_of_both_revisions(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "clip")
    torch.save({"a": torch.ones(1)}, tmp_path / "clip" / "pytorch_model.bin")
    expected = load_scorer(SOURCE).text_features(["a red pig"])
    assert torch.equal(load_scorer(tmp_path / "clip").text_features(["a red pig"]), expected)
