"""Baselines equal plain loops, and scaled advantages TRL's formulas."""

import itertools
import json
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from hf_captionrl.rewards import BASELINES, RunningMeanBaseline, WeightedRewards, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from tests.rewards.conftest import OfContext
from tests.tolerances import close

REWARDS = torch.tensor([[1.0, 2.0, 6.0], [-4.0, -1.0, -1.0]], dtype=torch.float64)


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


def trl_advantages(rewards: Tensor, weights: list[float], scale_rewards: str) -> Tensor:
    """The formulas of `GRPOTrainer._generate_and_score_completions` of TRL 1.16, for rewards `(N, R)`."""
    total = (rewards * torch.tensor(weights).unsqueeze(0)).nansum(dim=1)
    total[torch.isnan(rewards).all(dim=1)] = torch.nan
    mean = torch.nanmean(total.view(-1, G), dim=1).repeat_interleave(G, dim=0)
    if scale_rewards == "batch":
        std = nanstd(total).expand_as(total)
    else:
        std = nanstd(total.view(-1, G), dim=1).repeat_interleave(G, dim=0)
    advantage = total - mean if scale_rewards == "none" else (total - mean) / (std + 1e-4)
    return torch.nan_to_num(advantage, nan=0.0)


WAYS = ("group", "batch", "none")


def test_advantages_equal_those_of_trl(rollouts):
    advantage = []
    for scale in WAYS:
        advantage.append(advantages(rollouts, scale_rewards=scale))
        expected = trl_advantages(VALUES, WEIGHTS, scale)
        assert advantage[-1] == close(expected.tolist(), dtype="float32")  # TRL's deviations are rounded to fp32
    for one, other in itertools.combinations(advantage, 2):  # negative control
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


def test_scaling_divides_the_advantages_of_any_baseline(rollouts):
    """By the standard deviation of all rewards, whatever is subtracted from each."""
    total = [WEIGHTS[0] * float(one) + WEIGHTS[1] * float(two) for one, two in VALUES]
    spread = [statistics.stdev(total[G * b : G * (b + 1)]) + 1e-4 for b in range(B) for _ in range(G)]
    for names in ({"baseline": "leave_one_out"}, {"baseline": "batch_mean", "second": "group_mean"}):
        plain = advantages(rollouts, **names)
        scaled = advantages(rollouts, **names, scale_rewards="group")
        assert scaled == close([value / one for value, one in zip(plain, spread, strict=True)])


# Rewards that are missing: a plain loop over Python's numbers, None where there is no reward


def plain_total(row: list[float | None], columns: list[int], weights: list[float]) -> float | None:
    scored = [weights[column] * value for column in columns if (value := row[column]) is not None]
    return sum(scored) if scored else None


def mean_of(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def spread_of(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.stdev(numbers) + 1e-4 if len(numbers) > 1 else None


def plain_baseline(name: str, sums: list[list[float | None]], b: int, j: int, greedy: list[float | None]) -> Any:
    """What caption j of image b is compared with; None if nothing is left. The mean of one earlier rollout was 0.5."""
    others = [value for image in [*sums[:b], *sums[b + 1 :]] for value in image]
    everything = mean_of([value for image in sums for value in image])
    return {
        "none": 0.0,
        "greedy": greedy[b],
        "running_mean": 0.5,
        "running_mean_inclusive": 0.5 if everything is None else (0.5 + everything) / 2,
        "batch_mean": mean_of(others) or 0.0,
        "leave_one_out": mean_of([*sums[b][:j], *sums[b][j + 1 :]]),
        "group_mean": mean_of(sums[b]),
        "group_floor": max(-0.5, mean_of(sums[b]) or 0.0),
    }[name]


def plain_advantages(
    values: list[list[Any]], greedy: list[list[Any]], weights: list[float], names: list[str], scale: str
) -> list[float]:
    found = [0.0] * len(values)
    groups = [[i for i, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
    # The floor is that of each reward before it is weighted.
    groups = [
        part for group in groups for part in ([[i] for i in group] if names[group[0]] == "group_floor" else [group])
    ]
    for columns in groups:
        name = names[columns[0]]
        used = [1.0] * len(weights) if name == "group_floor" else weights
        sums = [[plain_total(row, columns, used) for row in values[G * b : G * (b + 1)]] for b in range(B)]
        compared = [plain_total(row, columns, used) for row in greedy]
        for b, j in itertools.product(range(B), range(G)):
            reward, baseline = sums[b][j], plain_baseline(name, sums, b, j, compared)
            if reward is not None and baseline is not None:
                found[G * b + j] += (reward - baseline) * (weights[columns[0]] if name == "group_floor" else 1.0)
    totals = [plain_total(row, list(range(len(weights))), weights) for row in values]
    for n in range(len(found)) if scale != "none" else ():
        spread = spread_of(totals if scale == "batch" else totals[n // G * G : n // G * G + G])
        found[n] = 0.0 if spread is None else found[n] / spread
    return found


def missing(seed: int, rows: int, columns: int = 2) -> Tensor:
    """Random rewards `(rows, columns)`, about half of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return values.masked_fill(torch.rand(values.shape, generator=generator) < 0.5, torch.nan)


def as_python(values: Tensor) -> list[list[Any]]:
    return [[None if value != value else value for value in row] for row in values.tolist()]


def with_greedy(rollouts, values: Tensor, greedy: Tensor, names: list[str], **how) -> list[float]:
    """Advantages of a rollout and its greedy captions, after one rollout of mean 0.5."""
    rewards = WeightedRewards([column(i, torch.empty(0), name) for i, name in enumerate(names)], WEIGHTS[: len(names)])
    for i, reward in enumerate(rewards.rewards):
        reward.function = lambda context, i=i: (values if context.group_size == G else greedy)[:, i]
    contexts = [rollouts.context([f"c {n}" for n in range(B * size)], list(range(B))) for size in (G, 1)]
    used = {name: make_baseline(name, G) for name in names}
    for baseline in used.values():
        baseline.update(0.5)
    found, logged = compute_advantages(rewards, used, "none", *contexts, lambda rows: rows, **how)
    assert torch.equal(logged.nan_to_num(99), values.nan_to_num(99))
    return found.tolist()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("names", itertools.combinations_with_replacement(sorted(BASELINES), 2), ids="-".join)
def test_a_caption_without_a_reward_leaves_every_baseline(rollouts, names, scale):
    unscored = 0
    for seed in range(6):
        values, greedy = missing(seed, B * G), missing(100 + seed, B)
        found = with_greedy(rollouts, values, greedy, list(names), scale_rewards=scale)
        expected = plain_advantages(as_python(values), as_python(greedy), WEIGHTS, list(names), scale)
        assert found == close(expected, ulps=64, magnitude=max(map(abs, expected)))
        of_none = values.isnan().all(1)
        unscored += int(of_none.sum())
        assert {value for value, none in zip(found, of_none.tolist(), strict=True) if none} <= {0.0}
    assert unscored > 6


@pytest.mark.parametrize("scale", WAYS)
def test_missing_rewards_count_as_in_trl(rollouts, scale):
    for seed in range(6):
        values = missing(seed, B * G)
        advantage = with_greedy(rollouts, values, values[:B], ["group_mean"] * 2, scale_rewards=scale)
        expected = trl_advantages(values, WEIGHTS, scale).tolist()
        # TRL's deviations of what is nearly equal are rounded to fp32
        assert advantage == close(expected, dtype="float32", magnitude=max(map(abs, expected)))


def test_the_example_of_two_captions_without_a_reward(rollouts):
    values = torch.tensor([[-1.0], [-1.0], [torch.nan], [torch.nan]] * B, dtype=torch.float64)
    for name in ("group_mean", "leave_one_out", "batch_mean"):
        assert with_greedy(rollouts, values, values[:B], [name]) == [0.0] * 4 * B
    as_zeros = with_greedy(rollouts, values.nan_to_num(0.0), values[:B], ["group_mean"])
    assert as_zeros == [-0.5, -0.5, 0.5, 0.5] * B  # the control


def test_a_rollout_without_a_number_is_refused_by_name(rollouts):
    values = torch.full((B * G, 2), torch.nan, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\['reward_0', 'reward_1'\]"):
        with_greedy(rollouts, values, values[:B], ["running_mean", "none"])


def test_a_reward_without_a_number_leaves_the_running_mean(rollouts):
    values = torch.tensor([[1.0, torch.nan]] * (B * G), dtype=torch.float64)
    rewards = WeightedRewards([column(0, values), column(1, values, "running_mean")], WEIGHTS)
    used = {name: make_baseline(name, G) for name in ("none", "running_mean")}
    context = rollouts.context(["c"] * (B * G), list(range(B)))
    assert compute_advantages(rewards, used, "none", context, None, lambda rows: rows)[0].tolist() == [1.0] * (B * G)
    assert used["running_mean"].state_dict() == {"mean": 0.0, "number": 0}
