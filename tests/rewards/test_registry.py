import functools

import pytest
import torch

from hf_captionrl.rewards import REWARDS, CiderReward, CompletionReward, LengthPenalty, SelfRetrieval, resolve_rewards


def brevity(completions):
    return [-len(caption) for caption in completions]


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
    assert isinstance(rewards.rewards[2], CompletionReward)
    assert rewards.names == ["self_retrieval", "cider", "brevity", "beyond_3"]
    assert rewards.weights == [1.0, 0.5, 1.0, 2.0]


def brevity_of(limit):
    def beyond(completions):
        return [0.0 for _ in completions]

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
        (None, None, TypeError, "NoneType is not a reward"),
        ([3], None, TypeError, "int is not a reward"),
        (CiderReward, None, TypeError, "is not a reward"),
    ],
)
def test_invalid_rewards_are_refused(funcs, weights, error, message):
    with pytest.raises(error, match=message):
        resolve_rewards(funcs, weights)


class Named:
    def __call__(self, completions):
        return [0.0 for _ in completions]


def test_functions_are_named_and_equal_names_numbered():
    functions = (brevity, functools.partial(brevity_of(3)), Named())
    assert [resolve_rewards(f).names[0] for f in functions] == ["brevity", "beyond_3", "Named"]
    with pytest.raises(ValueError, match="the same name"):
        resolve_rewards([CompletionReward(brevity), CompletionReward(brevity)])
    plain = lambda completions: [0.0]  # noqa: E731
    several = [plain, functools.partial(brevity), brevity, plain, CompletionReward(brevity, name="brevity_2")]
    assert resolve_rewards(several).names == ["<lambda>", "brevity", "brevity_3", "<lambda>_2", "brevity_2"]


def test_a_model_and_positional_parameters_are_refused():
    model = torch.nn.Linear(1, 1)
    model.config = {}
    with pytest.raises(TypeError, match="Linear is not a reward"):
        resolve_rewards(model)
    with pytest.raises(TypeError, match="by position only"):
        CompletionReward(lambda completions, /, **kwargs: [0.0])
