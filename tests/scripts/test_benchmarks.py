"""The benchmarks time what they say, at tiny shapes; what computes something else is not timed."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from scripts import benchmark
from scripts.benchmarks import timing
from scripts.benchmarks.models import STEP_SHAPES, TINY, build_model, build_world, draw_batch
from scripts.benchmarks.reinforcement import NaiveStep, check_equal, take_gradients
from scripts.benchmarks.smile import HEADS, LOSSES, PATHS, check_head, check_step, head_batch
from tests.tolerances import assert_close, resolution

# --- timing ---------------------------------------------------------------------------------------------------------


def test_every_section_runs_at_tiny_shapes(tmp_path, monkeypatch, capsys):
    output, threads = tmp_path / "found.json", torch.get_num_threads()
    assert benchmark.main(["--shapes", "tiny", "--rounds", "1", "--output", str(output)]) == 0
    assert torch.get_num_threads() == threads
    result = json.loads(output.read_text())
    assert result["sections"].keys() == benchmark.SECTIONS.keys()
    for name, shapes in result["sections"].items():
        assert all(work["seconds"]["median"] >= 0 for work in shapes["tiny"]["works"].values()), name
    assert result["sections"]["smile_head_frozen"]["tiny"]["ratios"]["algorithm_1 / smile"]["bar"] == 15
    assert "naive / ours" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in ((["nothing"], "no section nothing"), (["--device", "cuda"], "no CUDA device")):
        with pytest.raises(SystemExit):
            benchmark.main(arguments)
        assert said in capsys.readouterr().err


# --- what computes something else is not timed; tests/losses compares the losses with loops ---------------------------


def test_a_wrong_loss_is_not_timed(monkeypatch):
    batch = head_batch(HEADS["tiny"], 0)
    assert check_head(batch, 1e-4).keys() == LOSSES.keys()
    monkeypatch.setitem(LOSSES, "smile", LOSSES["cross_entropy"])
    with pytest.raises(RuntimeError, match="smile differs"):
        check_head(batch, 1e-4)


def test_paths_train_alike_and_one_that_computes_something_else_is_caught(monkeypatch):
    model = build_model(STEP_SHAPES["tiny"], seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # away from uniform distributions, where SMILE and MLE would hide their mistakes
    batch, gradients = draw_batch(STEP_SHAPES["tiny"], np.random.default_rng(1)), {}
    check_step(model, batch, 1e-5)
    model.eval()
    for path, loss in PATHS.items():
        model.zero_grad()
        loss(model, batch).backward()
        gradients[path] = {key: w.grad for key, w in model.named_parameters() if w.grad is not None}
    # No path is faster for leaving something out.
    assert gradients["smile"].keys() == gradients["mle"].keys() == gradients["mle-tapped"].keys()
    for key, gradient in gradients["mle"].items():
        assert_close(gradients["mle-tapped"][key], gradient, ulps=64, magnitude=10, msg=key)
    monkeypatch.setitem(PATHS, "smile", PATHS["mle"])
    with pytest.raises(RuntimeError, match="path 'smile'"):
        check_step(model, batch)


@pytest.mark.parametrize("kind", ["blip", "clipcap"])
def test_steps_are_equal_and_those_that_compute_different_things_are_caught(kind, monkeypatch):
    """Gradients in float64 of ours with pixels, ours with cached features, and the naive step, from one rollout."""
    world = build_world(dataclasses.replace(TINY, kind=kind, batch_size=3, layers=2), 1, torch.float64)
    assert check_equal(world)["gradients"] < resolution(1, ulps=64)
    inputs, found = dict(world.batch), []
    world.trainer.rollouts.roll_out([inputs], world.trainer.state, bag_size=0)
    for given in (inputs, {**inputs, "image_features": world.cached_features}):
        world.trainer.compute_loss(world.trainer.model, given).backward()
        found.append(take_gradients(world))
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, ulps=64, magnitude=1, msg=name)
    loss, score = NaiveStep.loss, NaiveStep.score
    # The planted faults: the wrong caption's advantage, and a reward without the scorer's scale.
    monkeypatch.setattr(NaiveStep, "loss", lambda self, ids, mask, a: loss(self, ids, mask, a.flip(0)))
    with pytest.raises(RuntimeError, match="gradients of the two steps differ"):
        check_equal(world)
    monkeypatch.setattr(NaiveStep, "loss", loss)
    monkeypatch.setattr(NaiveStep, "score", lambda self, *a: score(self, *a) / self.world.scorer.logit_scale)
    with pytest.raises(RuntimeError, match="advantages of the two steps differ"):
        check_equal(world)


def test_operations_of_a_product_and_their_share_of_the_machines_rate():
    a, b = torch.ones(300, 500), torch.ones(500, 700)
    assert timing.operations(lambda: a @ b) == 2 * 300 * 500 * 700
    case = timing.Case("", {"product": lambda: a @ b, "sum": a.sum}, counts_operations=True)
    works = timing.measure(case, "cpu", rounds=5)["works"]
    assert works["sum"]["share_of_product_rate"] == 0 < works["product"]["share_of_product_rate"]
