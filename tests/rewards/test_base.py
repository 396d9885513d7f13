import math

import pytest
import torch

from hf_captionrl.rewards import Reward, WeightedRewards
from tests.rewards.of_context import OfContext


class Fixed(Reward):
    def __init__(self, values, name="fixed", floor=0.0):
        self.values, self.name, self.floor = values, name, floor
        self.prepared = 0
        self.calls = 0

    def prepare(self, data):
        self.prepared += 1

    def __call__(self, context):
        self.calls += 1
        return torch.as_tensor(self.values)

    def undefined(self, context):
        return self.floor


def test_columns_are_in_order_and_unweighted(rollouts):
    context = rollouts.context(["a", "b"], [0, 1])
    rewards = WeightedRewards([Fixed([1.0, 2.0]), Fixed([3, 4], "other")], [0.5, 2])
    values = rewards(context)
    assert values.dtype == torch.float64
    assert values.tolist() == [[1, 3], [2, 4]]
    assert rewards.names == ["fixed", "other"]
    assert rewards.weights == [0.5, 2.0]
    assert WeightedRewards([Fixed([1.0])]).weights == [1.0]


def test_every_reward_sees_the_training_data_once(rollouts):
    members = [Fixed([1.0]), Fixed([1.0], "other")]
    WeightedRewards(members).prepare(rollouts.data([["a"]]))
    assert [member.prepared for member in members] == [1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_get_the_floor_and_are_counted(rollouts, bad):
    context = rollouts.context(["a", "b", "c"], [0, 1, 2])
    values = WeightedRewards([Fixed([1.0, bad, bad], floor=-7.0), Fixed([0.0, 1.0, 2.0], "fine")])(context)
    assert values.tolist() == [[1, 0], [-7, 1], [-7, 2]]
    assert context.statistics == {"rewards/fixed/undefined": 2.0, "rewards/fine/undefined": 0.0}


def test_only_some_are_computed(rollouts):
    members = [Fixed([1.0]), Fixed([5.0], "other")]
    assert WeightedRewards(members)(rollouts.context(["a"], [0]), only=[1]).tolist() == [[0, 5]]
    assert [member.calls for member in members] == [0, 1]


def test_rewards_carry_no_gradient(rollouts):
    values = torch.ones(1, requires_grad=True)
    assert not WeightedRewards([OfContext(lambda _: values * 2)])(rollouts.context(["a"], [0])).requires_grad


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([], None, "There is no reward"),
        ([Fixed([1.0])], [1.0, 2.0], "2 reward weights for 1"),
        ([Fixed([1.0])], [math.nan], "Use finite numbers"),
        ([Fixed([1.0])], [math.inf], "Use finite numbers"),
        ([Fixed([1.0]), Fixed([2.0])], None, "the same name"),
    ],
)
def test_invalid_weights_are_refused(rewards, weights, message):
    with pytest.raises(ValueError, match=message):
        WeightedRewards(rewards, weights)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], 1.0])
def test_one_number_per_caption(rollouts, values):
    with pytest.raises(ValueError, match=r"'fixed' returned shape .* for 2 captions"):
        WeightedRewards([Fixed(values)])(rollouts.context(["a", "b"], [0, 1]))


def test_groups_and_empty_captions(rollouts):
    context = rollouts.context(["a cat", "", " . ", "été", "7", "猫"], [4, 5])
    assert context.group_size == 3
    assert context.is_empty.tolist() == [False, True, True, False, False, False]
