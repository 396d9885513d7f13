"""The arguments of configurations come from the rewards, and model cards describe every reward."""

import dataclasses
from types import SimpleNamespace

import pytest
import yaml
from transformers import HfArgumentParser

from hf_captionrl.apps.experiments.self_retrieval import SelfRetrievalRecipeConfig, describe_reward
from hf_captionrl.rewards import REWARDS, Reward, SelfRetrieval, register_reward
from hf_captionrl.rewards.base import reward_arguments
from hf_captionrl.trainers import SelfRetrievalConfig

SCORER = SimpleNamespace(signature="tiny-clip@main|77")


def only(tmp_path, name, cls=SelfRetrievalConfig, **arguments):
    """A configuration with a single reward, and CIDEr where that reward may not stand alone."""
    weights = dict.fromkeys((reward.weight_argument for reward in REWARDS.values()), 0.0)
    if not REWARDS[name].is_standalone:
        weights["cider_weight"] = 1.0
    weights[REWARDS[name].weight_argument] = 0.5
    return cls(str(tmp_path), num_generations=2, use_cpu=True, **weights | arguments)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_model_card_describes_every_registered_reward(tmp_path, name):
    config = only(tmp_path, name, SelfRetrievalRecipeConfig)
    card = describe_reward(config, [SCORER])
    described = REWARDS[name]().describe()
    assert type(REWARDS[name]()).summary
    assert f"0.5 times {described}".lower() in card.lower()
    everything = only(tmp_path, name, SelfRetrievalRecipeConfig, **{r.weight_argument: 0.25 for r in REWARDS.values()})
    assert describe_reward(everything, [SCORER]).count("0.25 times ") == len(REWARDS)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_reward_can_be_configured(tmp_path, name):
    config = only(tmp_path, name)
    made = {type(reward): weight for reward, weight in config.make_rewards(scorer=[SCORER])}
    assert made.pop(REWARDS[name]) == 0.5
    assert len(made) == (0 if REWARDS[name].is_standalone else 1)
    for field in dataclasses.fields(REWARDS[name]):
        if "help" in field.metadata:
            assert getattr(config, field.name) == field.default


def test_arguments_are_parsed_from_command_line_and_yaml(tmp_path):
    words = "--output_dir x --use_cpu --reward_kind cosine --max_tokens 12 --length_weight 0.5 --cider_eos False"
    parser = HfArgumentParser(SelfRetrievalConfig)
    (config,) = parser.parse_args_into_dataclasses(words.split())
    path = tmp_path / "config.yaml"
    settings = {"reward_kind": "cosine", "max_tokens": 12, "length_weight": 0.5, "cider_eos": False}
    path.write_text(yaml.safe_dump({"output_dir": "x", "use_cpu": True, **settings}))
    (other,) = parser.parse_yaml_file(str(path))
    for found in (config, other):
        assert {name: getattr(found, name) for name in settings} == settings
        (retrieval, _), (length, weight) = found.make_rewards()
        assert (retrieval.reward_kind, length.max_tokens, weight) == ("cosine", 12, 0.5)


def test_order_of_the_weighted_sum_does_not_depend_on_the_files():
    assert list(REWARDS) == ["self_retrieval", "cider", "diversity", "repetition", "length", "truncation"]


@pytest.mark.parametrize("reward", REWARDS.values())
def test_negative_weights_are_refused(tmp_path, reward):
    with pytest.raises(ValueError, match=rf"{reward.weight_argument} is -1\. Use 0 or more"):
        SelfRetrievalConfig(str(tmp_path), **{reward.weight_argument: -1})


def test_ambiguous_rewards_are_refused():
    class Plain(Reward):
        name = "plain"

        def __call__(self, context):
            raise NotImplementedError

    with pytest.raises(TypeError, match="Plain is not a dataclass with a summary"):
        register_reward(Plain)
    other = dataclasses.make_dataclass(
        "Other", [], bases=(Plain,), namespace={"name": "self_retrieval", "summary": "another reward"}
    )
    with pytest.raises(ValueError, match=r"SelfRetrieval has the name 'self_retrieval'\. Use another name for Other"):
        register_reward(other)
    with pytest.raises(TypeError, match="Two rewards have an argument"):
        reward_arguments([SelfRetrieval, SelfRetrieval])
    assert REWARDS["self_retrieval"] is SelfRetrieval
