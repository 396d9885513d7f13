"""The policy gradient equals the exact sum over all sequences of a tiny policy."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import policy_gradient_loss
from hf_captionrl.rewards import make_baseline
from hf_captionrl.rewards.text_rewards import edit_distance
from tests.losses.conftest import caption_log_probs
from tests.tolerances import assert_close, close

VOCABULARY, LENGTH, END = 3, 3, 0


# A policy small enough to enumerate all its sequences: one row of logits per prefix.

SEQUENCES = [
    sequence
    for length in range(1, LENGTH + 1)
    for sequence in itertools.product(range(VOCABULARY), repeat=length)
    if END not in sequence[:-1] and (sequence[-1] == END or length == LENGTH)
]
PREFIXES = sorted({sequence[:i] for sequence in SEQUENCES for i in range(len(sequence))})


class Tabular:
    """All sequences, padded with NaN log-probabilities; the logits require a gradient."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits.requires_grad_()
        self.rewards = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
        self.mask = torch.tensor([[t < len(s) for t in range(LENGTH)] for s in SEQUENCES])

    def log_probs(self) -> Tensor:
        table = self.logits.log_softmax(1)
        rows = []
        for sequence in SEQUENCES:
            own = [table[PREFIXES.index(sequence[:t]), sequence[t]] for t in range(len(sequence))]
            rows.append(torch.stack([*own, *[torch.tensor(math.nan).double()] * (LENGTH - len(own))]))
        return torch.stack(rows)

    def probabilities(self) -> Tensor:
        return caption_log_probs(self.log_probs(), self.mask, "sum").exp()

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.autograd.grad(objective, self.logits)[0]

    def surrogate(self, rows: list[int], advantages: Tensor) -> Tensor:
        """Gradient of the loss of some sequences, as in one training step."""
        loss = policy_gradient_loss(self.log_probs()[rows], advantages, self.mask[rows], loss_type="sum")
        return self.gradient(loss["loss"])


def test_enumeration_is_complete():
    policy = Tabular()
    assert len(SEQUENCES) == 1 + 2 + 4 * VOCABULARY
    assert float(policy.probabilities().sum().detach()) == close(1)


@pytest.mark.parametrize("name", ["none", "greedy", "running_mean"])
def test_the_expected_surrogate_is_the_policy_gradient(name):
    policy = Tabular()
    probabilities = policy.probabilities().detach()
    exact = policy.gradient((policy.probabilities() * policy.rewards).sum())
    baseline = make_baseline(name, 1)
    baseline.update(0.7)
    greedy = policy.rewards[int(probabilities.argmax())].view(1)
    total = torch.zeros_like(exact)
    for row, probability in enumerate(probabilities):
        advantage = baseline(policy.rewards[row].view(1, 1), greedy).flatten()
        total += probability * policy.surrogate([row], advantage)
    assert_close(-total, exact)


def expectation(policy: Tabular, samples: int, advantages) -> Tensor:
    """Expected gradient of the surrogate for s captions of one image, over all draws `(P, s)` of sequences."""
    draws = torch.cartesian_prod(*[torch.arange(len(SEQUENCES))] * samples)
    # The loss is linear in the advantage, so the probability of the draw multiplies the advantage.
    weight = policy.probabilities().detach()[draws].prod(1, keepdim=True)
    rows, weighted = draws.flatten(), (advantages(draws) * weight).flatten()
    given = policy.log_probs()[rows], weighted, policy.mask[rows]
    return policy.gradient(policy_gradient_loss(*given, loss_type="sum", normalizer=float(samples))["loss"])


@pytest.mark.parametrize(("name", "factor"), [("leave_one_out", 1.0), ("group_mean", 0.5), ("batch_mean", 1.0)])
def test_group_baselines_over_all_pairs(name, factor):
    """A group mean that includes the caption's reward scales the gradient by (G - 1) / G; leave-one-out does not.

    With `batch_mean` the two captions belong to two images, so each is the other's baseline.
    """
    policy = Tabular(1)
    exact = policy.gradient((policy.probabilities() * policy.rewards).sum())

    def advantages(pairs: Tensor) -> Tensor:
        if name != "batch_mean":
            return make_baseline(name, 2)(policy.rewards[pairs])
        baseline = make_baseline(name, 1)
        return torch.cat([baseline(pair.view(2, 1)).view(1, 2) for pair in policy.rewards[pairs]])

    assert_close(-expectation(policy, 2, advantages), factor * exact)


@pytest.mark.parametrize("scaled", [False, True])
def test_baselines_that_do_change_the_gradient(scaled):
    """Negative control: the oracle detects baselines that depend on the caption."""
    policy = Tabular(1)
    rewards = 3 * policy.rewards  # so that some pairs reach the floor
    exact = policy.gradient((policy.probabilities() * rewards).sum())

    def advantages(pairs: Tensor) -> Tensor:
        if scaled:  # by the standard deviation of the group
            return make_baseline("group_mean", 2)(rewards[pairs]) / (rewards[pairs].std(1, keepdim=True) + 1e-4)
        return make_baseline("group_floor", 2)(rewards[pairs])

    found = -expectation(policy, 2, advantages)
    nearest = (found * exact).sum() / (exact * exact).sum()
    assert (found - nearest * exact).abs().max() > 1e-3


def test_mean_over_tokens_changes_the_gradient():
    policy = Tabular()
    exact = policy.gradient((policy.probabilities() * policy.rewards).sum())
    chance = policy.probabilities().detach()
    loss = policy_gradient_loss(policy.log_probs(), policy.rewards * chance, policy.mask, normalizer=1.0)
    assert (-policy.gradient(loss["loss"]) - exact).abs().max() > 1e-2


# SLE, Eq. 12-16


@pytest.mark.parametrize(("samples", "baseline"), [(3, False), (2, True), (3, True)])
def test_the_diversity_term_is_the_gradient_of_the_expected_distance(samples, baseline):
    """`(2/s) sum_k d(y_j, y_k)` gives (s-1)/s of the gradient of E d; its group mean leaves (1 - 2/s) of that.

    So two samples and the baseline teach nothing, and five keep .48 of the gradient.
    """
    policy = Tabular(2)
    ids = torch.tensor([[*s, *[END] * (LENGTH - len(s))] for s in SEQUENCES])
    distance = edit_distance(ids, policy.mask & (ids != END), len(ids))[0]
    chance = policy.probabilities()
    exact = policy.gradient((chance[:, None] * chance[None, :] * distance).sum())

    def advantages(draws: Tensor) -> Tensor:
        rewards = 2 / samples * distance[draws[:, :, None], draws[:, None, :]].sum(2)
        return make_baseline("group_mean", samples)(rewards) if baseline else rewards

    found = expectation(policy, samples, advantages)
    factor = (samples - 1) / samples * (1 - 2 / samples if baseline else 1)
    assert_close(-found, factor * exact, ulps=128)


def test_asymmetric_distance_needs_both_directions():
    """Eq. 13 has d(y, y') and d(y', y); Eq. 14 assumes that they are equal, which does not hold for BLEU."""
    policy = Tabular(3)
    generator = torch.Generator().manual_seed(0)
    distance = torch.rand(len(SEQUENCES), len(SEQUENCES), generator=generator, dtype=torch.float64)
    chance = policy.probabilities()
    exact = policy.gradient((chance[:, None] * chance[None, :] * distance).sum())

    def expected(d: Tensor) -> Tensor:
        return -expectation(policy, 2, lambda pairs: torch.stack([d[tuple(p.T)] for p in (pairs, pairs.flip(1))], 1))

    assert_close(expected(distance + distance.T), exact, ulps=64)
    assert (expected(2 * distance) - exact).abs().max() > 1e-3
