"""Rewards by name, functions and lists of them, their options in configurations and cards, and weighted sums."""

import dataclasses
import functools
import inspect
import math
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_captionrl.rewards import (
    REWARDS,
    CiderReward,
    CompletionReward,
    SelfRetrieval,
    WeightedRewards,
    resolve_rewards,
)
from hf_captionrl.rewards.base import reward_class
from hf_captionrl.trainers import SelfRetrievalConfig
from tests.rewards.conftest import OfContext


def brevity(completions):
    return [-len(caption) for caption in completions]


class Named:
    def __call__(self, completions):
        return [0.0 for _ in completions]


def test_a_mixed_list_with_weights():
    cider = CiderReward()
    rewards = resolve_rewards(["self_retrieval", (cider, 0.5), brevity, (Named(), 2)])
    assert isinstance(rewards.rewards[0], SelfRetrieval)
    assert rewards.rewards[1] is cider
    assert isinstance(rewards.rewards[2], CompletionReward)
    assert rewards.names == ["self_retrieval", "cider", "brevity", "Named"]
    assert rewards.weights == [1.0, 0.5, 1.0, 2.0]
    assert resolve_rewards(["cider", brevity], [0.75, 0]).weights == [0.75, 0.0]  # still computed and logged
    assert resolve_rewards("self_retrieval").rewards[0] is not rewards.rewards[0]


MODEL = torch.nn.Linear(1, 1)
MODEL.config = {}


@pytest.mark.parametrize(
    ("funcs", "weights", "named"),
    [
        ("cidre", None, "There is no reward 'cidre'"),
        ([], None, "reward_funcs"),
        ([("cider", 1.0)], [1.0], "reward_weights"),
        (["cider", "length"], [1.0], "reward weights"),
        (["cider"], [math.nan], "reward weights"),
        (["cider", "cider"], None, "the same name"),
        (None, None, "NoneType is not a reward"),
        (CiderReward, None, "is not a reward"),
        (MODEL, None, "Linear is not a reward"),
        (lambda completions, /, **kwargs: [0.0], None, "by position only"),
    ],
)
def test_invalid_rewards_are_refused(funcs, weights, named):
    with pytest.raises((ValueError, TypeError), match=named):
        resolve_rewards(funcs, weights)


def test_functions_are_named_and_equal_names_numbered():
    with pytest.raises(ValueError, match="the same name"):
        resolve_rewards([CompletionReward(brevity), CompletionReward(brevity)])
    plain = lambda completions: [0.0]  # noqa: E731
    several = [plain, functools.partial(brevity), brevity, plain, CompletionReward(brevity, name="brevity_2")]
    assert resolve_rewards(several).names == ["<lambda>", "brevity", "brevity_3", "<lambda>_2", "brevity_2"]


SCORER = SimpleNamespace(signature="tiny-clip@main|77")
EXPERIMENTAL = ("claim_f1", "question_oracle", "gallery")
WEIGHTS = {
    "retrieval_weight" if name == "self_retrieval" else f"{name}_weight": name
    for name in REWARDS
    if name not in EXPERIMENTAL
}


def only(tmp_path, weight, **arguments):
    """A configuration with a single reward, and CIDEr where that reward may not stand alone."""
    weights = dict.fromkeys(WEIGHTS, 0.0)
    if not reward_class(WEIGHTS[weight]).is_standalone:
        weights["cider_weight"] = 1.0
    weights[weight] = 0.5
    return SelfRetrievalConfig(str(tmp_path), num_generations=2, use_cpu=True, **weights | arguments)


def test_every_registered_reward_can_be_configured(tmp_path):
    for weight, name in WEIGHTS.items():
        config, reward = only(tmp_path, weight), reward_class(name)
        made = {type(reward): weight for reward, weight in config.make_rewards(scorer=[SCORER])}
        assert made.pop(reward) == 0.5
        assert len(made) == (0 if reward.is_standalone else 1)
        for field in dataclasses.fields(reward):
            if "help" in field.metadata:
                assert getattr(config, field.name) == field.default


def test_the_order_of_the_weighted_sum(tmp_path):
    rewards = [f"{name}=0.25" for name in EXPERIMENTAL]
    config = only(tmp_path, "retrieval_weight", rewards=rewards, **dict.fromkeys(WEIGHTS, 0.25))
    order = "self_retrieval cider diversity claim_f1 question_oracle gallery repetition length truncation".split()
    assert [reward.name for reward, _ in config.make_rewards(scorer=[SCORER])] == order


def test_any_registered_reward_by_name_and_weight(tmp_path):
    config = only(tmp_path, "retrieval_weight", rewards=["claim_f1:credit=claim=2", "question_oracle=0.5", "cider=1"])
    made = config.make_rewards(scorer=[SCORER])
    assert [(reward.name, weight) for reward, weight in made[1:]] == [
        ("claim_f1", 2.0),
        ("question_oracle", 0.5),
        ("cider", 1.0),
    ]
    assert made[1][0].credit == "claim"
    for text in ("claim_f1", "claim_f1=x"):
        with pytest.raises(ValueError, match="rewards"):
            only(tmp_path, "retrieval_weight", rewards=[text]).check()


def fixed(values, name="fixed"):
    return OfContext(lambda context: values, name)


def test_non_finite_rewards_get_the_floor_and_are_counted(rollouts):
    context = rollouts.context(["a", "b", "c"], [0, 1, 2])
    floored = fixed([1.0, math.nan, -math.inf])
    floored.undefined = lambda context: -7.0
    values = WeightedRewards([floored, fixed([0.0, 1.0, 2.0], "fine")])(context)
    assert values.tolist() == [[1, 0], [-7, 1], [-7, 2]]
    assert context.statistics == {"rewards/fixed/undefined": 2.0, "rewards/fine/undefined": 0.0}


def test_one_number_per_caption_without_a_gradient(rollouts):
    values = torch.ones(1, requires_grad=True)
    assert not WeightedRewards([fixed(values * 2)])(rollouts.context(["a"], [0])).requires_grad
    with pytest.raises(ValueError, match=r"'fixed' returned shape \(1, 2\) for 2 captions"):
        WeightedRewards([fixed([[1.0, 2.0]])])(rollouts.context(["a", "b"], [0, 1]))


def test_a_weighted_sum_is_described_for_the_card():
    rewards = resolve_rewards([("self_retrieval", 0.5), "cider", ("diversity", 2), ("length", 0), brevity])
    assert rewards.describe() == (
        "0.5 times the log-probability that the scorer gives the image after reading the caption, plus CIDEr-D with the "
        "end token, plus 2 times the diversity of the captions of an image (the bleu34 distance), plus the reward 'brevity'"
    )


def test_the_example_of_contributing_passes_its_own_tests(rollouts, monkeypatch):
    monkeypatch.setitem(REWARDS, "colour", None)  # so that the name is removed afterwards
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("\n## Add a reward\n")[1].split("\n## ")[0]
    files = re.findall(r"^```python\n# (\S+)\.py\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert [Path(name).parent.as_posix() for name, _ in files] == ["hf_captionrl/rewards", "tests/rewards"]
    for name, source in files:
        module = types.ModuleType(name.replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, f"<{name}>", "exec"), vars(module))
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test(*[rollouts] * len(inspect.signature(test).parameters))
