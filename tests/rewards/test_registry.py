import pytest

from hf_captionrl.rewards import REWARDS, CiderReward, FunctionReward, LengthPenalty, SelfRetrieval, resolve_rewards


def brevity(context):
    return [-len(caption) for caption in context.captions]


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_name_makes_a_reward_of_that_name(name):
    rewards = resolve_rewards(name)
    assert rewards.names == [name]
    assert rewards.weights == [1.0]
    assert resolve_rewards(name).rewards[0] is not rewards.rewards[0]


def test_a_mixed_list_with_weights():
    cider = CiderReward()
    rewards = resolve_rewards(["self_retrieval", (cider, 0.5), brevity, (brevity_of(3), 2)])
    assert isinstance(rewards.rewards[0], SelfRetrieval)
    assert rewards.rewards[1] is cider
    assert isinstance(rewards.rewards[2], FunctionReward)
    assert rewards.names == ["self_retrieval", "cider", "brevity", "beyond_3"]
    assert rewards.weights == [1.0, 0.5, 1.0, 2.0]


def brevity_of(limit):
    def beyond(context):
        return [0.0 for _ in context.captions]

    beyond.__name__ = f"beyond_{limit}"
    return beyond


def test_weights_as_a_separate_list():
    assert resolve_rewards(["cider", brevity], [0.75, 0.25]).weights == [0.75, 0.25]
    assert resolve_rewards(brevity, [3]).weights == [3.0]
    assert resolve_rewards(LengthPenalty(3)).names == ["length"]


def test_reward_with_weight_0_is_computed():
    """It is still computed and logged."""
    assert resolve_rewards([("cider", 0.0)]).weights == [0.0]


@pytest.mark.parametrize(
    ("funcs", "weights", "error", "message"),
    [
        ("cidre", None, ValueError, "There is no reward 'cidre'"),
        ([], None, ValueError, "There is no reward"),
        ([("cider", 1.0)], [1.0], ValueError, "Pass them once"),
        (["cider", "length"], [1.0], ValueError, "1 reward weights for 2"),
        (["cider", "cider"], None, ValueError, "the same name"),
        (None, None, TypeError, "None is not a reward"),
        ([3], None, TypeError, "3 is not a reward"),
        (CiderReward, None, TypeError, "is not a reward"),
    ],
)
def test_invalid_rewards_are_refused(funcs, weights, error, message):
    with pytest.raises(error, match=message):
        resolve_rewards(funcs, weights)
