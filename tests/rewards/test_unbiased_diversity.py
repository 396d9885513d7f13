"""Gradients of the diversity rewards against the gradient of the mean distance, by enumeration of all samples of a tiny policy."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_captionrl import SLEConfig
from hf_captionrl.rewards import PairwiseDiversity

NAMES = ("a", "b", "c")


def expected_gradient(diversity: str, size: int, distance: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean over all groups of `size` samples of `mean_j advantage_j grad log p(y_j)`, weighted by their probability."""
    total = torch.zeros_like(logits)
    log_p = logits.log_softmax(0)
    scores = torch.autograd.functional.jacobian(lambda x: x.log_softmax(0), logits)  # (V, V)
    for group in itertools.product(range(len(NAMES)), repeat=size):
        rows = torch.tensor(group)
        values = Given(diversity=diversity)(Context(size, distance[rows][:, rows]))
        advantages = values - values.mean()  # its baseline, `group_mean`
        total += log_p[rows].sum().exp() * (advantages[:, None] * scores[rows]).mean(0)
    return total


class Context:
    """One image and the distances of its captions."""

    def __init__(self, size: int, distances: torch.Tensor) -> None:
        self.group_size, self.given = size, distances[None]


class Given(PairwiseDiversity):
    """Diversity by the distances of the context."""

    def distances(self, context):
        return context.given


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_gradients_of_all_groups_of_samples(size, is_symmetric):
    distance = torch.tensor([[0.0, 0.9, 0.3], [0.9, 0.0, 0.6], [0.3, 0.6, 0.0]], dtype=torch.float64)
    if not is_symmetric:
        distance = distance + torch.tensor([[0.0, 0.1, 0.5], [0.0, 0.0, -0.2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    p = logits.softmax(0)
    (true,) = torch.autograd.grad((p[:, None] * distance * p).sum(), logits)
    logits = logits.detach()
    assert PairwiseDiversity(diversity="unbiased").baseline == "group_mean"
    torch.testing.assert_close(expected_gradient("unbiased", size, distance, logits), true)
    papers = expected_gradient("pairwise", size, distance, logits)
    if is_symmetric:
        torch.testing.assert_close(papers, true * (size - 1) * (size - 2) / size**2)
    else:
        assert (papers - true * (size - 1) * (size - 2) / size**2).abs().max() > 0.005


def test_an_unbiased_baseline_needs_three_captions():
    with pytest.raises(ValueError, match="num_generations"):
        Given(diversity="unbiased")(Context(2, torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="num_generations"):
        SLEConfig("out", diversity="unbiased", num_generations=2)
