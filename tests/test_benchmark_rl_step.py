"""The benchmark of reinforcement steps times what it says, at tiny shapes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time

import pytest
import torch

from hf_captionrl.captioners.decoding import DecodingLoop
from scripts.benchmarks import rl_step
from scripts.benchmarks.generation import planned_lengths, write
from scripts.benchmarks.rl_models import SHAPES, build
from scripts.benchmarks.rl_naive import NaiveStep
from scripts.benchmarks.rl_step import measure
from scripts.benchmarks.rl_timing import STEPS, Clock, check_equal
from tests.tolerances import assert_close, close, resolution, within

SMALL = {
    "num_images": 3,
    "group_size": 2,
    "num_tokens": 5,
    "vocab_size": 60,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "prefix_length": 3,
    "scorer_text_width": 32,
    "scorer_layers": 1,
    "scorer_vocab_size": 60,
}
TINY = {name: dataclasses.replace(SHAPES[name], **SMALL) for name in ("blip-base", "clipcap")} | {
    "scenes": dataclasses.replace(SHAPES["scenes"], num_images=3, group_size=2, num_tokens=8)
}


@pytest.fixture(scope="module", params=list(TINY))
def world(request, tmp_path_factory):
    made = build(TINY[request.param], 1, tmp_path_factory.mktemp("world"), torch.float64)
    with torch.no_grad():
        for parameter in made.parameters.values():
            if parameter.dim() > 1 and request.param != "scenes":
                parameter.mul_(3)  # away from uniform distributions, where mistakes would hide
    return made


def gradients(world):
    found = {name: p.grad for name, p in world.parameters.items() if p.grad is not None}
    for parameter in world.parameters.values():
        parameter.grad = None
    return found


def test_gradients_are_equal_in_float64(world):
    # Of ours with pixels, ours with cached features, and the naive step, from one rollout.
    torch.manual_seed(0)
    inputs, naive = dict(world.batch), NaiveStep(world)
    world.trainer.rollouts.roll_out([inputs])
    assert "pixel_values" not in inputs
    world.trainer.compute_loss(world.trainer.model, inputs).backward()
    ours = gradients(world)
    cached = {**inputs, "image_features": world.cached_features}
    world.trainer.compute_loss(world.trainer.model, cached).backward()
    ours_cached = gradients(world)
    naive.loss(inputs["input_ids"], inputs["attention_mask"], inputs["advantages"]).backward()
    theirs = gradients(world)
    assert ours.keys() == theirs.keys() == ours_cached.keys()
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-3
    for name, gradient in theirs.items():
        assert gradient.dtype == torch.float64
        assert_close(ours[name], gradient, ulps=64, magnitude=1, msg=name)
        assert_close(ours_cached[name], gradient, ulps=64, magnitude=1, msg=name)


def test_the_naive_step_by_a_plain_loop(world):
    # The gradient of REINFORCE, one caption at a time, from the stock model's logits.
    torch.manual_seed(1)
    naive, G = NaiveStep(world), world.shape.group_size
    input_ids, mask, captions = naive.generate()
    assert len(captions) == world.shape.num_images * G
    if world.suppressed:
        assert bool(mask.all())
        assert input_ids.shape == (len(captions), 1 + world.shape.num_tokens)
        assert not set(input_ids[:, 1:].flatten().tolist()) & set(world.suppressed)
    advantages = torch.linspace(-1, 2, len(captions), dtype=torch.float64)
    naive.loss(input_ids, mask, advantages).backward()
    found = gradients(world)
    total = torch.zeros((), dtype=torch.float64)
    for n, row in enumerate(input_ids):
        length = int(mask[n].sum())
        logits = world.stock(
            pixel_values=world.batch["pixel_values"][n // G][None], input_ids=row[None, :length]
        ).logits
        values = [logits[0, t - 1].log_softmax(-1)[row[t]] for t in range(1, length)]
        total = total - advantages[n] * sum(values) / len(values) / len(captions)
    total.backward()
    for name, gradient in gradients(world).items():
        assert_close(found[name], gradient, ulps=64, magnitude=1, msg=name)


def test_advantages_by_a_plain_loop(world):
    naive, scorer, G = NaiveStep(world), world.scorer, world.shape.group_size
    captions = [f"w{i} w{i + 1} a red cat" for i in range(world.shape.num_images * G)]
    text = [scorer.text_features([caption])[0] for caption in captions]
    images = scorer.model.get_image_features(pixel_values=world.scorer_pixels).pooler_output
    images = [image / image.norm() for image in images]
    rewards = []
    for n, feature in enumerate(text):
        scores = [math.exp(scorer.logit_scale * float(feature @ image)) for image in images]
        rewards.append(math.log(scores[n // G] / sum(scores)))
    found = naive.score(captions)
    for n in range(len(captions)):
        others = [rewards[k] for k in range(n // G * G, n // G * G + G) if k != n]
        assert float(found[n]) == close(rewards[n] - sum(others) / len(others), magnitude=100, dtype="float32")


def test_stock_model_shares_the_weights_and_has_no_tap(world):
    assert all(a is b for a, b in zip(world.captioner.model.parameters(), world.stock.parameters(), strict=True))
    assert hasattr(world.captioner.model, "captioner_family")
    assert not hasattr(world.stock, "captioner_family")
    assert not any(getattr(module, "folds_captions", False) for module in world.stock.modules())
    assert not any(name.startswith(world.captioner.vision_path) for name in world.parameters)


def test_structure_and_counts():
    shape = TINY["blip-base"]
    measured = measure(shape, seeds=(0, 1), rounds=1)
    assert measured["rounds"] == 2
    # Once an image; from the cache; and generate, old log-probabilities and update for each of the captions.
    assert measured["images_encoded"] == {"ours": [3], "ours-cached": [0], "naive": [3 * 2 * 3]}
    assert measured["tokens"] == dict.fromkeys(STEPS, 5.0)
    assert measured["largest_difference"]["gradients"] < resolution(1, ulps=64)
    for seconds in measured["seconds"].values():
        for part in seconds.values():
            assert set(part) == {"step", "generate", "score", "update", "scorer_images"}
            assert min(part["generate"], part["score"], part["update"]) > 0
    assert (
        measured["seconds"]["ours"]["cpu"]["scorer_images"] == 0 < measured["seconds"]["naive"]["cpu"]["scorer_images"]
    )
    assert set(measured["speedup"]) == {"ours", "ours-cached"}
    for ratios in measured["speedup"].values():
        assert ratios["cpu_scorer_images_too"]["median"] < ratios["cpu"]["median"]
        for ratio in ratios.values():
            low, high = ratio["quartiles"]
            assert min(ratio["values"]) <= low <= ratio["median"] <= high <= max(ratio["values"])


@pytest.mark.parametrize("name", ["blip-base", "clipcap"])
def test_both_steps_write_captions_of_the_planned_lengths(name, tmp_path, monkeypatch):
    world = build(TINY[name], 1, tmp_path, torch.float64)
    calls, decode = [], DecodingLoop.__call__

    def counted(self, *args, **kwargs):
        calls.append(1)
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(DecodingLoop, "__call__", counted)
    world.lengths = torch.tensor([2, 5, 3, 4, 2, 5])
    loops = {}
    for step, function in STEPS.items():
        calls.clear()
        assert function(world, Clock()).tolist() == [2, 5, 3, 4, 2, 5]
        loops[step] = len(calls)
    assert loops == {"ours": 1, "ours-cached": 1, "naive": 0}  # the naive step has transformers' loop
    gradients(world)
    assert check_equal(world)["gradients"] < resolution(1, ulps=64)  # of padded captions
    for loop, number in (("ours", 1), ("transformers", 0)):
        calls.clear()
        assert write(world, loop, world.lengths).mask.sum(1).tolist() == [2, 5, 3, 4, 2, 5]
        assert len(calls) == number


def test_lengths_are_those_of_coco(tmp_path):
    torch.manual_seed(0)
    drawn = planned_lengths(12.0, 2.6, 4000).double()
    assert float(drawn.mean()) == within(12.0, 0.2)
    assert float(drawn.std()) == within(2.6, 0.2)
    world = build(dataclasses.replace(TINY["clipcap"], num_tokens=20), 1, tmp_path)
    rl_step.plan_lengths(world)
    assert world.lengths.shape == (6,)
    assert 5 <= int(world.lengths.min()) < int(world.lengths.max()) <= 20


def test_parts_that_lie_within_each_other_are_counted_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    clock = Clock()
    with clock.part("a"):  # from 0
        with clock.part("b"):  # from 1 to 2
            pass
        with clock.part("b"):  # from 3 to 4
            pass
    assert dict(clock.seconds["wall"]) == {"a": 1 + 1 + 1, "b": 1 + 1}


def test_command_line_keeps_the_other_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_step, "SHAPES", TINY)
    output = tmp_path / "steps.json"
    output.write_text(json.dumps({"shapes": {"other": {"rounds": 7}}}))
    parser = argparse.ArgumentParser()
    rl_step.add_arguments(parser)
    options = ["--shapes", "clipcap", "--rounds", "1", "--images", "2", "--threads", "1"]
    threads = torch.get_num_threads()
    result = rl_step.run(parser.parse_args(options, argparse.Namespace(output=output)))
    assert torch.get_num_threads() == threads
    assert json.loads(output.read_text()) == result
    assert set(result["shapes"]) == {"other", "clipcap"}
    assert result["shapes"]["clipcap"]["shape"]["num_images"] == 2
    # A shape that the benchmark does not know (any more) stays in the file, but has no row.
    rows = [line for line in rl_step.markdown(result).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1] for row in rows[1:]] == ["ours", "ours, images cached", "naive"]
    assert len({row.count("|") for row in rows}) == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--shapes", "nonsense"])


def test_steps_that_compute_different_things_are_caught(world, monkeypatch):
    check_equal(world)
    loss, score = NaiveStep.loss, NaiveStep.score
    # The planted faults: the wrong caption's advantage, and a reward without the scorer's scale.
    monkeypatch.setattr(NaiveStep, "loss", lambda self, ids, mask, a: loss(self, ids, mask, a.flip(0)))
    with pytest.raises(RuntimeError, match="gradients of the two steps differ"):
        check_equal(world)
    monkeypatch.setattr(NaiveStep, "loss", loss)
    monkeypatch.setattr(NaiveStep, "score", lambda self, *a: score(self, *a) / self.world.scorer.logit_scale)
    with pytest.raises(RuntimeError, match="advantages of the two steps differ"):
        check_equal(world)
    assert all(parameter.grad is None for parameter in world.parameters.values())


def test_a_weight_that_only_one_step_trains_is_caught(world, monkeypatch):
    loss = NaiveStep.loss
    name = next(iter(world.parameters))

    hooks = []

    def forgetful(self, ids, mask, advantages):
        hooks.append(world.parameters[name].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
        return loss(self, ids, mask, advantages)

    monkeypatch.setattr(NaiveStep, "loss", forgetful)
    with pytest.raises(RuntimeError, match="Only one of the steps has a gradient"):
        check_equal(world)
    hooks[0].remove()


def test_unknown_model_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'gpt9'"):
        build(dataclasses.replace(TINY["clipcap"], kind="gpt9"), 0, tmp_path)
