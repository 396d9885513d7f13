"""The study of the bank of distractors: its integral, its policy and its errors against enumeration."""

import itertools
import json

import pytest
import torch

from scripts import reward_bank
from scripts.reward_bank import World, expected_log_sum, measure, policy, rewards_with
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


def test_bias_is_that_of_the_number_of_images_and_deviation_falls_with_it():
    """A bank of C - 1 images is a batch. A larger one has the logarithm of a mean, not the mean of logarithms."""
    batch, equal, large = measure(small_world(), 4, [3, 300], draws=100)
    assert (batch["bias"], batch["bank_size"]) == (0.0, None)
    assert equal["bias"] == close(0.0, magnitude=1.0, ulps=2**10)
    assert large["bias"] > 0.02
    assert equal["spread"] > 2 * large["spread"]
    assert equal["spread"] == pytest.approx(batch["spread"], rel=0.3)


def test_page_shows_the_measured_numbers():
    found = json.loads(reward_bank.RESULTS.read_text())
    assert reward_bank.table(found) in reward_bank.PAGE.read_text()
    assert [row["bank_size"] for row in found["rows"][:4]] == [None, 10, 100, 1000]
