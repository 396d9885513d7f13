"""Baselines equal plain loops, and scaled advantages TRL's formulas."""

import itertools
import json
import statistics

import pytest
import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from hf_captionrl.rewards import BASELINES, RunningMeanBaseline, WeightedRewards, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from tests.rewards.conftest import OfContext
from tests.tolerances import assert_close, close

REWARDS = torch.tensor([[1.0, 2.0, 6.0], [-4.0, -1.0, -1.0]], dtype=torch.float64)


def plain(name: str, row: list[float], greedy: float) -> list[float]:
    mean = sum(row) / len(row)
    others = [r for other in REWARDS.tolist() if other != row for r in other]
    return [
        {
            "none": reward,
            "greedy": reward - greedy,
            "running_mean": reward - 0.75,
            "running_mean_inclusive": reward - 0.75,
            "batch_mean": reward - sum(others) / len(others),
            "leave_one_out": reward - sum(r for k, r in enumerate(row) if k != j) / (len(row) - 1),
            "group_mean": reward - mean,
            "group_floor": reward - max(mean, -0.5),
        }[name]
        for j, reward in enumerate(row)
    ]


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_equals_a_plain_loop(name):
    baseline = make_baseline(name, 3)
    for mean in (0.5, 1.0):
        baseline.update(mean)
    greedy = torch.tensor([0.3, -2.0], dtype=torch.float64)
    found = baseline(REWARDS, greedy)
    expected = [plain(name, row, g) for row, g in zip(REWARDS.tolist(), greedy.tolist(), strict=True)]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_batch_mean_of_one_image_is_zero():
    assert make_baseline("batch_mean", 3)(REWARDS[:1]).equal(REWARDS[:1])


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        *((name, {}, "num_generations") for name in ("leave_one_out", "group_mean", "group_floor")),
        ("greedy", {"do_sample": False}, "do_sample"),
        ("median", {}, "'median'"),
    ],
)
def test_baselines_that_are_refused(name, settings, named):
    with pytest.raises(ValueError, match=named):
        make_baseline(name, 1, **settings)


def test_running_mean_is_of_the_past_and_resumes_exactly():
    baseline = RunningMeanBaseline()
    assert baseline(REWARDS).equal(REWARDS)
    for mean in (0.1, 0.2, 0.7):
        baseline.update(mean)
    state = json.loads(json.dumps(baseline.state_dict()))
    resumed = make_baseline("running_mean", 1)
    resumed.load_state_dict(state)
    for one in (baseline, resumed):
        one.update(1 / 3)
    assert baseline.mean == resumed.mean
    assert baseline.mean == pytest.approx((0.1 + 0.2 + 0.7 + 1 / 3) / 4)


B, G, WEIGHTS = 3, 4, [1.0, -0.5]
NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum"}
FIRST = [0.1, 3.0, -2.0, 0.4, 5.0, 5.0, 4.0, 7.5, -1.0, 0.0, 2.0, 9.0]
VALUES = torch.tensor([FIRST, [2.0, 2.0, 2.0, 2.0, 0, 1, 0, 1, 8, -3, 4, 0.5]], dtype=torch.float64).T  # (N, 2)


def column(index: int, values: Tensor, baseline: str | None = None) -> OfContext:
    reward = OfContext(lambda context: values[:, index], f"reward_{index}")
    reward.baseline = baseline
    return reward


def advantages(
    rollouts, *, values: Tensor = VALUES, weights=WEIGHTS, baseline: str = "group_mean", second=None, **kw
) -> list[float]:
    """Advantages of B images with G captions each."""
    names = [None, second][: values.size(1)]
    rewards = WeightedRewards([column(i, values, name) for i, name in enumerate(names)], weights[: values.size(1)])
    used = {name: make_baseline(name, G) for name in {baseline, second or baseline}}
    rows = list(range(len(values) // G))
    context = rollouts.context([f"caption {n}" for n in range(len(values))], rows)
    found, logged = compute_advantages(rewards, used, baseline, context, None, lambda x: x, **kw)
    assert logged.equal(values)
    return found.tolist()


def trl_advantages(rewards: Tensor, weights: list[float], scale_rewards: str, aggregation: str) -> Tensor:
    """The formulas of `GRPOTrainer._generate_and_score_completions` of TRL 1.16, for rewards `(N, R)` that are numbers."""
    if aggregation == "sum_then_normalize":
        total = (rewards * torch.tensor(weights).unsqueeze(0)).nansum(dim=1)
        mean = torch.nanmean(total.view(-1, G), dim=1).repeat_interleave(G, dim=0)
        if scale_rewards == "batch":
            std = nanstd(total).expand_as(total)
        else:
            std = nanstd(total.view(-1, G), dim=1).repeat_interleave(G, dim=0)
        return total - mean if scale_rewards == "none" else (total - mean) / (std + 1e-4)
    grouped = rewards.view(-1, G, rewards.size(1))
    reward_k = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    total = (reward_k.view(-1, rewards.size(1)) * torch.tensor(weights).unsqueeze(0)).nansum(dim=1)
    return (total - torch.nanmean(total)) / (nanstd(total) + 1e-4)


def test_advantages_equal_those_of_trl(rollouts):
    ways = [(scale, "sum_then_normalize") for scale in ("group", "batch", "none")] + [("none", "normalize_then_sum")]
    found = []
    for scale, aggregation in ways:
        found.append(advantages(rollouts, scale_rewards=scale, multi_objective_aggregation=aggregation))
        expected = trl_advantages(VALUES, WEIGHTS, scale, aggregation)
        assert found[-1] == close(expected.tolist(), dtype="float32")  # TRL's deviations are rounded to fp32
    for one, other in itertools.combinations(found, 2):  # negative control
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


def test_scaling_divides_the_advantages_of_any_baseline(rollouts):
    """By the standard deviation of all rewards, whatever is subtracted from each."""
    total = [WEIGHTS[0] * float(one) + WEIGHTS[1] * float(two) for one, two in VALUES]
    spread = [statistics.stdev(total[G * b : G * (b + 1)]) + 1e-4 for b in range(B) for _ in range(G)]
    for names in ({"baseline": "leave_one_out"}, {"baseline": "batch_mean", "second": "group_mean"}):
        plain = advantages(rollouts, **names)
        scaled = advantages(rollouts, **names, scale_rewards="group")
        assert scaled == close([value / one for value, one in zip(plain, spread, strict=True)])


@pytest.mark.parametrize("how", [{"scale_rewards": "batch"}, NORMALIZED])
def test_two_processes_scale_by_the_rewards_of_both(rollouts, how):
    """Each process takes part in every mean, so that the means of both are exchanged in turn."""
    values = VALUES[: 2 * G]
    whole = advantages(rollouts, values=values, **how)
    halves = [values[:G], values[G:]]
    exchanged: list[float] = []
    for _ in range(3):  # a mean needs the means before it; the last pass has all of them
        calls: list[list[float]] = []
        found = []
        for half in halves:
            mine: list[float] = []

            def mean(value: float, mine: list[float] = mine, known: list[float] = exchanged) -> float:
                mine.append(value)
                return known[len(mine) - 1] if len(mine) <= len(known) else value

            rewards = WeightedRewards([column(i, half) for i in range(2)], WEIGHTS)
            places = {"candidates": torch.tensor([0, 1]), "positions": torch.tensor([0])}
            context = rollouts.context([f"caption {n}" for n in range(G)], [0], **places)
            used = {"group_mean": make_baseline("group_mean", G)}
            found += compute_advantages(rewards, used, "group_mean", context, None, mean, **how)[0].tolist()
            calls.append(mine)
        exchanged = [sum(pair) / 2 for pair in zip(*calls, strict=True)]
    assert found == close(whole, ulps=64)


def test_equal_rewards_give_no_gradient(rollouts):
    equal = torch.full((8, 2), 0.25, dtype=torch.float64)
    for how in (*({"scale_rewards": by} for by in ("group", "batch")), NORMALIZED):
        assert advantages(rollouts, values=equal, **how) == [0.0] * 8
