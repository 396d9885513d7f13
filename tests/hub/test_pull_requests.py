"""Repositories with pickles on the main revision and a pull request of the Hub's bot with the weights in safetensors."""

import io
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path

NAME = "openai/clip-vit-base-patch32"
BOT = {"author": "SFconvertbot", "title": "Adding `safetensors` variant of this model"}
TEXTS = ["a red pig", "two small trees"]


def pickles(shipped):
    """Files of a shipped model with its weights as a pickle, and the safetensors."""
    folder = Path(model_path(f"scenes:{shipped}"))
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    safe = files.pop("model.safetensors")
    data = io.BytesIO()
    torch.save(load_file(folder / "model.safetensors"), data)
    return {**files, "pytorch_model.bin": data.getvalue()}, {"model.safetensors": safe}


@pytest.fixture
def repository(hub):
    """The repository of the default scorer before the pull request."""
    files, proposed = pickles("siglip-held-out")
    return hub.add(NAME, files), proposed


def features(scorer):
    return scorer.text_features(TEXTS)


def test_scorer_online_and_then_offline(hub, repository, monkeypatch, caplog):
    repo, proposed = repository
    repo.propose(14, {}, author="someone", title="Update README")
    repo.propose(15, proposed, **BOT)
    expected = features(load_scorer("scenes:siglip-held-out"))
    scorer = load_scorer(NAME)
    assert torch.equal(features(scorer), expected)
    assert scorer.revision == repo.branches["refs/pr/15"][:12]
    assert "Using those of refs/pr/15" in caplog.text
    assert not any("/resolve/" in path and path.endswith("pytorch_model.bin") for _, path, _ in hub.requests)
    # No connection, but not in offline mode.
    hub.fail("discussions", "cut")
    assert torch.equal(features(load_scorer(NAME)), expected)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.fail(".*", 500)
    before = len(hub.requests)
    again = load_scorer(NAME)
    assert torch.equal(features(again), expected)
    assert again.fingerprint == scorer.fingerprint
    assert len(hub.requests) == before


@pytest.mark.parametrize("kind", ["another author", "another title", "closed", "nothing in it"])
def test_other_pull_requests_are_not_used(kind, hub, repository):
    repo, proposed = repository
    changes = {
        "another author": {"author": "stranger"},
        "another title": {"title": "Better weights"},
        "closed": {"status": "closed"},
    }.get(kind, {})
    repo.propose(15, {} if kind == "nothing in it" else proposed, **{**BOT, **changes})
    with pytest.raises(FileNotFoundError) as caught:
        load_scorer(NAME)
    said = str(caught.value)
    assert f"Use `captionrl convert {NAME} OUT` and load OUT." in said
    assert "refs/pr" not in said


def test_requested_revision_is_not_replaced(hub, repository):
    repo, proposed = repository
    revision = repo.propose(15, proposed, **BOT)
    commit = repo.branches["main"]
    with pytest.raises(FileNotFoundError) as caught:
        load_scorer(NAME, revision=commit)
    assert f"on revision '{commit}'" in str(caught.value)
    assert f"`captionrl convert {NAME} OUT`" in str(caught.value)
    assert torch.equal(features(load_scorer(NAME, revision=revision)), features(load_scorer("scenes:siglip-held-out")))
