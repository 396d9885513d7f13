"""The study of the bank of distractors: its integral, its policy and its errors against enumeration."""

import itertools
import json
import math

import pytest
import torch

from scripts import reward_bank
from scripts.reward_bank import (
    Distractors,
    World,
    drawn_rows,
    expected_log_sum,
    expected_rewards,
    measure,
    policy,
    rewards_with,
)
from tests.tolerances import assert_close, close


def small_world(num_targets: int = 2) -> World:
    generator = torch.Generator().manual_seed(0)

    def rows(number: int) -> torch.Tensor:
        drawn = torch.randn(number, 6, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(drawn, dim=1)

    return World(rows(len(reward_bank.CAPTIONS)), rows(num_targets), rows(12), 8.0)


@pytest.mark.parametrize(("number", "weight"), [(1, 1.0), (2, 1.0), (3, 0.4)])
def test_expected_logarithm_equals_the_mean_over_all_draws(number, weight):
    generator = torch.Generator().manual_seed(1)
    others = (3 * torch.randn(2, 9, generator=generator, dtype=torch.float64)).exp()
    target = torch.tensor([[1.0, 0.01], [30.0, 1e4]], dtype=torch.float64)
    draws = torch.tensor(list(itertools.product(range(9), repeat=number)))
    sums = others[:, draws].sum(2)  # (S, draws)
    expected = (target[:, :, None] + weight * sums).log().mean(2)
    assert_close(expected_log_sum(target, others, number, weight), expected, ulps=256)


def test_policy_is_a_distribution_with_its_gradients():
    probabilities, scores = policy(3, torch.Generator().manual_seed(0))
    assert probabilities.sum(1).tolist() == close([1.0] * 3)
    # The expected gradient of a log-probability is 0.
    assert_close((probabilities[:, :, None] * scores).sum(1), 0.0, magnitude=1.0)


def test_rewards_of_a_bank_equal_a_plain_loop():
    world = small_world()
    found = rewards_with(world, torch.tensor([3, 3, 7]), 10)
    for t, s in ((0, 0), (1, 5)):
        cosines = [float(world.text[s] @ image) for image in (world.targets[t], *world.images[[3, 3, 7]])]
        target, *others = (torch.tensor(world.scale * cosine).exp() for cosine in cosines)
        assert float(found[t, s]) == close(
            float((target / (target + 3 * sum(others))).log()), dtype="float32", magnitude=world.scale
        )


@pytest.mark.parametrize("weighting", ["equal", "importance"])
def test_rewards_of_nearest_images_equal_a_plain_loop(weighting):
    world = small_world()
    generator = torch.Generator().manual_seed(2)
    distractors = Distractors("nearest_and_random", 2, 3, weighting)
    rows = drawn_rows(world, distractors, generator)
    for t, chosen in enumerate(rows.tolist()):
        ranked = sorted(range(12), key=lambda image: -float(world.targets[t] @ world.images[image]))
        assert chosen[:2] == ranked[:2]
        assert not set(chosen[2:]) & set(ranked[:2])
    found = rewards_with(world, rows, 10, distractors.counts(12))
    weights = {"equal": [9 / 5] * 5, "importance": [9 / 12] * 2 + [9 / 12 * 10 / 3] * 3}[weighting]
    for t, s in ((0, 0), (1, 5)):
        target = (world.scale * world.text[s] @ world.targets[t]).exp()
        values = (world.scale * world.images[rows[t]] @ world.text[s]).exp().tolist()
        others = sum(weight * value for weight, value in zip(weights, values, strict=True))
        expected = (target / (target + others)).log()
        assert float(found[t, s]) == close(float(expected), dtype="float32", magnitude=world.scale)


@pytest.mark.parametrize(("weighting", "near", "far"), [("equal", 1.5, 1.5), ("importance", 9 / 12, 9 / 12 * 8 / 2)])
def test_expected_rewards_with_nearest_images_are_the_mean_over_all_draws(weighting, near, far):
    """The weights of 4 nearest of 12 images, and 2 of the others, sum to 9."""
    world = small_world()
    found = expected_rewards(world, Distractors("nearest_and_random", 4, 2, weighting), 9)
    for t, s in ((0, 3), (1, 7)):
        order = sorted(range(12), key=lambda image: -float(world.targets[t] @ world.images[image]))
        values = [float((world.scale * world.text[s] @ world.images[image]).exp()) for image in order]
        target = world.scale * float(world.text[s] @ world.targets[t])
        fixed = math.exp(target) + near * sum(values[:4])
        logs = [math.log(fixed + far * sum(pair)) for pair in itertools.product(values[4:], repeat=2)]
        assert float(found[t, s]) == close(target - sum(logs) / len(logs), ulps=256, magnitude=world.scale)
        all_near = expected_rewards(world, Distractors("nearest", 4, 0), 6)
        fixed = math.log(math.exp(target) + 1.5 * sum(values[:4]))
        assert float(all_near[t, s]) == close(target - fixed, magnitude=world.scale)


def test_importance_weights_remove_the_bias_of_nearest_images():
    """What is left is the bias of the number of images, which a random bank has as well."""
    banks = [Distractors("random", 0, 2000), Distractors("nearest_and_random", 6, 2000, "importance")]
    banks += [Distractors("nearest_and_random", 2, 2, weighting) for weighting in ("equal", "importance")]
    _, random, weighted, small_equal, small_weighted = measure(small_world(), 4, banks, draws=2)
    assert weighted["bias"] == pytest.approx(random["bias"], rel=0.01)
    assert small_equal["bias"] > 1.5 * small_weighted["bias"]


def test_bias_is_that_of_the_number_of_images_and_deviation_falls_with_it():
    """A bank of C - 1 images is a batch. A larger one has the logarithm of a mean, not the mean of logarithms."""
    banks = [Distractors("random", 0, 3), Distractors("random", 0, 300)]
    batch, equal, large = measure(small_world(), 4, banks, draws=100)
    assert (batch["bias"], batch["kind"]) == (0.0, "batch")
    assert equal["bias"] == close(0.0, magnitude=1.0, ulps=2**10)
    assert large["bias"] > 0.02
    assert equal["spread"] > 2 * large["spread"]
    assert equal["spread"] == pytest.approx(batch["spread"], rel=0.3)


def test_nearest_images_have_no_deviation_and_all_images_no_bias_of_their_own():
    """The 12 nearest of 12 images are all images, so their bias is that of a large random bank."""
    near, everything = Distractors("nearest", 2, 0), Distractors("nearest", 12, 0)
    mixed, random = Distractors("nearest_and_random", 2, 5), Distractors("random", 0, 2000)
    _, few, whole, both, large = measure(small_world(), 4, [near, everything, mixed, random], draws=50)
    assert (few["spread"], whole["spread"]) == (close(0.0, magnitude=1.0, dtype="float32"),) * 2
    assert both["spread"] > 0.01
    assert whole["bias"] == pytest.approx(large["bias"], rel=0.05)
    assert few["bias"] > 2 * whole["bias"]


def test_page_shows_the_measured_numbers():
    found = json.loads(reward_bank.RESULTS.read_text())
    assert reward_bank.table(found) in reward_bank.PAGE.read_text()
    kinds = [row["kind"] for row in found["rows"][:11]]
    assert kinds == ["batch", *["random"] * 3, *["nearest"] * 2, *["nearest_and_random"] * 5]
    assert [row["weighting"] for row in found["rows"][:11]] == ["equal"] * 8 + ["importance"] * 3
    assert [row["random"] for row in found["rows"][1:4]] == [10, 100, 1000]
