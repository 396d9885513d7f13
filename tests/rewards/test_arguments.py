"""The options of rewards are fields of configurations, and model cards describe every reward."""

import dataclasses
from types import SimpleNamespace

import pytest
import yaml
from transformers import HfArgumentParser

from hf_captionrl.apps.experiments.self_retrieval import SelfRetrievalRecipeConfig, describe_reward
from hf_captionrl.rewards import REWARDS
from hf_captionrl.trainers import SelfRetrievalConfig

SCORER = SimpleNamespace(signature="tiny-clip@main|77")
WEIGHTS = {"retrieval_weight" if name == "self_retrieval" else f"{name}_weight": name for name in REWARDS}


def only(tmp_path, weight, cls=SelfRetrievalConfig, **arguments):
    """A configuration with a single reward, and CIDEr where that reward may not stand alone."""
    weights = dict.fromkeys(WEIGHTS, 0.0)
    if not REWARDS[WEIGHTS[weight]].is_standalone:
        weights["cider_weight"] = 1.0
    weights[weight] = 0.5
    return cls(str(tmp_path), num_generations=2, use_cpu=True, **weights | arguments)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_model_card_describes_every_registered_reward(tmp_path, weight):
    card = describe_reward(only(tmp_path, weight, SelfRetrievalRecipeConfig), [SCORER])
    assert f"0.5 times {REWARDS[WEIGHTS[weight]]().describe()}".lower() in card.lower()
    everything = only(tmp_path, weight, SelfRetrievalRecipeConfig, **dict.fromkeys(WEIGHTS, 0.25))
    assert describe_reward(everything, [SCORER]).count("0.25 times ") == len(REWARDS)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_registered_reward_can_be_configured(tmp_path, weight):
    config = only(tmp_path, weight)
    reward = REWARDS[WEIGHTS[weight]]
    made = {type(reward): weight for reward, weight in config.make_rewards(scorer=[SCORER])}
    assert made.pop(reward) == 0.5
    assert len(made) == (0 if reward.is_standalone else 1)
    for field in dataclasses.fields(reward):
        if "help" in field.metadata:
            assert getattr(config, field.name) == field.default


def test_the_order_of_the_weighted_sum(tmp_path):
    config = only(tmp_path, "retrieval_weight", **dict.fromkeys(WEIGHTS, 0.25))
    order = ["self_retrieval", "cider", "diversity", "repetition", "length", "truncation"]
    assert [reward.name for reward, _ in config.make_rewards(scorer=[SCORER])] == order


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


BAD = {
    "reward_kind": "logit",
    "similarity_scale": "big",
    "distractor_scope": "world",
    "num_hard_distractors": 0,
    "bank_images": "far",
    "bank_size": 1,
    "bank_batch_size": 1,
    "bank_weighting": "none",
    "scorer_ensemble": "max",
    "cider_frequencies": "test",
    "distance": "hamming",
    "diversity": "some",
    "max_tokens": 0,
    **dict.fromkeys(WEIGHTS, -1),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        SelfRetrievalConfig(str(tmp_path), use_cpu=True, **{name: BAD[name]})


@pytest.mark.parametrize("weights", [{}, {"length_weight": 1.0}])
def test_something_must_be_rewarded(tmp_path, weights):
    with pytest.raises(ValueError, match="retrieval_weight"):
        SelfRetrievalConfig(str(tmp_path), use_cpu=True, retrieval_weight=0.0, **weights)
