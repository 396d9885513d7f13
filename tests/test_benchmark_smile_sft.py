"""The benchmark of SMILE for text measures what it says, at a tiny shape."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from scripts.benchmarks import smile_sft
from scripts.benchmarks.smile_sft import PATHS, Shape, build_trainers, measure

TINY = Shape(width=32, layers=1, vocab_size=200, rows=2, tokens=120)  # answers longer than a window


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    return build_trainers(TINY, 0, str(tmp_path_factory.mktemp("t")), number=20)


def test_paths_share_weights_and_batches_but_not_losses(trainers):
    assert list(trainers) == list(PATHS)
    batches = [next(iter(t.get_train_dataloader())) for t in trainers.values()]
    assert all(torch.equal(batch["input_ids"], batches[0]["input_ids"]) for batch in batches)
    head = trainers["trl"].model.get_output_embeddings().weight
    for trainer in trainers.values():
        assert trainer.model.get_output_embeddings().weight is head
    losses = {n: float(t.compute_loss(t.model, dict(batches[0])).detach()) for n, t in trainers.items()}
    assert losses["smile"] < losses["mixture"] < losses["trl"]
    assert losses["smile-sentence"] != pytest.approx(losses["smile"], rel=1e-3)
    assert losses["smile-window"] != pytest.approx(losses["smile"], rel=1e-3)


def test_each_model_has_separate_adapters(trainers):
    ids = [id(p) for t in trainers.values() for p in t.model.parameters() if p.requires_grad]
    assert len(set(ids)) == len(ids)


def test_result_and_page(tmp_path, monkeypatch):
    monkeypatch.setitem(smile_sft.SHAPES, "tiny", TINY)
    args = argparse.Namespace(shapes=["tiny"], repetitions=2, seed=1, output=tmp_path / "r.json")
    result = smile_sft.run(args)
    measured = result["shapes"]["tiny"]
    assert set(measured["tokens_per_second"]) == set(PATHS)
    assert all(value > 0 for value in measured["tokens_per_second"].values())
    assert all(value > 0 for value in measured["peak_mib"].values())
    assert 0 < measured["median_supervised_tokens"] < measured["median_tokens"]
    assert json.loads((tmp_path / "r.json").read_text())["shapes"]["tiny"]["repetitions"] == 2
    page = smile_sft.markdown(result)
    assert page.count("| tiny (") == len(PATHS)


def test_a_wrong_loss_stops_the_measurement(monkeypatch):
    from hf_captionrl.trainers.trl_smile_sft import SmileSFTTrainer

    original = SmileSFTTrainer.compute_loss
    monkeypatch.setattr(SmileSFTTrainer, "compute_loss", lambda self, *a, **k: original(self, *a, **k) + 1)
    with pytest.raises(RuntimeError, match="should be the same"):
        measure(TINY, repetitions=1)
