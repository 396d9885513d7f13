"""The benchmark of whole training steps times what it says, at tiny shapes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX
from scripts.benchmarks import smile_step
from scripts.benchmarks.smile_step import PATHS, check_losses, measure
from scripts.benchmarks.step_models import SHAPES, build, draw_batch
from tests.tolerances import assert_close, close, resolution

TINY = {
    name: dataclasses.replace(
        shape,
        batch_size=3,
        vocab_size=60,
        width=32,
        layers=1,
        heads=2,
        intermediate=64,
        image_size=32,
        prefix_length=min(shape.prefix_length, 4),
    )
    for name, shape in SHAPES.items()
}


def plain_losses(model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
    """Mean nats a token from the model's full logits, one token at a time."""
    with torch.no_grad():
        logits = model(**batch).logits.double()  # (B, T', V)
    labels = batch["labels"][:, 1:]
    start = 0 if model.config.is_encoder_decoder else logits.size(1) - batch["labels"].size(1)
    mle, smile = [], []
    for row, label in enumerate(labels):
        words = {int(token) for token in label if token != IGNORE_INDEX}
        first = True
        for position, token in enumerate(label):
            if token == IGNORE_INDEX:
                continue
            scores = logits[row, start + position].tolist()
            over_all = math.log(sum(math.exp(score) for score in scores)) - scores[token]
            over_words = math.log(sum(math.exp(scores[word]) for word in words)) - scores[token]
            mle.append(over_all)
            smile.append(over_all if first else over_words)
            first = False
    return {"mle": float(np.mean(mle)), "mle-tapped": float(np.mean(mle)), "smile": float(np.mean(smile))}


@pytest.mark.parametrize("name", TINY)
def test_paths_compute_the_losses_they_are_named_after(name: str) -> None:
    model = build(TINY[name], seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # away from uniform distributions, where SMILE and MLE would hide their mistakes
    batch = draw_batch(TINY[name], np.random.default_rng(1))
    expected = plain_losses(model, batch)
    assert abs(expected["smile"] - expected["mle"]) > 0.1
    for path, loss in PATHS.items():
        with torch.no_grad():
            found = float(loss(model, batch))
        assert found == close(expected[path], dtype="float32"), path


@pytest.mark.parametrize("name", TINY)
def test_both_mle_paths_train_alike(name: str) -> None:
    # Equal gradients of every weight: no path is faster for leaving something out.
    model = build(TINY[name], seed=2).eval()
    batch = draw_batch(TINY[name], np.random.default_rng(2))
    gradients = []
    for path in ("mle", "mle-tapped"):
        model.zero_grad()
        PATHS[path](model, batch).backward()
        gradients.append({key: weight.grad for key, weight in model.named_parameters()})
    for key, gradient in gradients[0].items():
        if gradient is None:
            assert gradients[1][key] is None, key
        else:
            assert_close(gradients[1][key], gradient, ulps=64, magnitude=0.1, msg=key)
    model.zero_grad()
    PATHS["smile"](model, batch).backward()
    reached = {key for key, weight in model.named_parameters() if weight.grad is not None}
    assert reached == {key for key, gradient in gradients[0].items() if gradient is not None}


@pytest.mark.slow
def test_measurement_has_seconds_and_speedups() -> None:
    measured = measure(TINY["clipcap"], seeds=(3, 4), repetitions=2)
    assert measured["repetitions"] == 4
    assert measured["parameters"] == measured["trained_parameters"]
    assert max(measured["largest_loss_difference"].values()) < resolution(5)
    for name in PATHS:
        seconds = measured["seconds"][name]
        assert set(seconds) == {"step", "forward", "backward", "optimizer"}
        assert all(value > 0 for value in seconds.values())
    assert set(measured["speedup"]) == {"over_mle", "over_mle-tapped"}
    for ratio in measured["speedup"].values():
        assert len(ratio["values"]) == 4
        low, high = ratio["interval_95"]
        assert min(ratio["values"]) <= low <= ratio["quartiles"][0] <= ratio["median"]
        assert ratio["median"] <= ratio["quartiles"][1] <= high <= max(ratio["values"])


def test_frozen_language_model_has_no_trained_weights() -> None:
    model = build(TINY["clipcap-frozen"], seed=0)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained
    assert all(name.startswith("mapping.") for name in trained)


def test_command_line_keeps_the_other_shapes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(smile_step, "SHAPES", TINY)
    output = tmp_path / "steps.json"
    output.write_text(json.dumps({"shapes": {"other": {"repetitions": 7}}}))
    parser = argparse.ArgumentParser()
    smile_step.add_arguments(parser)
    options = ["--shapes", "llama-32k", "--seeds", "5", "--repetitions", "1", "--batch-size", "2"]
    threads = torch.get_num_threads()
    result = smile_step.run(parser.parse_args(options, argparse.Namespace(output=output)))
    assert torch.get_num_threads() == threads
    assert json.loads(output.read_text()) == result
    assert set(result["shapes"]) == {"other", "llama-32k"}
    assert result["shapes"]["llama-32k"]["seeds"] == [5]
    assert result["shapes"]["llama-32k"]["shape"]["batch_size"] == 2
    # Shapes that the benchmark does not know (any more) stay in the file, but have no row.
    rows = [line for line in smile_step.markdown(result).splitlines() if line.startswith("| ")]
    assert len(rows) == 2
    assert rows[1].startswith("| llama-32k | 2 |")
    assert len({row.count("|") for row in rows}) == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--shapes", "nonsense"])


def test_captions_are_as_long_as_those_of_coco() -> None:
    batch = draw_batch(dataclasses.replace(TINY["clipcap"], batch_size=2000), np.random.default_rng(0))
    supervised = batch["labels"] != IGNORE_INDEX  # caption and end token
    assert 12.0 < float(supervised.sum(1).float().mean()) < 12.6
    assert bool((batch["labels"] == batch["input_ids"])[supervised].all())
    assert int(batch["input_ids"].max()) < 60


def test_a_path_that_computes_something_else_is_caught(monkeypatch) -> None:
    # The planted fault: a "SMILE" that is cross-entropy over the vocabulary, and a mean over all positions.
    model = build(TINY["clipcap"], seed=0)
    batch = draw_batch(TINY["clipcap"], np.random.default_rng(0))
    check_losses(model, batch)
    monkeypatch.setitem(PATHS, "smile", PATHS["mle"])
    with pytest.raises(RuntimeError, match="path 'smile'"):
        check_losses(model, batch)
    assert model.training


def test_unknown_model_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpt9'"):
        build(dataclasses.replace(TINY["clipcap"], kind="gpt9"), seed=0)


def test_interval_of_the_median() -> None:
    # Binomial(8, 1/2): the smallest and largest of 8 leave out the median with probability 2 / 2^8 < 5 %, the second
    # ones with 18 / 2^8 > 5 %. Of 9 the second ones leave it out with 20 / 2^9 < 5 %; of 3 there is no such interval.
    interval = smile_step._median_interval
    assert interval([float(i) for i in range(8)]) == [0.0, 7.0]
    assert interval([float(i) for i in range(9)]) == [1.0, 7.0]
    assert interval([3.0, 1.0, 2.0]) == [1.0, 3.0]
