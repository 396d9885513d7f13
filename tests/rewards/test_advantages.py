import json
import math

import pytest
import torch

from hf_captionrl.rewards import BASELINES, RunningMeanBaseline, make_baseline
from tests.tolerances import assert_close

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


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean"])
def test_equal_rewards_give_no_gradient(name):
    assert make_baseline(name, 2)(torch.full((3, 2), 0.25)).abs().max() == 0


def test_batch_mean_of_one_image_is_zero():
    assert make_baseline("batch_mean", 3)(REWARDS[:1]).equal(REWARDS[:1])


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


def test_stateless_baselines_have_an_empty_state():
    baseline = make_baseline("leave_one_out", 2)
    baseline.update(3.0)
    assert baseline.state_dict() == {}
    baseline.load_state_dict({})


def test_each_call_makes_a_new_baseline():
    first = make_baseline("running_mean", 1)
    first.update(5.0)
    assert make_baseline("running_mean", 1).state_dict() == {"mean": 0.0, "number": 0}


def test_unknown_name():
    with pytest.raises(ValueError, match="There is no baseline 'median'"):
        make_baseline("median", 4)


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "group_floor"])
def test_groups_of_one_are_refused(name):
    with pytest.raises(ValueError, match="num_generations=1"):
        make_baseline(name, 1)
    assert make_baseline(name, 2)(torch.tensor([[0.0, 1.0]])).isfinite().all()


def test_greedy_needs_samples_and_greedy_rewards():
    with pytest.raises(ValueError, match="every advantage is 0"):
        make_baseline("greedy", 1, do_sample=False)
    with pytest.raises(ValueError, match="needs the rewards of the greedy captions"):
        make_baseline("greedy", 1)(REWARDS)
    assert not math.isnan(make_baseline("running_mean", 1, do_sample=False)(REWARDS).sum())
